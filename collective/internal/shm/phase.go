package shm

import "time"

// Phase is a phase of an operation on a member.
type Phase int

// The phases. An operation of many rounds has each phase many times.
const (
	CopyingIn  Phase = iota // into memory that others can read
	Waiting                 // for other members
	Reducing                // including the copy into the own result
	CopyingOut              // from memory that others have written
	phases
)

// Times is the duration of each phase.
type Times [phases]time.Duration

// Watch makes the member add the durations of phases to times from now on, beginning with
// CopyingIn. A nil times ends the last phase and the measurement. No operation may be in progress.
func (m *Member) Watch(times *Times) {
	m.in(CopyingIn)
	m.times, m.phase, m.since = times, CopyingIn, time.Now()
}

// in begins a phase, if phases are measured, and returns the previous phase.
func (m *Member) in(p Phase) Phase {
	if m.times == nil {
		return p
	}
	return m.lap(p)
}

func (m *Member) lap(p Phase) Phase {
	now, before := time.Now(), m.phase
	m.times[before] += now.Sub(m.since)
	m.phase, m.since = p, now
	return before
}
