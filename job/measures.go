package job

import "time"

// Measures are the numbers of a job at one moment, for monitoring. Counts not said to cover the
// whole job cover the life of the driver: a driver that takes over counts from 0.
type Measures struct {
	// Status has the state, the sizes, the hosts with their slots, the waits and the goodput. It
	// has no events, and its slots have no What.
	Status Status
	// Resets are the resets whose next world was published, by cause, of the whole job.
	Resets map[Cause]int
	// Discovery describes the source of hosts, Journal the driver's journal, and Workers what the
	// workers report.
	Discovery Discovery
	Journal   Journal
	Workers   Workers
}

// Discovery describes the source of hosts.
type Discovery struct {
	// Stale is how long ago the source last confirmed its list, if its last answer was a failure.
	Stale time.Duration
}

// Journal describes a job's journal.
type Journal struct {
	// Bytes is its size. 0: no journal.
	Bytes int64
	// Behind reports whether it lacks records: the job could not be resumed now.
	Behind bool
	// Failures is how often it could not be written or compacted.
	Failures uint64
}

// Workers are the sums of what workers have reported of themselves, including workers that have
// ended.
type Workers struct {
	// Beats is the number of heartbeats.
	Beats uint64
	// Commits, CommitTime and CommitBytes are sums over all workers.
	Commits     uint64
	CommitTime  time.Duration
	CommitBytes uint64
	Operations  []Operations
	// Ranks are the members of the current world, by rank.
	Ranks []Rank
}

// Operations are collective operations of a kind, a backend and a class of sizes.
type Operations struct {
	Kind, Backend string
	SizeClass     int // as collective.SizeClass has it
	Count         uint64
	Duration      time.Duration
	Bytes         uint64
}

// Rank is what a member of the current world reports.
type Rank struct {
	Host string
	Slot int
	// Heard reports whether it has sent a heartbeat; Age is how long ago the last one came.
	Heard bool
	Age   time.Duration
	// Commits is the number of its last commit in the world; 0: unknown.
	Commits uint64
	// InOperations is the time that the worker has spent in collective operations since it began.
	InOperations time.Duration
	// Straggler is how late the worker comes to operations; nil: unknown.
	Straggler *Straggler
	// Usage is what the worker's processes use; nil: unknown.
	Usage *Usage
	// Figures are the newest numbers that its program has reported.
	Figures []Figure
}
