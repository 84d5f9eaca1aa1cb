package shm

// streamLeast is from how many bytes on, of all members together, results that are only copied are
// written past the caches, which would not hold them: no line is read from memory then before it is
// written. What members reduce is in their caches already.
const streamLeast = 32 << 20

// overflow reports whether results of these parts are more than caches hold, for all members.
func (m *Member) overflow(parts [][]byte) bool {
	all := 0
	for _, p := range parts {
		all += len(p)
	}
	return all >= streamLeast/m.members
}

// copyOut copies to a result.
func (m *Member) copyOut(dst, src []byte) int {
	if m.streams {
		return stream(dst, src)
	}
	return copy(dst, src)
}
