// Package metrics serves the metrics of a driver and of an agent to Prometheus.
//
// One list of all metrics is the source of the collectors, of the Grafana dashboard and of
// deploy/prometheus/metrics.txt. One list of alarms is the source of the rules for Prometheus and
// of the table in docs/metrics.md.
package metrics

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// Kind is the kind of a metric in Prometheus.
type Kind uint8

// The kinds.
const (
	Gauge Kind = iota
	Counter
	Histogram // native, with classic buckets for a Prometheus that does not scrape native ones
)

// String returns "gauge", "counter" or "histogram".
func (k Kind) String() string { return [...]string{"gauge", "counter", "histogram"}[k] }

// Section is the part of a job or of a cluster that metrics are about.
type Section string

// The sections, in the order of the dashboard.
const (
	OfJob     Section = "Job"
	OfDriver  Section = "Driver"
	OfWorkers Section = "Workers"
	OfRanks   Section = "Ranks"
	OfAgent   Section = "Agent"
)

// Sections returns all sections in their order.
func Sections() []Section { return []Section{OfJob, OfDriver, OfWorkers, OfRanks, OfAgent} }

// mostRanks is the largest world whose ranks have series of their own. For a larger world the
// section OfRanks is empty; the sums and extremes of OfWorkers cover worlds of every size.
const mostRanks = 512

// Metric is one metric.
type Metric struct {
	Name string
	Kind Kind
	// Help is one sentence for people, without a full stop.
	Help   string
	Labels []string
	Of     Section
	// Buckets are the classic buckets of a Histogram.
	Buckets []float64
	// Unit is the unit of the values, or of a counter's increase per second, as Grafana names it.
	Unit string
	// Query, if not empty, replaces the dashboard's usual expression for the kind, and Legend names
	// its series.
	Query, Legend string

	desc *prometheus.Desc
}

var list []*Metric

// All returns all metrics, in the order of the sections and of the table.
func All() []*Metric { return slices.Clone(list) }

func define(m Metric) *Metric {
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
	jobInfo = define(Metric{Name: "hvdrun_job_info", Of: OfJob, Labels: []string{"run", "version"},
		Help: "The job's run id and the version of hvdrun; the value is 1", Legend: "{{run}} {{version}}"})
	jobStart = define(Metric{Name: "hvdrun_job_start_time_seconds", Of: OfJob, Unit: "dateTimeAsIso",
		Help: "When the job began, in seconds since 1970", Query: "hvdrun_job_start_time_seconds{job=~\"$job\",instance=~\"$instance\"} * 1000"})
	jobState = define(Metric{Name: "hvdrun_job_state", Of: OfJob, Labels: []string{"state"},
		Help: "1 for the state in which the job is until it ends, 0 for the others"})
	jobSeconds = define(Metric{Name: "hvdrun_job_seconds_total", Kind: Counter, Of: OfJob, Labels: []string{"part"}, Unit: "percentunit",
		Help: "What the job's time was spent on, of the whole job; the parts add up to its time"})
	jobStalled = define(Metric{Name: "hvdrun_job_stalled_seconds_total", Kind: Counter, Of: OfJob, Labels: []string{"host", "slot"}, Unit: "percentunit",
		Help: "Time for which workers of a slot held up the others, of the eight slots with the most"})
	worldSize = define(Metric{Name: "hvdrun_world_size", Of: OfJob, Unit: "short",
		Help: "Workers in the current world"})
	worldGeneration = define(Metric{Name: "hvdrun_world_generation", Of: OfJob, Unit: "short",
		Help: "Generation of the current world; 0 before the first"})
	jobCommits = define(Metric{Name: "hvdrun_job_commits", Of: OfJob, Unit: "short",
		Help: "Number of the job's last commit, by the heartbeats"})
	sizeNeeded = define(Metric{Name: "hvdrun_world_size_needed", Of: OfJob, Labels: []string{"for"}, Unit: "short",
		Help: "Workers that the job needs: for its start, at least, and at most (0: no bound)"})
	jobHosts = define(Metric{Name: "hvdrun_job_hosts", Of: OfJob, Labels: []string{"state"}, Unit: "short",
		Help: "Hosts by state: listed, draining, or unlisted with workers that have not ended"})
	jobSlots = define(Metric{Name: "hvdrun_job_slots", Of: OfJob, Labels: []string{"state"}, Unit: "short",
		Help: "Slots by state, as hvdrun status shows it"})
	resets = define(Metric{Name: "hvdrun_resets_total", Kind: Counter, Of: OfJob, Labels: []string{"cause"}, Unit: "short",
		Help: "Resets after which a world was published, of the whole job, by cause"})
	recovery = define(Metric{Name: "hvdrun_recovery_seconds", Kind: Histogram, Of: OfJob, Labels: []string{"cause"}, Unit: "s", Buckets: recoveryBuckets,
		Help: "Time from when a world was left, or the job began, until the first commit in the next one"})
)

