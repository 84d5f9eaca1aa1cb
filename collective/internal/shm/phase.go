package shm

import "time"

// Phase is what a member does in an operation.
type Phase int

// The phases. In rounds each comes many times.
const (
	CopyingIn  Phase = iota // to where others can read it
	Waiting                 // for other members
	Reducing                // with the copy into the own result
	CopyingOut              // from where others have put it
	phases
)

// Times are how long each phase has taken.
type Times [phases]time.Duration

// Watch adds the durations of phases to times from now on, which begins with CopyingIn; nil ends
// that and the last phase. No operation may be under way.
func (m *Member) Watch(times *Times) {
	m.in(CopyingIn)
	m.times, m.phase, m.since = times, CopyingIn, time.Now()
}

// in begins a phase, if phases are measured, and returns the one before.
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
