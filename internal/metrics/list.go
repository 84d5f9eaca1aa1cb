// Package metrics serves the metrics of a driver and of an agent to Prometheus.
//
// One list of all metrics is the source of the collectors, of the Grafana dashboard and of
// deploy/prometheus/metrics.txt. One list of alarms is the source of the rules for Prometheus and
// of their tests.
package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
)

// kind is the kind of a metric in Prometheus.
type kind uint8

// The kinds.
const (
	gauge kind = iota
	counter
	histogram // native, with classic buckets for a Prometheus that does not scrape native ones
)

// String returns "gauge", "counter" or "histogram".
func (k kind) String() string { return [...]string{"gauge", "counter", "histogram"}[k] }

// section is the part of a job or of a cluster that metrics are about.
type section string

// The sections, in the order of the dashboard.
const (
	jobSection     section = "Job"
	driverSection  section = "Driver"
	workersSection section = "Workers"
	ranksSection   section = "Ranks"
	agentSection   section = "Agent"
)

// mostRanks is the size of the largest world whose ranks have their own series. For a larger world,
// the section of ranks is empty; the section of workers has sums and extremes for every size.
const mostRanks = 512

// metric is one metric.
type metric struct {
	Name string
	Kind kind
	// Help is one sentence for people, without a full stop.
	Help   string
	Labels []string
	Of     section
	// Buckets are the classic buckets of a histogram.
	Buckets []float64
	// Unit is the unit of the values, or of a counter's increase per second, as Grafana names it.
	Unit string
	// Query, if not empty, replaces the dashboard's usual expression for the kind, and Legend names
	// its series.
	Query, Legend string

	desc *prometheus.Desc
}

var list []*metric

func define(m metric) *metric {
	m.desc = prometheus.NewDesc(m.Name, m.Help, m.Labels, nil)
	list = append(list, &m)
	return &m
}

// The classic buckets.
var (
	recoveryBuckets = []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}
	delayBuckets    = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10}
)

// The metrics of a job.
var (
	jobInfo = define(metric{Name: "hvdrun_job_info", Of: jobSection, Labels: []string{"run", "version"},
		Help: "The job's run id and the version of hvdrun; the value is 1", Legend: "{{run}} {{version}}"})
	jobStart = define(metric{Name: "hvdrun_job_start_time_seconds", Of: jobSection, Unit: "dateTimeAsIso",
		Help: "When the job began, in seconds since 1970", Query: "hvdrun_job_start_time_seconds{job=~\"$job\",instance=~\"$instance\"} * 1000"})
	jobState = define(metric{Name: "hvdrun_job_state", Of: jobSection, Labels: []string{"state"},
		Help: "1 for the job's state, 0 for the others, until the job ends"})
	jobSeconds = define(metric{Name: "hvdrun_job_seconds_total", Kind: counter, Of: jobSection, Labels: []string{"part"}, Unit: "percentunit",
		Help: "What the time of the whole job was spent on; the parts add up to it"})
	jobStalled = define(metric{Name: "hvdrun_job_stalled_seconds_total", Kind: counter, Of: jobSection, Labels: []string{"host", "slot"}, Unit: "percentunit",
		Help: "Time for which workers of a slot held up the others, of the eight slots with the most"})
	worldSize = define(metric{Name: "hvdrun_world_size", Of: jobSection, Unit: "short",
		Help: "Workers in the current world"})
	worldGeneration = define(metric{Name: "hvdrun_world_generation", Of: jobSection, Unit: "short",
		Help: "Generation of the current world; 0 before the first"})
	jobCommits = define(metric{Name: "hvdrun_job_commits", Of: jobSection, Unit: "short",
		Help: "Number of the job's last commit, by the heartbeats"})
	sizeNeeded = define(metric{Name: "hvdrun_world_size_needed", Of: jobSection, Labels: []string{"for"}, Unit: "short",
		Help: "Workers that the job needs: for its start, at least, and at most (0: no bound)"})
	jobHosts = define(metric{Name: "hvdrun_job_hosts", Of: jobSection, Labels: []string{"state"}, Unit: "short",
		Help: "Hosts by state: listed, draining, or unlisted with workers that have not ended"})
	jobSlots = define(metric{Name: "hvdrun_job_slots", Of: jobSection, Labels: []string{"state"}, Unit: "short",
		Help: "Slots by state, as hvdrun status shows it"})
	resets = define(metric{Name: "hvdrun_resets_total", Kind: counter, Of: jobSection, Labels: []string{"cause"}, Unit: "short",
		Help: "Resets after which a world was published, of the whole job, by cause"})
	recovery = define(metric{Name: "hvdrun_recovery_seconds", Kind: histogram, Of: jobSection, Labels: []string{"cause"}, Unit: "s", Buckets: recoveryBuckets,
		Help: "Time from when a world was left, or the job began, until the first commit in the next one"})
)

