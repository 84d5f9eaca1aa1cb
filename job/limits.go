package job

import (
	"errors"
	"fmt"
	"time"
)

// Size sets the number of workers of a job.
type Size struct {
	// NP is the number of slots needed before the first start.
	NP int
	// Min is the smallest number of workers with which training continues. 0: NP.
	Min int
	// Max is the largest number of workers. 0: no bound.
	Max int
	// Spares is how many workers beyond Max wait for a place, in slots that Max leaves free, on
	// other hosts first. If there are any and Max is 0, Max is NP.
	Spares int `json:",omitempty"`
	// Starts is how many workers of a host may start at the same time. A worker counts until it has
	// joined, but at most for 5 s, or for 15 s once another worker has joined. 0: 32.
	Starts int `json:",omitempty"`
	// Elastic lets the world change. Otherwise the job has NP workers, and the first failure ends
	// it.
	Elastic bool
	// TasksOnly: workers run tasks, and do not join a world.
	TasksOnly bool `json:",omitempty"`
	// Stateless: workers have nothing in memory that later ones need. When all are lost for a
	// reason other than a failure of their program, the job waits for slots and starts again.
	Stateless bool `json:",omitempty"`
}

// FailurePolicy selects what is excluded after a worker's failure.
type FailurePolicy uint8

const (
	// BlameSlot excludes the slot of the worker that failed, and its host once all its slots are
	// excluded.
	BlameSlot FailurePolicy = iota
	// BlameHost excludes the whole host at the first failure and stops its other workers, as
	// Horovod does.
	BlameHost
)

// Blame sets the consequences of a failure.
type Blame struct {
	Policy FailurePolicy
	// CooldownMin and CooldownMax bound the time of an exclusion, which doubles from CooldownMin.
	// Both 0: 1 s and 600 s for BlameSlot, for ever for BlameHost.
	CooldownMin, CooldownMax time.Duration
	// ResetLimit is the largest number of resets within any ResetWindow. Nil: no limit.
	ResetLimit *int
	// ResetWindow is the time in which resets count towards ResetLimit. 0: the whole job.
	ResetWindow time.Duration `json:",omitempty"`
	// FailureLimit is the number of consecutive worlds that failures of the program may end without
	// a commit between them. The failures of a machine, or by SIGKILL, do not count. 0: 5;
	// negative: no limit.
	FailureLimit int `json:",omitempty"`
}

// Timeouts bound the driver's waits. Zero fields have the defaults given beside them.
type Timeouts struct {
	DiscoveryInterval time.Duration // 1 s: interval of polls
	Elastic           time.Duration // 600 s: longest wait for enough slots
	Start             time.Duration // 30 s: until a worker's process starts, and then until it joins
	Join              time.Duration // 30 s: of a member without progress towards the next world
	Drain             time.Duration // 30 s: from SIGTERM to SIGKILL of a worker
	Finish            time.Duration // 30 s: from the first worker's done to the last's
	Exit              time.Duration // 5 min: from a worker's done to its exit

	// How long a worker may hold up others until it is reported, and until it is stopped. Negative:
	// for ever.
	StallWarning time.Duration // 5 s
	Stall        time.Duration // 120 s
}

// WithDefaults returns the size with its zero fields filled in, or an error if it is not valid.
func (s Size) WithDefaults() (Size, error) {
	if s.Min == 0 || !s.Elastic {
		s.Min = s.NP
	}
	if !s.Elastic {
		s.Max = s.NP
	}
	if s.Spares > 0 && s.Max == 0 {
		s.Max = s.NP
	}
	if s.Starts <= 0 {
		s.Starts = 32
	}
	switch {
	case s.Spares < 0:
		return s, fmt.Errorf("driver: the number of spare workers is %d; it must be at least 0", s.Spares)
	case s.Spares > 0 && !s.Elastic:
		return s, errors.New("driver: only an elastic job can have spare workers")
	case s.NP < 1:
		return s, fmt.Errorf("driver: a job needs at least one worker, not %d", s.NP)
	case s.Min < 1:
		return s, fmt.Errorf("driver: the minimum number of workers is %d; it must be at least 1", s.Min)
	case s.Min > s.NP:
		return s, fmt.Errorf("driver: the minimum number of workers (%d) exceeds the number for the start (%d)", s.Min, s.NP)
	case s.Max != 0 && s.Max < s.NP:
		return s, fmt.Errorf("driver: the maximum number of workers (%d) is less than the number for the start (%d)", s.Max, s.NP)
	}
	return s, nil
}

// WithDefaults returns b with its zero fields filled in, or an error if it is not valid.
func (b Blame) WithDefaults() (Blame, error) {
	if b.CooldownMin == 0 && b.CooldownMax == 0 && b.Policy == BlameSlot {
		b.CooldownMin, b.CooldownMax = time.Second, 600*time.Second
	}
	if b.CooldownMin < 0 || b.CooldownMax < b.CooldownMin {
		return b, fmt.Errorf("driver: cooldown from %v to %v is not a range", b.CooldownMin, b.CooldownMax)
	}
	if b.ResetLimit != nil && *b.ResetLimit < 0 {
		return b, fmt.Errorf("driver: the reset limit %d is negative", *b.ResetLimit)
	}
	if b.FailureLimit == 0 {
		b.FailureLimit = 5
	}
	if b.ResetWindow < 0 {
		return b, fmt.Errorf("driver: the reset window %v is negative", b.ResetWindow)
	}
	return b, nil
}

// Forever reports whether exclusions never end.
func (b Blame) Forever() bool { return b.CooldownMax == 0 }

// WithDefaults returns t with its zero fields filled in.
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
