package written

import "unsafe"

// A chunk of which much is written between two scans gains nothing from being watched, since it
// will be looked at anyway, and costs a fault for each page. So one that was such twice in a row
// rests: it counts as written to, and none of its pages is protected. After some scans a sample of
// them is, for one; if much of that is written to as well, it rests again, twice as long.
const (
	muchOf   = 4  // more than one page in so many is much
	sampleOf = 16 // one page in so many is in a sample
	restless = 2  // times in a row before the first rest
	longest  = 64 // scans that a rest lasts at least, at most; it may be twice as long, so that not all samples are taken at once
)

// Memory is some bytes that are watched. Whole pages of them are: Edges says what is not.
type Memory struct {
	watcher *Watcher
	bytes   []byte
	base    uintptr // of bytes
	pages   span
	size    int // of a chunk
	chunks  []state
}

// state is what is known of a chunk.
type state struct {
	changed bool // may have been written to since it was kept
	look    int  // where in it, the first time
	written int  // bytes, in the scan under way

	mode mode
	much int // times in a row that much of it was written to
	rest int // scans that its rest lasts still
	wait int // that its last rest has lasted at least
}

// mode is which pages of a chunk are protected after a scan.
type mode uint8

const (
	watched mode = iota // all
	sampled             // some
	resting             // none
)

// Is tells whether b is the memory that is watched.
func (m *Memory) Is(b []byte) bool {
	return unsafe.SliceData(b) == unsafe.SliceData(m.bytes) && len(b) == len(m.bytes)
}

// Edges are how many bytes at the beginning and at the end are not watched, as they share a page
// with other memory: less than a page each.
func (m *Memory) Edges() (head, tail int) {
	return int(m.pages.from - m.base), int(m.base + uintptr(len(m.bytes)) - m.pages.to)
}

// Changed tells whether chunk i may have been written to between when it was kept and the last
// Scan.
func (m *Memory) Changed(i int) bool { return m.chunks[i].changed }

// Look is where in chunk i, in bytes from its beginning, a write is most likely to be found.
func (m *Memory) Look(i int) int { return m.chunks[i].look }

// Keep says that what chunk i held at any time since the last Scan is known to the caller: it has
// changed when it is written to after that Scan.
func (m *Memory) Keep(i int) { m.chunks[i].changed = false }

// Scan takes note of what has been written to, and sees what will be. Every write after it counts
// as one after it; one that is made while it goes on may count as one before. An error says that
// the memory is not watched any more, and nothing is known of it.
func (m *Memory) Scan() error {
	for i := range m.chunks {
		m.chunks[i].written = 0
	}
	// What is read first decides what is protected then; a chunk that has not been written to is
	// protected still.
	if err := m.scan(false, func(c *state) mode { return c.mode }); err != nil {
		return err
	}
	for i := range m.chunks {
		m.chunks[i].decide(i, min(m.size, len(m.bytes)-i*m.size))
	}
	return m.scan(true, func(c *state) mode {
		if c.changed {
			return c.mode
		}
		return resting
	})
}

// decide takes note of what the first half of a scan has found of the chunk i of so many bytes.
func (c *state) decide(i, size int) {
	switch {
	case c.mode == resting:
		c.changed = true
		if c.rest--; c.rest == 0 {
			c.mode = sampled
		}
	case c.mode == sampled && c.written <= size/sampleOf/muchOf:
		c.changed, c.mode, c.much, c.wait = true, watched, 0, 0
	case c.mode == watched && c.written <= size/muchOf:
		c.much, c.wait = 0, 0
	case c.mode == watched && c.much < restless-1:
		c.much++
	default:
		c.wait = min(max(2*c.wait, 2), longest)
		c.changed, c.mode, c.rest = true, resting, c.wait+i%c.wait
	}
}

// scan looks at the pages of the chunks, as many as their modes say, and protects them if it shall.
func (m *Memory) scan(protect bool, of func(*state) mode) error {
	page := m.watcher.page
	for i := 0; i < len(m.chunks); i++ {
		from, to := i*m.size, (i+1)*m.size
		switch of(&m.chunks[i]) {
		case resting:
			continue
		case sampled:
			from += m.size / 2
			to = from + max(m.size/sampleOf, int(page))
		case watched: // with those after it
			for i+1 < len(m.chunks) && of(&m.chunks[i+1]) == watched {
				i++
				to += m.size
			}
		}
		s := span{
			max((m.base+uintptr(from))&^(page-1), m.pages.from),
			min((m.base+uintptr(to)+page-1)&^(page-1), m.pages.to),
		}
		if s.from >= s.to { // nothing but edge
			continue
		}
		if err := m.watcher.kernel.scan(s, protect, m.note); err != nil {
			return err
		}
	}
	return nil
}

// note takes note of pages that have been written to.
func (m *Memory) note(s span) {
	from, to := max(int(s.from)-int(m.base), 0), min(int(s.to)-int(m.base), len(m.bytes))
	for i := from / m.size; i*m.size < to; i++ {
		c := &m.chunks[i]
		a, b := max(from, i*m.size), min(to, (i+1)*m.size)
		if c.written == 0 {
			c.look = a - i*m.size
		}
		c.changed = true
		c.written += b - a
	}
}

// Close ends the watch over the memory.
func (m *Memory) Close() {
	m.watcher.kernel.unregister(m.pages)
	delete(m.watcher.spans, m.pages)
}