// The metrics of a driver.
var (
	workerExits = define(metric{Name: "hvdrun_worker_exits_total", Kind: counter, Of: driverSection, Labels: []string{"cause"}, Unit: "short",
		Help: "Workers that have ended, by cause: done, left, failed or stopped"})
	workerStarts = define(metric{Name: "hvdrun_worker_starts_total", Kind: counter, Of: driverSection, Unit: "short",
		Help: "Workers that were started"})
	exclusions = define(metric{Name: "hvdrun_exclusions_total", Kind: counter, Of: driverSection, Unit: "short",
		Help: "Exclusions of slots and hosts"})
	stalls = define(metric{Name: "hvdrun_stalls_total", Kind: counter, Of: driverSection, Unit: "short",
		Help: "Times that a worker was reported to hold up the others, or all to wait for each other"})
	notifications = define(metric{Name: "hvdrun_notifications_total", Kind: counter, Of: driverSection, Labels: []string{"change"}, Unit: "short",
		Help: "Notifications to the workers that the hosts have changed: added, removed, mixed, or none if a change was reverted"})
	notificationDelay = define(metric{Name: "hvdrun_notification_delay_seconds", Kind: histogram, Of: driverSection, Unit: "s", Buckets: delayBuckets,
		Help: "Time until a worker has acknowledged such a notification"})
	discoveryLists = define(metric{Name: "hvdrun_discovery_lists_total", Kind: counter, Of: driverSection, Unit: "short",
		Help: "Lists of hosts that differed from the one before"})
	discoveryFailures = define(metric{Name: "hvdrun_discovery_failures_total", Kind: counter, Of: driverSection, Unit: "short",
		Help: "Failures of the source of hosts"})
	discoveryStale = define(metric{Name: "hvdrun_discovery_stale_seconds", Of: driverSection, Unit: "s",
		Help: "How long ago the source of hosts last confirmed its list, while it fails; 0 while it does not"})
	journalBytes = define(metric{Name: "hvdrun_journal_bytes", Of: driverSection, Unit: "bytes",
		Help: "Size of the job's journal"})
	journalSync = define(metric{Name: "hvdrun_journal_sync_seconds", Kind: histogram, Of: driverSection, Unit: "s", Buckets: delayBuckets,
		Help: "Time until the journal was on the disk"})
	journalBehind = define(metric{Name: "hvdrun_journal_behind", Of: driverSection, Unit: "bool",
		Help: "1 if the journal lacks records, so that the job could not be resumed; else 0"})
	journalFailures = define(metric{Name: "hvdrun_journal_failures_total", Kind: counter, Of: driverSection, Unit: "short",
		Help: "Times that the journal could not be written or compacted"})
	waits = define(metric{Name: "hvdrun_waits", Of: driverSection, Unit: "short",
		Help: "Conditions that the driver waits for, as hvdrun status shows them"})
	waitLeft = define(metric{Name: "hvdrun_wait_left_seconds", Of: driverSection, Unit: "s",
		Help: "Time left of the wait that ends first; 0 without a wait"})
	beats = define(metric{Name: "hvdrun_worker_beats_total", Kind: counter, Of: driverSection, Unit: "short",
		Help: "Heartbeats of workers"})
)

// The metrics of the workers of a job, as sums and extremes.
var (
	commits = define(metric{Name: "hvdrun_worker_commits_total", Kind: counter, Of: workersSection, Unit: "short",
		Help: "Commits, summed over the workers"})
	commitSeconds = define(metric{Name: "hvdrun_worker_commit_seconds_total", Kind: counter, Of: workersSection, Unit: "s",
		Help:   "Time that workers spent in commits, waits for other ranks included",
		Query:  "rate(hvdrun_worker_commit_seconds_total{job=~\"$job\",instance=~\"$instance\"}[$__rate_interval]) / rate(hvdrun_worker_commits_total{job=~\"$job\",instance=~\"$instance\"}[$__rate_interval])",
		Legend: "each commit"})
	commitBytes = define(metric{Name: "hvdrun_worker_commit_bytes_total", Kind: counter, Of: workersSection, Unit: "Bps",
		Help: "Bytes of tensors that commits compared, to copy those that had changed"})
	operations = define(metric{Name: "hvdrun_collective_operations_total", Kind: counter, Of: workersSection, Labels: []string{"kind", "size", "backend"}, Unit: "ops",
		Help: "Collective operations, summed over the workers; the size is the upper bound of the size class of the worker's tensor"})
	operationSeconds = define(metric{Name: "hvdrun_collective_seconds_total", Kind: counter, Of: workersSection, Labels: []string{"kind", "size", "backend"}, Unit: "percentunit",
		Help: "Time that workers spent in collective operations, waits for other ranks included; of AllReduces of less than 1 KiB within a host, one in 16 is timed and counts for all"})
	operationBytes = define(metric{Name: "hvdrun_collective_bytes_total", Kind: counter, Of: workersSection, Labels: []string{"kind", "size", "backend"}, Unit: "Bps",
		Help: "Bytes of the workers' tensors in collective operations"})
	beatAgeMax = define(metric{Name: "hvdrun_worker_beat_age_max_seconds", Of: workersSection, Unit: "s",
		Help: "Age of the oldest last heartbeat of a rank of the world"})
	commitsSpread = define(metric{Name: "hvdrun_worker_commits_spread", Of: workersSection, Unit: "short",
		Help: "Difference between the largest and the smallest number of the ranks' last commits, by their heartbeats"})
	lateMax = define(metric{Name: "hvdrun_worker_late_max_seconds", Of: workersSection, Unit: "s",
		Help: "The largest hvdrun_rank_late_seconds of a rank, in a world of any size"})
	memoryShort = define(metric{Name: "hvdrun_worker_memory_short", Of: workersSection, Unit: "short",
		Help: "Ranks that have less than a tenth of their memory left"})
)

