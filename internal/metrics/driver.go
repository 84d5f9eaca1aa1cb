package metrics

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/hvdrun/hvdrun/job"
)

// readTimeout bounds a scrape's wait for the driver.
const readTimeout = 5 * time.Second

// Driver collects the metrics of a job. It reads the job's numbers when it is scraped, and counts
// the job's events in between. Its methods are safe for concurrent use.
type Driver struct {
	// Read returns the job's numbers.
	Read func(context.Context) (job.Measures, error)
	// Version is the version of hvdrun.
	Version string

	recovery                       *prometheus.HistogramVec
	notificationDelay, journalSync prometheus.Histogram
	exits, notified                *prometheus.CounterVec
	starts, excluded, stalled      prometheus.Counter
	lists, failures                prometheus.Counter
}

// NewDriver returns the collector of a job.
func NewDriver(read func(context.Context) (job.Measures, error), version string) *Driver {
	d := &Driver{
		Read: read, Version: version,
		recovery:          prometheus.NewHistogramVec(recovery.histogram(), recovery.Labels),
		notificationDelay: prometheus.NewHistogram(notificationDelay.histogram()),
		journalSync:       prometheus.NewHistogram(journalSync.histogram()),
		exits:             prometheus.NewCounterVec(workerExits.counter(), workerExits.Labels),
		notified:          prometheus.NewCounterVec(notifications.counter(), notifications.Labels),
		starts:            prometheus.NewCounter(workerStarts.counter()),
		excluded:          prometheus.NewCounter(exclusions.counter()),
		stalled:           prometheus.NewCounter(stalls.counter()),
		lists:             prometheus.NewCounter(discoveryLists.counter()),
		failures:          prometheus.NewCounter(discoveryFailures.counter()),
	}
	// A series that exists from the beginning shows its first increase.
	for _, cause := range []string{"done", "left", "failed", "stopped"} {
		d.exits.WithLabelValues(cause)
	}
	for _, change := range []string{"added", "removed", "mixed", "none"} {
		d.notified.WithLabelValues(change)
	}
	return d
}

func (m *metric) counter() prometheus.CounterOpts {
	return prometheus.CounterOpts{Name: m.Name, Help: m.Help}
}

// histogram returns options for native buckets that grow by at most a tenth, and are merged if
// there are too many.
func (m *metric) histogram() prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Name: m.Name, Help: m.Help, Buckets: m.Buckets,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160, NativeHistogramMinResetDuration: time.Hour,
	}
}

// Delivered observes the delay of a notification.
func (d *Driver) Delivered(after time.Duration) { d.notificationDelay.Observe(after.Seconds()) }

// Synced observes the duration of a sync of the journal.
func (d *Driver) Synced(took time.Duration) { d.journalSync.Observe(took.Seconds()) }

// Event counts an event of the job.
func (d *Driver) Event(e job.Event) {
	label := func(key string) string { return fmt.Sprint(job.FieldOf[any](e, key)) }
	switch e.Name {
	case job.FirstCommit:
		d.recovery.WithLabelValues(label("cause")).Observe(job.FieldOf[float64](e, "seconds"))
	case job.WorkerStarted:
		d.starts.Inc()
	case job.WorkerExited:
		d.exits.WithLabelValues(label("cause")).Inc()
	case job.Excluded:
		d.excluded.Inc()
	case job.Stalled:
		d.stalled.Inc()
	case job.HostsUpdated:
		d.notified.WithLabelValues(label("change")).Inc()
	case job.HostsFound:
		d.lists.Inc()
	case job.DiscoveryFailed:
		d.failures.Inc()
	}
}

// counted returns the collectors of what is counted as it happens.
func (d *Driver) counted() []prometheus.Collector {
	return []prometheus.Collector{
		d.recovery, d.notificationDelay, d.journalSync, d.exits, d.notified, d.starts, d.excluded, d.stalled, d.lists, d.failures,
	}
}

// Describe sends the descriptions of all metrics of a job.
func (d *Driver) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range list {
		if m.Of != agentSection {
			ch <- m.desc
		}
	}
}

// Collect sends the current metrics. Without a running job it sends only counts of events.
func (d *Driver) Collect(ch chan<- prometheus.Metric) {
	for _, c := range d.counted() {
		c.Collect(ch)
	}
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	m, err := d.Read(ctx)
	if err != nil {
		return
	}
	s := sink(ch)
	d.ofJob(s, m)
	ofDriver(s, m)
	ofWorkers(s, m.Workers)
	ofRanks(s, m.Workers.Ranks)
}

// sink receives values of metrics.
type sink chan<- prometheus.Metric

