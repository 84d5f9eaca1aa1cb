package shm

// streamLeast is the size in bytes, of all members together, from which results that are only
// copied bypass the caches, which could not hold them: a line need not be read from memory before
// it is written. Data that members reduce is in their caches already.
const streamLeast = 32 << 20

// overflow reports whether the results of these parts, for all members, exceed the caches.
func (m *Member) overflow(parts [][]byte) bool {
	all := 0
	for _, p := range parts {
		all += len(p)
	}
	return all >= streamLeast/m.members
}

// copyOut copies src to a result, past the caches if m.streams is set, and returns the number of
// bytes.
func (m *Member) copyOut(dst, src []byte) int {
	if m.streams {
		return stream(dst, src)
	}
	return copy(dst, src)
}
