package dirtypages

import "unsafe"

// Watching does not help for a chunk that is mostly rewritten between two scans: it has to be read
// anyway, and each page costs a fault. After two such scans in a row the chunk rests: it counts as
// changed, and none of its pages is protected. Some scans later, a sample of its pages is protected
// for one scan. If much of the sample is rewritten too, the chunk rests again, for twice as long.
const (
	muchOf   = 4  // a fraction of more than 1/muchOf of the pages is much
	sampleOf = 16 // a sample has 1/sampleOf of the pages
	restless = 2  // scans in a row before the first rest
	longest  = 64 // maximum of state.wait; a rest is up to twice as long, so that samples are spread over scans
)

// Memory is a watched range of bytes. Only whole pages are watched; see Edges.
type Memory struct {
	watcher *Watcher
	bytes   []byte
	base    uintptr // of bytes
	pages   span
	size    int // of a chunk in bytes
	chunks  []state
	calm    bool // see WatchCalm
}

// state is the state of a chunk.
type state struct {
	changed bool // may have been written to since Keep
	look    int  // offset of the first write
	written int  // bytes, in the current scan

	mode mode
	much int // scans in a row in which much was written
	rest int // remaining scans of the rest
	wait int // minimum scans of the last rest

	quiet int // for calm memory: unchanged copies in a row while resting, scans while watched
}

// mode says which pages of a chunk are protected after a scan.
type mode uint8

const (
	watched mode = iota // all
	sampled             // some
	resting             // none
	arming              // all, from the next scan on
)

// Chunks of calm memory rest until they have not changed for some time. A chunk that is written to
// while it is watched costs a fault for each page that is written, at most 4 times what comparing
// it once costs, and rests again: for twice as long as before if it was watched for fewer than
// worthwhile scans.
const (
	worthwhile = 8
	mostQuiet  = 64
)

// Is reports whether b is the watched memory.
func (m *Memory) Is(b []byte) bool {
	return unsafe.SliceData(b) == unsafe.SliceData(m.bytes) && len(b) == len(m.bytes)
}

// Edges returns the number of bytes at the beginning and at the end that are not watched, because
// they share a page with other memory. Each is less than a page.
func (m *Memory) Edges() (head, tail int) {
	return int(m.pages.from - m.base), int(m.base + uintptr(len(m.bytes)) - m.pages.to)
}

// Changed reports whether chunk i may have been written to between its Keep and the last Scan.
func (m *Memory) Changed(i int) bool { return m.chunks[i].changed }

// Look returns the offset in chunk i at which a write is most likely.
func (m *Memory) Look(i int) int { return m.chunks[i].look }

// Keep records that the caller has copied chunk i since the last Scan, so that only a write after
// that Scan makes it changed again. same means that the chunk equals the copy before; only memory
// of WatchCalm uses that.
func (m *Memory) Keep(i int, same bool) {
	c := &m.chunks[i]
	c.changed = false
	if !m.calm || c.mode != resting {
		return
	}
	if c.quiet++; !same {
		c.quiet = 0
	} else if c.quiet > c.wait {
		c.mode, c.quiet = arming, 0
	}
}

// Arm makes the next Scan protect chunk i of calm memory, because it is known to change rarely.
func (m *Memory) Arm(i int) {
	if c := &m.chunks[i]; m.calm && c.mode == resting {
		c.mode, c.quiet = arming, 0
	}
}

// Resting reports whether no page of the memory is protected, so that changes can only be found by
// reading.
func (m *Memory) Resting() bool {
	for i := range m.chunks {
		if m.chunks[i].mode != resting {
			return false
		}
	}
	return true
}

// Scan updates Changed and Look, and protects memory again. A write after it counts for the next
// Scan; a concurrent write may count for this one. After an error the memory is no longer watched,
// and nothing is known about it.
func (m *Memory) Scan() error {
	if m.calm && m.Resting() {
		for i := range m.chunks {
			m.chunks[i].changed = true
		}
		return nil
	}
	for i := range m.chunks {
		m.chunks[i].written = 0
	}
	// The result of this pass decides what the next one protects. Chunks without a write are still
	// protected.
	if err := m.scan(false, func(c *state) mode { return c.mode }); err != nil {
		return err
	}
	for i := range m.chunks {
		if m.calm {
			m.chunks[i].decideCalm()
		} else {
			m.chunks[i].decide(i, min(m.size, len(m.bytes)-i*m.size))
		}
	}
	return m.scan(true, func(c *state) mode {
		if c.changed {
			return c.mode
		}
		return resting
	})
}

// decideCalm is like decide, for a chunk of calm memory.
func (c *state) decideCalm() {
	switch {
	case c.mode == resting:
		c.changed = true
	case c.mode == arming:
		c.changed, c.mode = true, watched
	case c.written == 0:
		c.quiet++
	default:
		if c.quiet >= worthwhile {
			c.wait = 0
		} else {
			c.wait = min(2*c.wait+1, mostQuiet)
		}
		c.mode, c.quiet = resting, 0
	}
}

// decide updates the mode of chunk i, of size bytes, after the first pass of a scan.
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

// scan reads the pages that the chunks' modes select, and protects them if protect is set.
func (m *Memory) scan(protect bool, of func(*state) mode) error {
	page := m.watcher.page
	for i := 0; i < len(m.chunks); i++ {
		from, to := i*m.size, (i+1)*m.size
		switch of(&m.chunks[i]) {
		case resting, arming:
			continue
		case sampled:
			from += m.size / 2
			to = from + max(m.size/sampleOf, int(page))
		case watched: // merged with adjacent watched chunks
			for i+1 < len(m.chunks) && of(&m.chunks[i+1]) == watched {
				i++
				to += m.size
			}
		}
		s := span{
			max((m.base+uintptr(from))&^(page-1), m.pages.from),
			min((m.base+uintptr(to)+page-1)&^(page-1), m.pages.to),
		}
		if s.from >= s.to { // only unwatched edges
			continue
		}
		if err := m.watcher.kernel.scan(s, protect, m.note); err != nil {
			return err
		}
	}
	return nil
}

// note records a span of written pages.
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

// Close stops watching the memory.
func (m *Memory) Close() {
	m.watcher.kernel.unregister(m.pages)
	delete(m.watcher.spans, m.pages)
}