func (s sink) put(m *metric, value float64, labels ...string) {
	kind := prometheus.GaugeValue
	if m.Kind == counter {
		kind = prometheus.CounterValue
	}
	s <- prometheus.MustNewConstMetric(m.desc, kind, value, labels...)
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// states are all states of a job that has not ended: its metrics end with it.
var states = []job.State{job.Waiting, job.Starting, job.Running, job.Resetting, job.Finishing, job.Stopping}

// slotStates are all states of a slot.
var slotStates = []job.SlotState{
	job.SlotStarting, job.SlotReady, job.SlotTraining, job.SlotLeaving, job.SlotStopping, job.SlotFree, job.SlotExcluded,
	job.SlotDrained, job.SlotHeld,
}

func (d *Driver) ofJob(s sink, m job.Measures) {
	st := m.Status
	s.put(jobInfo, 1, st.Job, d.Version)
	s.put(jobStart, float64(st.Begun.UnixMilli())/1e3)
	for _, state := range states {
		s.put(jobState, truth(st.State == state), string(state))
	}
	for _, p := range st.Goodput.Parts {
		s.put(jobSeconds, p.Seconds, string(p.Part))
	}
	for _, by := range st.Goodput.StalledBy {
		s.put(jobStalled, by.Seconds, by.Host, strconv.Itoa(by.Slot))
	}
	s.put(worldSize, float64(st.Size))
	s.put(worldGeneration, float64(st.Generation))
	s.put(sizeNeeded, float64(st.NP), "start")
	s.put(sizeNeeded, float64(st.MinNP), "min")
	s.put(sizeNeeded, float64(st.MaxNP), "max")
	for _, cause := range job.Causes() {
		s.put(resets, float64(m.Resets[cause]), string(cause))
	}
	var last uint64
	hosts, slots := map[string]int{}, map[job.SlotState]int{}
	for _, h := range st.Hosts {
		switch {
		case !h.Listed:
			hosts["unlisted"]++
		case h.Draining:
			hosts["draining"]++
		default:
			hosts["listed"]++
		}
		for _, slot := range h.Slots {
			slots[slot.State]++
			if slot.Commits != nil {
				last = max(last, *slot.Commits)
			}
		}
	}
	for _, r := range m.Workers.Ranks {
		last = max(last, r.Commits)
	}
	s.put(jobCommits, float64(last))
	for _, state := range []string{"listed", "draining", "unlisted"} {
		s.put(jobHosts, float64(hosts[state]), state)
	}
	for _, state := range slotStates {
		s.put(jobSlots, float64(slots[state]), string(state))
	}
}

func ofDriver(s sink, m job.Measures) {
	s.put(discoveryStale, m.Discovery.Stale.Seconds())
	s.put(journalBytes, float64(m.Journal.Bytes))
	s.put(journalBehind, truth(m.Journal.Behind))
	s.put(journalFailures, float64(m.Journal.Failures))
	s.put(waits, float64(len(m.Status.Waits)))
	left := 0.0
	if len(m.Status.Waits) > 0 { // the earliest is first
		left = max(0, m.Status.Waits[0].Until.Sub(m.Status.Time).Seconds())
	}
	s.put(waitLeft, left)
	s.put(beats, float64(m.Workers.Beats))
}

// sizeNames are the upper bounds of the classes of sizes.
var sizeNames = []string{"1KiB", "4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "more"}

// kinds and backends are the known kinds of collective operations and backends. Others that workers
// report count as other, so that workers cannot create arbitrary series.
var (
	kinds = []string{"AllReduce", "Broadcast", "AllGather", "ReduceScatter", "AllToAll", "Barrier", "BroadcastBytes", "Subset", "Connect",
		"AllReduceAsync", "AllGatherInto", "AllToAllInto", "ReduceTree",
		"BroadcastAsync", "AllGatherIntoAsync", "ReduceScatterIntoAsync",
		"Send", "Recv"}
	backends = []string{"none", "sockets", "memory", "hosts"}
)

const other = "other"

func known(word string, of []string) string {
	if slices.Contains(of, word) {
		return word
	}
	return other
}

func ofWorkers(s sink, w job.Workers) {
	s.put(commits, float64(w.Commits))
	s.put(commitSeconds, w.CommitTime.Seconds())
	s.put(commitBytes, float64(w.CommitBytes))
	type key struct{ kind, size, backend string }
	var order []key
	sums := map[key]*job.Operations{}
	for _, o := range w.Operations {
		k := key{known(o.Kind, kinds), sizeNames[min(max(0, o.SizeClass), len(sizeNames)-1)], known(o.Backend, backends)}
		if sums[k] == nil {
			sums[k] = &job.Operations{}
			order = append(order, k)
		}
		sums[k].Count += o.Count
		sums[k].Duration += o.Duration
		sums[k].Bytes += o.Bytes
	}
	for _, k := range order {
		s.put(operations, float64(sums[k].Count), k.kind, k.size, k.backend)
		s.put(operationSeconds, sums[k].Duration.Seconds(), k.kind, k.size, k.backend)
		s.put(operationBytes, float64(sums[k].Bytes), k.kind, k.size, k.backend)
	}
	var age time.Duration
	var least, most uint64
	late, short := 0.0, 0
	heard := false
	for _, r := range w.Ranks {
		if !r.Heard {
			continue
		}
		age = max(age, r.Age)
		if r.Usage.Short() {
			short++
		}
		if r.Straggler != nil {
			late = max(late, r.Straggler.By)
		}
		if !heard || r.Commits < least {
			least = r.Commits
		}
		most, heard = max(most, r.Commits), true
	}
	s.put(beatAgeMax, age.Seconds())
	s.put(commitsSpread, float64(most-least))
	s.put(lateMax, late)
	s.put(memoryShort, float64(short))
}

func ofRanks(s sink, ranks []job.Rank) {
	if len(ranks) > mostRanks {
		return
	}
	for rank, r := range ranks {
		if !r.Heard {
			continue
		}
		labels := []string{strconv.Itoa(rank), r.Host, strconv.Itoa(r.Slot)}
		s.put(rankCommits, float64(r.Commits), labels...)
		s.put(rankBeatAge, r.Age.Seconds(), labels...)
		s.put(rankSeconds, r.InOperations.Seconds(), labels...)
		if r.Straggler != nil {
			s.put(rankLast, r.Straggler.Last, labels...)
			s.put(rankLate, r.Straggler.By, labels...)
		}
		if u := r.Usage; u != nil {
			s.put(rankProcessors, u.Processors, labels...)
			s.put(rankResident, float64(u.Resident), labels...)
			s.put(rankMemoryUsed, float64(u.Used), labels...)
			s.put(rankMemoryLimit, float64(u.Limit), labels...)
		}
		for _, f := range r.Figures {
			s.put(rankFigure, f.Value, append(slices.Clone(labels), f.Name)...)
		}
	}
}