// The metrics of single ranks of a world of at most mostRanks.
var (
	rankCommits = define(metric{Name: "hvdrun_rank_commits", Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "short",
		Help: "Number of the rank's last commit in the world"})
	rankBeatAge = define(metric{Name: "hvdrun_rank_beat_age_seconds", Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "s",
		Help: "Age of the rank's last heartbeat"})
	rankSeconds = define(metric{Name: "hvdrun_rank_collective_seconds_total", Kind: counter, Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "percentunit",
		Help: "Time that the rank's worker spent in collective operations: one that holds up the others spends less"})
	rankLast = define(metric{Name: "hvdrun_rank_last_ratio", Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "percentunit",
		Help: "Share of the operations of the last minutes to which the rank came last, without those to which all came within a millisecond"})
	rankLate = define(metric{Name: "hvdrun_rank_late_seconds", Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "s",
		Help: "How much later than the median rank the rank came to operations of the last minutes, on average"})
	rankProcessors = define(metric{Name: "hvdrun_rank_processors", Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "short",
		Help: "Processors that the processes of the rank's worker kept busy between its last two heartbeats"})
	rankResident = define(metric{Name: "hvdrun_rank_resident_bytes", Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "bytes",
		Help: "Resident memory of the processes of the rank's worker"})
	rankMemoryUsed = define(metric{Name: "hvdrun_rank_memory_used_bytes", Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "bytes",
		Help: "Used bytes of the memory that limits the rank's worker most: its machine's, or that of a control group"})
	rankMemoryLimit = define(metric{Name: "hvdrun_rank_memory_limit_bytes", Of: ranksSection, Labels: []string{"rank", "host", "slot"}, Unit: "bytes",
		Help: "Size of that memory; when it is full, the kernel ends processes"})
	rankFigure = define(metric{Name: "hvdrun_rank_figure", Of: ranksSection, Labels: []string{"rank", "host", "slot", "name"}, Unit: "short",
		Help: "The newest number of that name which the rank's program has reported", Legend: "{{name}} of rank {{rank}}"})
)

// The metrics of an agent.
var (
	agentInfo = define(metric{Name: "hvdrun_agent_info", Of: agentSection, Labels: []string{"host", "version"},
		Help: "The agent's host and the version of hvdrun; the value is 1", Legend: "{{host}} {{version}}"})
	agentSlots = define(metric{Name: "hvdrun_agent_slots", Of: agentSection, Labels: []string{"state"}, Unit: "short",
		Help: "Slots of the host: taken by a worker, free, or bad because the device has failed"})
	agentDrivers = define(metric{Name: "hvdrun_agent_drivers", Of: agentSection, Labels: []string{"state"}, Unit: "short",
		Help: "Jobs whose drivers have a session with the agent: connected, or away"})
	agentDraining = define(metric{Name: "hvdrun_agent_draining", Of: agentSection, Unit: "bool",
		Help: "1 if the agent is stopping and starts no more workers; else 0"})
	agentMembers = define(metric{Name: "hvdrun_agent_members", Of: agentSection, Unit: "short",
		Help: "Members of the cluster that the agent knows, itself included; 0 for an agent of one job"})
	agentStarts = define(metric{Name: "hvdrun_agent_worker_starts_total", Kind: counter, Of: agentSection, Unit: "short",
		Help: "Workers that the agent has started"})
	agentEnds = define(metric{Name: "hvdrun_agent_worker_ends_total", Kind: counter, Of: agentSection, Unit: "short",
		Help: "Workers of the agent that have ended"})
	agentUndelivered = define(metric{Name: "hvdrun_agent_undelivered_events", Of: agentSection, Unit: "short",
		Help: "Events that drivers have not acknowledged"})
)