// The metrics of a driver.
var (
	workerExits = define(Metric{Name: "hvdrun_worker_exits_total", Kind: Counter, Of: OfDriver, Labels: []string{"cause"}, Unit: "short",
		Help: "Workers that have ended, by cause: done, left, failed or stopped"})
	workerStarts = define(Metric{Name: "hvdrun_worker_starts_total", Kind: Counter, Of: OfDriver, Unit: "short",
		Help: "Workers that were started"})
	exclusions = define(Metric{Name: "hvdrun_exclusions_total", Kind: Counter, Of: OfDriver, Unit: "short",
		Help: "Exclusions of slots and hosts"})
	stalls = define(Metric{Name: "hvdrun_stalls_total", Kind: Counter, Of: OfDriver, Unit: "short",
		Help: "Times that a worker was reported to hold up the others, or all to wait for each other"})
	notifications = define(Metric{Name: "hvdrun_notifications_total", Kind: Counter, Of: OfDriver, Labels: []string{"change"}, Unit: "short",
		Help: "Notifications of the workers that the hosts have changed: added, removed, mixed, or none if a change was reverted"})
	notificationDelay = define(Metric{Name: "hvdrun_notification_delay_seconds", Kind: Histogram, Of: OfDriver, Unit: "s", Buckets: delayBuckets,
		Help: "Time until a worker has acknowledged such a notification"})
	discoveryLists = define(Metric{Name: "hvdrun_discovery_lists_total", Kind: Counter, Of: OfDriver, Unit: "short",
		Help: "Lists of hosts that differed from the one before"})
	discoveryFailures = define(Metric{Name: "hvdrun_discovery_failures_total", Kind: Counter, Of: OfDriver, Unit: "short",
		Help: "Failures of the source of hosts"})
	discoveryStale = define(Metric{Name: "hvdrun_discovery_stale_seconds", Of: OfDriver, Unit: "s",
		Help: "How long ago the source of hosts last confirmed its list, while it fails; 0 while it does not"})
	journalBytes = define(Metric{Name: "hvdrun_journal_bytes", Of: OfDriver, Unit: "bytes",
		Help: "Size of the job's journal"})
	journalSync = define(Metric{Name: "hvdrun_journal_sync_seconds", Kind: Histogram, Of: OfDriver, Unit: "s", Buckets: delayBuckets,
		Help: "Time until the journal was on the disk"})
	journalBehind = define(Metric{Name: "hvdrun_journal_behind", Of: OfDriver, Unit: "bool",
		Help: "1 if the journal lacks records, so that the job could not be resumed; else 0"})
	journalFailures = define(Metric{Name: "hvdrun_journal_failures_total", Kind: Counter, Of: OfDriver, Unit: "short",
		Help: "Times that the journal could not be written or compacted"})
	waits = define(Metric{Name: "hvdrun_waits", Of: OfDriver, Unit: "short",
		Help: "Conditions that the driver waits for, as hvdrun status shows them"})
	waitLeft = define(Metric{Name: "hvdrun_wait_left_seconds", Of: OfDriver, Unit: "s",
		Help: "Time left of the wait that ends first; 0 without a wait"})
	beats = define(Metric{Name: "hvdrun_worker_beats_total", Kind: Counter, Of: OfDriver, Unit: "short",
		Help: "Heartbeats of workers"})
)

// The metrics of the workers of a job, as sums and extremes.
var (
	commits = define(Metric{Name: "hvdrun_worker_commits_total", Kind: Counter, Of: OfWorkers, Unit: "short",
		Help: "Commits, those of each worker counted"})
	commitSeconds = define(Metric{Name: "hvdrun_worker_commit_seconds_total", Kind: Counter, Of: OfWorkers, Unit: "s",
		Help:   "Time that workers spent in commits, waits for other ranks included",
		Query:  "rate(hvdrun_worker_commit_seconds_total{job=~\"$job\",instance=~\"$instance\"}[$__rate_interval]) / rate(hvdrun_worker_commits_total{job=~\"$job\",instance=~\"$instance\"}[$__rate_interval])",
		Legend: "each commit"})
	commitBytes = define(Metric{Name: "hvdrun_worker_commit_bytes_total", Kind: Counter, Of: OfWorkers, Unit: "Bps",
		Help: "Bytes of tensors that commits compared, to copy those that had changed"})
	operations = define(Metric{Name: "hvdrun_collective_operations_total", Kind: Counter, Of: OfWorkers, Labels: []string{"kind", "size", "backend"}, Unit: "ops",
		Help: "Collective operations, those of each worker counted; the size is the upper bound of the class of the worker's tensor"})
	operationSeconds = define(Metric{Name: "hvdrun_collective_seconds_total", Kind: Counter, Of: OfWorkers, Labels: []string{"kind", "size", "backend"}, Unit: "percentunit",
		Help: "Time that workers spent in collective operations, waits for other ranks included; of AllReduces of less than 1 KiB within a host one of 16 is timed, and counts for all"})
	operationBytes = define(Metric{Name: "hvdrun_collective_bytes_total", Kind: Counter, Of: OfWorkers, Labels: []string{"kind", "size", "backend"}, Unit: "Bps",
		Help: "Bytes of the workers' tensors in collective operations"})
	beatAgeMax = define(Metric{Name: "hvdrun_worker_beat_age_max_seconds", Of: OfWorkers, Unit: "s",
		Help: "Age of the oldest last heartbeat of a rank of the world"})
	commitsSpread = define(Metric{Name: "hvdrun_worker_commits_spread", Of: OfWorkers, Unit: "short",
		Help: "Largest minus smallest number of the last commits of ranks, by their heartbeats"})
	lateMax = define(Metric{Name: "hvdrun_worker_late_max_seconds", Of: OfWorkers, Unit: "s",
		Help: "The largest hvdrun_rank_late_seconds of a rank, in a world of any size"})
	memoryShort = define(Metric{Name: "hvdrun_worker_memory_short", Of: OfWorkers, Unit: "short",
		Help: "Ranks to which less than a tenth of the memory is left that they can use"})
)

