package metrics

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/job"
)

var update = flag.Bool("update", false, "write the dashboard, the rules and the tables anew")

// The files that are generated from the list.
const (
	dashboardFile = "../../deploy/grafana/hvdrun.json"
	rulesFile     = "../../deploy/prometheus/hvdrun.rules.yml"
	rulesTests    = "../../deploy/prometheus/hvdrun.rules.test.yml"
	tableFile     = "../../deploy/prometheus/metrics.txt"
)

// TestFilesAreFresh: the dashboard, the rules and the tables equal what is generated from the
// lists.
func TestFilesAreFresh(t *testing.T) {
	board, err := makeDashboard()
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string][]byte{
		dashboardFile: board, rulesFile: rules(),
		tableFile: []byte(table()),
	} {
		if *update {
			if err := os.WriteFile(file, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if is, err := os.ReadFile(file); err != nil || !bytes.Equal(is, want) {
			t.Errorf("%s is out of date (%v): go test ./internal/metrics -update", file, err)
		}
	}
}

// measures returns the measures of a job with this number of ranks.
func measures(ranks int) job.Measures {
	now := time.Unix(1_800_000_000, 0).UTC()
	m := job.Measures{
		Status: job.Status{
			Job: "4be1c0ffee5151ab", Time: now, State: job.Running, Begun: now.Add(-time.Hour), Generation: 3, Size: ranks,
			NP: ranks, MinNP: 1, MaxNP: 2 * ranks, Waits: []job.Wait{{For: "b:1 to join", Until: now.Add(9 * time.Second)}},
		},
		Resets:    map[job.Cause]int{job.CauseDeath: 2},
		Discovery: job.Discovery{Stale: 3 * time.Second},
		Journal:   job.Journal{Bytes: 4096, Behind: true, Failures: 7},
		Workers:   job.Workers{Beats: 99, Commits: 1000, CommitTime: 5 * time.Second, CommitBytes: 1 << 30, Ranks: make([]job.Rank, ranks)},
	}
	for _, p := range job.Parts() {
		m.Status.Goodput.Parts = append(m.Status.Goodput.Parts, job.Spent{Part: p, Seconds: 360})
	}
	m.Status.Goodput.Seconds = 3600
	m.Status.Goodput.StalledBy = []job.StalledBy{{Host: "b", Slot: 1, Seconds: 360}}
	for r := range ranks {
		if r%8 == 0 {
			m.Status.Hosts = append(m.Status.Hosts, job.Host{Host: fmt.Sprintf("host%04d", r/8), Listed: true, Draining: r == 8})
		}
		h := &m.Status.Hosts[len(m.Status.Hosts)-1]
		h.Slots = append(h.Slots, job.Slot{Slot: r % 8, State: job.SlotTraining, Commits: new(uint64(17))})
		m.Workers.Ranks[r] = job.Rank{Host: h.Host, Slot: r % 8, Heard: true, Age: time.Duration(r) * time.Millisecond, Commits: uint64(16 + r%2), InOperations: time.Minute,
			Straggler: &job.Straggler{Last: 0.5, By: 0.002 * float64(r), Operations: 100},
			Usage:     &job.Usage{Processors: 1.5, Resident: 1 << 30, Used: 7 << 30, Limit: 8 << 30}, Figures: []job.Figure{{Name: "loss", Value: 0.25}}}
	}
	for _, kind := range kinds {
		for class := range sizeNames {
			for _, backend := range backends {
				m.Workers.Operations = append(m.Workers.Operations, job.Operations{Kind: kind, Backend: backend, SizeClass: class, Count: 5, Duration: time.Second, Bytes: 7})
			}
		}
	}
	return m
}

// registry returns a registry with the collectors of a driver and of an agent.
func registry(t testing.TB, ranks int) *prometheus.Registry {
	r := prometheus.NewRegistry()
	m := measures(ranks)
	d := NewDriver(func(context.Context) (job.Measures, error) { return m, nil }, "v0.0.0")
	for _, e := range []job.Event{
		{Name: job.FirstCommit, Fields: []job.Field{{Key: "generation", Value: 2}, {Key: "cause", Value: job.CauseDeath}, {Key: "seconds", Value: 0.3}}},
		{Name: job.WorkerStarted}, {Name: job.WorkerExited, Fields: []job.Field{{Key: "cause", Value: "failed"}}}, {Name: job.Excluded},
		{Name: job.Stalled}, {Name: job.HostsUpdated, Fields: []job.Field{{Key: "change", Value: "added"}}}, {Name: job.HostsFound}, {Name: job.DiscoveryFailed},
	} {
		d.Event(e)
	}
	d.Delivered(2 * time.Millisecond)
	d.Synced(3 * time.Millisecond)
	a := &Agent{Read: func() (agent.Measures, bool) {
		return agent.Measures{Host: "b", Slots: 8, Taken: 3, Bad: 1, Connected: 1, Members: 40, Starts: 12, Ends: 9, Undelivered: 2}, true
	}, Version: "v0.0.0"}
	for _, c := range []prometheus.Collector{d, a} {
		if err := r.Register(c); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// TestNames: the names follow Prometheus's rules, and each metric of the list exists with its kind,
// labels and help.
func TestNames(t *testing.T) {
	r := registry(t, 16)
	problems, err := testutil.GatherAndLint(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]int{} // places in families
	for i, f := range families {
		found[f.GetName()] = i
	}
	if len(found) != len(list) {
		t.Errorf("%d metrics, %d in the list", len(found), len(list))
	}
	for _, m := range list {
		i, is := found[m.Name]
		if !is {
			t.Errorf("%s is not told", m.Name)
			continue
		}
		f := families[i]
		if f.GetHelp() != m.Help || !strings.EqualFold(f.GetType().String(), m.Kind.String()) || strings.HasSuffix(m.Help, ".") {
			t.Errorf("%s: %v %q", m.Name, f.GetType(), f.GetHelp())
		}
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		if want := slices.Sorted(slices.Values(m.Labels)); !slices.Equal(labels, want) {
			t.Errorf("%s has labels %v, want %v", m.Name, labels, want)
		}
		if m.Kind == histogram {
			h := f.GetMetric()[0].GetHistogram()
			if len(h.GetPositiveSpan()) == 0 || len(h.GetBucket()) != len(m.Buckets) {
				t.Errorf("%s has %d classic buckets, and native ones %v", m.Name, len(h.GetBucket()), h.GetPositiveSpan())
			}
		}
	}
}

// TestValues: the values that result from the job's measures.
func TestValues(t *testing.T) {
	want := `
# HELP hvdrun_resets_total Resets after which a world was published, of the whole job, by cause
# TYPE hvdrun_resets_total counter
hvdrun_resets_total{cause="broken"} 0
hvdrun_resets_total{cause="death"} 2
hvdrun_resets_total{cause="departure"} 0
hvdrun_resets_total{cause="growth"} 0
hvdrun_resets_total{cause="removal"} 0
hvdrun_resets_total{cause="stall"} 0
# HELP hvdrun_job_hosts Hosts by state: listed, draining, or unlisted with workers that have not ended
# TYPE hvdrun_job_hosts gauge
hvdrun_job_hosts{state="draining"} 1
hvdrun_job_hosts{state="listed"} 1
hvdrun_job_hosts{state="unlisted"} 0
# HELP hvdrun_worker_commits_spread Difference between the largest and the smallest number of the ranks' last commits, by their heartbeats
# TYPE hvdrun_worker_commits_spread gauge
hvdrun_worker_commits_spread 1
# HELP hvdrun_worker_late_max_seconds The largest hvdrun_rank_late_seconds of a rank, in a world of any size
# TYPE hvdrun_worker_late_max_seconds gauge
hvdrun_worker_late_max_seconds 0.03
# HELP hvdrun_wait_left_seconds Time left of the wait that ends first; 0 without a wait
# TYPE hvdrun_wait_left_seconds gauge
hvdrun_wait_left_seconds 9
# HELP hvdrun_agent_slots Slots of the host: taken by a worker, free, or bad because the device has failed
# TYPE hvdrun_agent_slots gauge
hvdrun_agent_slots{state="bad"} 1
hvdrun_agent_slots{state="free"} 4
hvdrun_agent_slots{state="taken"} 3
`
	names := []string{"hvdrun_resets_total", "hvdrun_job_hosts", "hvdrun_worker_commits_spread", "hvdrun_worker_late_max_seconds", "hvdrun_wait_left_seconds", "hvdrun_agent_slots"}
	if err := testutil.GatherAndCompare(registry(t, 16), strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

// TestCardinality: the number of series is bounded, whatever the size of the world and whatever
// workers report.
func TestCardinality(t *testing.T) {
	count := func(m job.Measures) (n int) {
		ch := make(chan prometheus.Metric)
		go func() {
			d := NewDriver(func(context.Context) (job.Measures, error) { return m, nil }, "")
			d.Collect(ch)
			close(ch)
		}()
		for range ch {
			n++
		}
		return n
	}
	base := count(measures(0))
	if base > 2500 {
		t.Errorf("%d series without a rank", base)
	}
	if n := count(measures(mostRanks)); n != base+10*mostRanks {
		t.Errorf("%d series for %d ranks, %d for none", n, mostRanks, base)
	}
	if n := count(measures(5000)); n != base {
		t.Errorf("%d series for 5000 ranks, %d for none", n, base)
	}
	liar := measures(0)
	for i := range 10_000 {
		liar.Workers.Operations = append(liar.Workers.Operations, job.Operations{Kind: fmt.Sprint(i), Backend: fmt.Sprint(i), SizeClass: i % 16})
	}
	if n := count(liar); n > base+3*len(sizeNames) {
		t.Errorf("%d series with made-up kinds, %d without", n, base)
	}
}

// TestDashboard: the dashboard is JSON with a panel for each metric; the panels' ids differ, and
// the panels do not overlap.
func TestDashboard(t *testing.T) {
	text, err := makeDashboard()
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	ids, places, panels := map[int]bool{}, map[gridPos]bool{}, 0
	for _, p := range append(slices.Clone(d.Panels), inner(d.Panels)...) {
		if ids[p.ID] || places[p.GridPos] {
			t.Errorf("panel %d (%s) is there twice", p.ID, p.Title)
		}
		ids[p.ID], places[p.GridPos] = true, true
		if panels += len(p.Targets); p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("%s shows nothing", p.Title)
		}
	}
	for _, m := range list {
		if !bytes.Contains(text, []byte(m.Name)) {
			t.Errorf("%s is not on the dashboard", m.Name)
		}
	}
}

func inner(rows []panel) (all []panel) {
	for _, r := range rows {
		all = append(all, r.Panels...)
	}
	return all
}

// TestAlertsUseKnownMetrics: alarms use only metrics of the list.
func TestAlertsUseKnownMetrics(t *testing.T) {
	for _, a := range alerts() {
		for _, word := range strings.FieldsFunc(a.Expr, func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') }) {
			name := strings.TrimSuffix(word, "_bucket")
			if strings.HasPrefix(word, "hvdrun_") && !slices.ContainsFunc(list, func(m *metric) bool { return m.Name == name }) {
				t.Errorf("%s: there is no metric %s", a.Name, word)
			}
		}
	}
}

// TestEachAlertTellsWhatToDo: each alarm has a remedy of at least a sentence.
func TestEachAlertTellsWhatToDo(t *testing.T) {
	for _, a := range alerts() {
		if len(strings.Fields(a.Do)) < 20 || strings.Contains(a.Do, "{{") || strings.Contains(a.Do, "|") {
			t.Errorf("%s: %q does not tell what to do, or is no cell of a table", a.Name, a.Do)
		}
	}
}

// promtool runs Prometheus's own tool.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	if _, err := exec.LookPath("promtool"); err != nil {
		t.Skip("there is no promtool: `make check-metrics` brings it (package prometheus)")
	}
	if out, err := exec.Command("promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %v: %v\n%s", args, err, out)
	}
}

// TestRules: Prometheus accepts the rules, and the alarms fire when they must.
func TestRules(t *testing.T) {
	promtool(t, "check", "rules", rulesFile)
	promtool(t, "test", "rules", rulesTests)
	promtool(t, "check", "config", filepath.Join(filepath.Dir(rulesFile), "prometheus.yml"))
}

// TestEachAlertIsTested: each alarm fires in one test of the rules, and not in another.
func TestEachAlertIsTested(t *testing.T) {
	text, err := os.ReadFile(rulesTests)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range alerts() {
		if n := strings.Count(string(text), "alertname: "+a.Name+"\n"); n < 2 {
			t.Errorf("%s is asked for %d times in %s", a.Name, n, rulesTests)
		}
	}
}

// get sends a request to a server, and returns the status and the body.
func get(t *testing.T, s *Server, header string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if header != "" {
		req.Header.Set("Authorization", header)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(text)
}

// TestServer: metrics are served, even while no job runs; with a token, only to its holders.
func TestServer(t *testing.T) {
	for _, token := range []string{"", "s3cret"} {
		d := NewDriver(func(context.Context) (job.Measures, error) { return job.Measures{}, errors.New("no job runs") }, "")
		s, err := Listen(Config{Listen: "127.0.0.1:0", Token: token}, d)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() { served <- s.Serve(ctx) }()
		for header, want := range map[string]int{"": http.StatusOK, "Bearer s3cret": http.StatusOK, "Bearer other": http.StatusOK} {
			if token != "" && header != "Bearer "+token {
				want = http.StatusUnauthorized
			}
			code, text := get(t, s, header)
			if code != want || strings.Contains(text, "hvdrun_exclusions_total 0") != (want == http.StatusOK) {
				t.Errorf("token %q, header %q: %d\n%.200s", token, header, code, text)
			}
		}
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// panicking is a collector that panics.
type panicking struct{}

func (panicking) Describe(to chan<- *prometheus.Desc) {
	to <- prometheus.NewDesc("broken", "A fault.", nil, nil)
}

func (panicking) Collect(chan<- prometheus.Metric) { panic("where secrets are") }

// TestPanic: a collector that panics ends neither hvdrun nor the server, and clients get neither
// the panic's text nor its stack.
func TestPanic(t *testing.T) {
	log, hook := logtest.NewNullLogger()
	s, err := Listen(Config{Listen: "127.0.0.1:0", Log: log}, panicking{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	for range 2 {
		code, text := get(t, s, "")
		if code != http.StatusInternalServerError || strings.Contains(text, "secrets") || strings.Contains(text, ".go:") || !strings.Contains(text, "the log of this hvdrun says why") {
			t.Errorf("%d\n%s", code, text)
		}
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if said := hook.AllEntries(); len(said) != 1 || !strings.Contains(said[0].Message, "where secrets are") {
		t.Errorf("logged %d lines, the last %v", len(said), hook.LastEntry())
	}
}

// TestParseListen: a port without an address means this machine.
func TestParseListen(t *testing.T) {
	for text, want := range map[string]string{
		"9464": "127.0.0.1:9464", ":9464": "127.0.0.1:9464", "0": "127.0.0.1:0", "0.0.0.0:9464": "0.0.0.0:9464", "[::1]:1": "[::1]:1",
		"": "", "x": "", "70000": "", "host:80": "", "127.0.0.1": "", "1.2.3.4:x": "", "-1": "",
	} {
		got, err := ParseListen(text)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

// TestReadToken: a file that others can read is refused, and so is an invalid token.
func TestReadToken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	for _, c := range []struct {
		text string
		mode os.FileMode
		want string
	}{
		{"abc\n", 0o600, "abc"}, {"abc", 0o400, "abc"}, {"abc", 0o644, ""}, {"", 0o600, ""}, {" \n", 0o600, ""}, {"a b", 0o600, ""},
		{strings.Repeat("x", tokenBytes+1), 0o600, ""},
	} {
		_ = os.Remove(path)
		if err := os.WriteFile(path, []byte(c.text), c.mode); err != nil {
			t.Fatal(err)
		}
		got, err := ReadToken(path)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%q of mode %o: %q, %v", c.text, c.mode, got, err)
		}
	}
	if _, err := ReadToken(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestSizeOfAScrape measures a scrape of a job of 300 ranks with all possible kinds of operations.
func TestSizeOfAScrape(t *testing.T) {
	d := NewDriver(func(context.Context) (job.Measures, error) { return measures(300), nil }, "")
	s, err := Listen(Config{Listen: "127.0.0.1:0"}, d)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	if _, text := get(t, s, ""); len(text) > 2<<20 || len(text) < 100_000 {
		t.Errorf("%d bytes", len(text))
	}
	cancel()
	<-served
}

// TestListsAgree: the collectors use all fields of the measures.
func TestListsAgree(t *testing.T) {
	if n := reflect.TypeFor[job.Measures]().NumField(); n != 5 {
		t.Errorf("job.Measures has %d fields: is each of them told?", n)
	}
}
