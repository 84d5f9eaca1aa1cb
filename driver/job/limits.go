package job

import (
	"fmt"
	"time"
)

// DefaultStarts is the Size.Starts of a job that names none.
const DefaultStarts = 32

// Size bounds the number of workers.
type Size struct {
	// NP is the number of slots needed before the first start.
	NP int
	// Min is the fewest workers with which training goes on. 0: NP.
	Min int
	// Max is the most workers. 0: no bound.
	Max int
	// Starts is how many workers of one host may start at a time: one counts until it has joined,
	// for 5 s, or for 15 s once another one has joined. 0: 32.
	Starts int `json:",omitempty"`
	// Elastic lets the world change. Otherwise the job has NP workers, and the failure of one ends
	// it.
	Elastic bool
}

// FailurePolicy says what a worker's failure excludes.
type FailurePolicy uint8

const (
	// BlameSlot excludes the slot of the worker that failed, and its host only when all its slots
	// are out.
	BlameSlot FailurePolicy = iota
	// BlameHost excludes the whole host at the first failure and stops its other workers, as
	// Horovod does.
	BlameHost
)

// Blame says what a failure costs.
type Blame struct {
	Policy FailurePolicy
	// CooldownMin and CooldownMax bound the time for which an excluded slot or host stays out; it
	// doubles from CooldownMin. Both 0: 1 s and 600 s for BlameSlot, for ever for BlameHost.
	CooldownMin, CooldownMax time.Duration
	// ResetLimit is the most resets within any ResetWindow. Nil: no limit.
	ResetLimit *int
	// ResetWindow is a span of time. 0: all the time that the job takes.
	ResetWindow time.Duration `json:",omitempty"`
}

// Timeouts bound the driver's waits. A zero field has the default named beside it.
type Timeouts struct {
	DiscoveryInterval time.Duration // 1 s: pause between polls
	Elastic           time.Duration // 600 s: longest wait for enough slots
	Start             time.Duration // 30 s: from a worker's start to its join
	Join              time.Duration // 30 s: from the first worker's join to the last's
	Drain             time.Duration // 30 s: from SIGTERM to SIGKILL of a worker
	Finish            time.Duration // 30 s: from the first worker's done to the last's
	Exit              time.Duration // 5 min: from a worker's done to its exit

	// How long a worker may hold up the others: until it is named, and until it is stopped.
	// Negative: for ever.
	StallWarning time.Duration // 5 s
	Stall        time.Duration // 120 s
}

// WithDefaults returns the size with its zero fields filled, or what is wrong with it.
func (s Size) WithDefaults() (Size, error) {
	if s.Min == 0 || !s.Elastic {
		s.Min = s.NP
	}
	if !s.Elastic {
		s.Max = s.NP
	}
	if s.Starts <= 0 {
		s.Starts = DefaultStarts
	}
	switch {
	case s.NP < 1:
		return s, fmt.Errorf("driver: a job needs at least one worker, not %d", s.NP)
	case s.Min < 1:
		return s, fmt.Errorf("driver: at least one worker is needed to go on, not %d", s.Min)
	case s.Min > s.NP:
		return s, fmt.Errorf("driver: the fewest workers (%d) exceed those of the start (%d)", s.Min, s.NP)
	case s.Max != 0 && s.Max < s.NP:
		return s, fmt.Errorf("driver: the most workers (%d) are fewer than those of the start (%d)", s.Max, s.NP)
	}
	return s, nil
}

// WithDefaults returns b with its zero fields filled, or what is wrong with it.
func (b Blame) WithDefaults() (Blame, error) {
	if b.CooldownMin == 0 && b.CooldownMax == 0 && b.Policy == BlameSlot {
		b.CooldownMin, b.CooldownMax = time.Second, 600*time.Second
	}
	if b.CooldownMin < 0 || b.CooldownMax < b.CooldownMin {
		return b, fmt.Errorf("driver: cooldown from %v to %v is not a range", b.CooldownMin, b.CooldownMax)
	}
	if b.ResetLimit != nil && *b.ResetLimit < 0 {
		return b, fmt.Errorf("driver: a reset limit of %d cannot be kept", *b.ResetLimit)
	}
	if b.ResetWindow < 0 {
		return b, fmt.Errorf("driver: %v is not a window for resets", b.ResetWindow)
	}
	return b, nil
}

// Forever tells whether an exclusion has no end.
func (b Blame) Forever() bool { return b.CooldownMax == 0 }

// WithDefaults returns t with its zero fields filled.
func (t Timeouts) WithDefaults() Timeouts {
	for _, d := range []struct {
		field *time.Duration
		def   time.Duration
	}{
		{&t.DiscoveryInterval, time.Second}, {&t.Elastic, 600 * time.Second}, {&t.Start, 30 * time.Second},
		{&t.Join, 30 * time.Second}, {&t.Drain, 30 * time.Second}, {&t.Finish, 30 * time.Second},
		{&t.Exit, 5 * time.Minute},
		{&t.StallWarning, 5 * time.Second}, {&t.Stall, 120 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.def
		}
	}
	return t
}