// The metrics of single ranks of a world of at most mostRanks.
var (
	rankCommits = define(Metric{Name: "hvdrun_rank_commits", Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "short",
		Help: "Number of the rank's last commit in the world"})
	rankBeatAge = define(Metric{Name: "hvdrun_rank_beat_age_seconds", Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "s",
		Help: "Age of the rank's last heartbeat"})
	rankSeconds = define(Metric{Name: "hvdrun_rank_collective_seconds_total", Kind: Counter, Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "percentunit",
		Help: "Time that the rank's worker spent in collective operations: one that holds up the others spends less"})
	rankLast = define(Metric{Name: "hvdrun_rank_last_ratio", Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "percentunit",
		Help: "Share of the operations of the last minutes to which the rank came last, without those to which all came within a millisecond"})
	rankLate = define(Metric{Name: "hvdrun_rank_late_seconds", Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "s",
		Help: "How much later than the median rank the rank came to operations of the last minutes, on average"})
	rankProcessors = define(Metric{Name: "hvdrun_rank_processors", Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "short",
		Help: "Processors that the processes of the rank's worker kept busy between its last two heartbeats"})
	rankResident = define(Metric{Name: "hvdrun_rank_resident_bytes", Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "bytes",
		Help: "Resident memory of the processes of the rank's worker"})
	rankMemoryUsed = define(Metric{Name: "hvdrun_rank_memory_used_bytes", Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "bytes",
		Help: "Used bytes of the memory that limits the rank's worker most: its machine's, or that of a control group"})
	rankMemoryLimit = define(Metric{Name: "hvdrun_rank_memory_limit_bytes", Of: OfRanks, Labels: []string{"rank", "host", "slot"}, Unit: "bytes",
		Help: "Size of that memory; when it is full, the kernel ends processes"})
	rankFigure = define(Metric{Name: "hvdrun_rank_figure", Of: OfRanks, Labels: []string{"rank", "host", "slot", "name"}, Unit: "short",
		Help: "The newest number of that name which the rank's program has reported", Legend: "{{name}} of rank {{rank}}"})
)

// The metrics of an agent.
var (
	agentInfo = define(Metric{Name: "hvdrun_agent_info", Of: OfAgent, Labels: []string{"host", "version"},
		Help: "The agent's host and the version of hvdrun; the value is 1", Legend: "{{host}} {{version}}"})
	agentSlots = define(Metric{Name: "hvdrun_agent_slots", Of: OfAgent, Labels: []string{"state"}, Unit: "short",
		Help: "Slots of the host: taken by a worker, free, or bad because the device has failed"})
	agentDrivers = define(Metric{Name: "hvdrun_agent_drivers", Of: OfAgent, Labels: []string{"state"}, Unit: "short",
		Help: "Jobs whose drivers have a session with the agent: connected, or away"})
	agentDraining = define(Metric{Name: "hvdrun_agent_draining", Of: OfAgent, Unit: "bool",
		Help: "1 if the agent is stopping and starts no more workers; else 0"})
	agentMembers = define(Metric{Name: "hvdrun_agent_members", Of: OfAgent, Unit: "short",
		Help: "Members of the cluster that the agent knows, itself included; 0 for an agent of one job"})
	agentStarts = define(Metric{Name: "hvdrun_agent_worker_starts_total", Kind: Counter, Of: OfAgent, Unit: "short",
		Help: "Workers that the agent has started"})
	agentEnds = define(Metric{Name: "hvdrun_agent_worker_ends_total", Kind: Counter, Of: OfAgent, Unit: "short",
		Help: "Workers of the agent that have ended"})
	agentUndelivered = define(Metric{Name: "hvdrun_agent_undelivered_events", Of: OfAgent, Unit: "short",
		Help: "Events that drivers have not acknowledged"})
)
