package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// env returns the lookup function of an environment.
func env(pairs ...string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1], true
			}
		}
		return "", false
	}
}

// fake is a Slurm with answers of the test. If its fields are zero, job 7 runs on n1, n2 … with the
// given GPUs.
type fake struct {
	mu    sync.Mutex
	job   func(id string) (string, error) // output of scontrol show job
	nodes map[string]string               // states other than MIXED
	addrs map[string]string               // addresses other than 10.0.0.n
	named string                          // output of squeue
	calls []string
	sets  int
}

func (f *fake) run(ctx context.Context, program string, args ...string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	call := program + " " + strings.Join(args, " ")
	f.calls = append(f.calls, call)
	switch {
	case program == "squeue":
		return f.named, nil
	case strings.HasPrefix(call, "scontrol show job -d "):
		return f.job(args[len(args)-1])
	case strings.HasPrefix(call, "scontrol show node -o "):
		names, err := expandHostlist(args[len(args)-1])
		if err != nil {
			return "", err
		}
		var lines strings.Builder
		for _, name := range names {
			state := "MIXED"
			if s := f.nodes[name]; s != "" {
				state = s
			}
			addr := cmp.Or(f.addrs[name], "10.0.0."+name[1:])
			fmt.Fprintf(&lines, "NodeName=%s NodeAddr=%s NodeHostName=host-%s State=%s Reason=x\n", name, addr, name, state)
		}
		return lines.String(), nil
	}
	return "", fmt.Errorf("slurm: no such command: %s", call)
}

func record(id, state, nodes string, tasks, perNode int, details ...string) string {
	text := fmt.Sprintf("JobId=%s JobName=train\n   JobState=%s Reason=None\n   StartTime=2026-01-01T00:00:%02s EndTime=Unknown\n"+
		"   NodeList=%s\n   NumNodes=1 NumCPUs=9 NumTasks=%d CPUs/Task=1\n   Socks/Node=* NtasksPerN:B:S:C=%d:0:*:* CoreSpec=*\n",
		id, state, id, nodes, tasks, perNode)
	for _, d := range details {
		text += "     " + d + "\n"
	}
	return text + "\n"
}

func always(text string) func(string) (string, error) {
	return func(string) (string, error) { return text, nil }
}

// newFaked returns a configured source over a fake, and its log.
func newFaked(t *testing.T, f *fake, settings ...string) (*source, *bytes.Buffer) {
	t.Helper()
	values := map[string]string{}
	for i := 0; i < len(settings); i += 2 {
		values[settings[i]] = settings[i+1]
	}
	if values["job_id"] == "" && values["job_name"] == "" {
		values["job_id"] = "7"
	}
	s := newSource()
	s.lookup = env()
	if err := s.Configure(values); err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	log := logrus.New()
	log.Out = &logged
	s.run, s.log = f.run, log
	return s, &logged
}

// found returns the list as n1:2 n2:2/draining.
func found(t *testing.T, s *source) string {
	t.Helper()
	hosts, err := s.Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return text(hosts)
}

func text(hosts []plan.Host) string {
	var words []string
	for _, h := range hosts {
		word := h.String()
		if h.Draining {
			word += "/draining"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

// set gives job 7 these hosts, by their addresses. Each call uses new nodes, so that a source that
// has just read the job still finds its nodes.
func (f *fake) set(hosts []plan.Host) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.addrs == nil {
		f.addrs, f.nodes = map[string]string{}, map[string]string{}
	}
	f.sets++
	nodes := []string{}
	var details []string
	for i, h := range hosts {
		node := fmt.Sprintf("n%d", f.sets*1000+i)
		nodes = append(nodes, node)
		f.addrs[node] = h.Name
		details = append(details, fmt.Sprintf("Nodes=%s CPU_IDs=0 Mem=0 GRES=gpu:%d(IDX:0-%d)", node, h.Slots, h.Slots-1))
		if h.Draining {
			f.nodes[node] = "MIXED+DRAIN"
		}
	}
	f.job = always(record("7", "RUNNING", cmp.Or(strings.Join(nodes, ","), "(null)"), 1, 0, details...))
}

func TestConformance(t *testing.T) {
	with := func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		f := &fake{}
		f.set(hosts)
		s, _ := newFaked(t, f, "host", "addr")
		return s
	}
	discoverytest.Run(t, with)
	discoverytest.RunDraining(t, with)
	discoverytest.RunFailing(t, func(t *testing.T) discovery.Discoverer {
		f := &fake{job: func(string) (string, error) {
			return "", errors.New("slurm: scontrol show: Unable to contact controller")
		}}
		s, _ := newFaked(t, f)
		return s
	})
	discoverytest.RunChanging(t, func(t *testing.T) (discovery.Discoverer, func([]plan.Host)) {
		f := &fake{}
		f.set(nil)
		s, _ := newFaked(t, f, "host", "addr", "slots", "gpus", "interval", "20ms")
		return s, f.set
	})
}

func TestSlots(t *testing.T) {
	gpus := []string{"Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:2(IDX:0-1)", "Nodes=n3 CPU_IDs=0-3 Mem=0 GRES="}
	none := []string{"Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=", "Nodes=n3 CPU_IDs=0-3 Mem=0 GRES="}
	inside := env("SLURM_JOB_ID", "7", "SLURM_JOB_NODELIST", "n[1-3]", "SLURM_TASKS_PER_NODE", "4(x2),2")
	for _, c := range []struct {
		what           string
		details        []string
		tasks, perNode int
		env            func(string) (string, bool)
		settings       []string
		want           string
	}{
		{"GPUs", gpus, 3, 1, env(), nil, "n1:2 n2:2 n3:0"},
		{"tasks though there are GPUs", gpus, 3, 1, env(), []string{"slots", "tasks"}, "n1:1 n2:1 n3:1"},
		{"tasks that were asked for a node", none, 24, 8, env(), nil, "n1:8 n2:8 n3:8"},
		{"a task a node", none, 3, 0, env(), nil, "n1:1 n2:1 n3:1"},
		{"tasks that Slurm tells its own", none, 10, 0, inside, nil, "n1:4 n2:4 n3:2"},
		{"CPUs", gpus, 3, 1, env(), []string{"slots", "cpus", "cpus_per_slot", "3"}, "n1:2 n2:2 n3:1"},
		{"a number", gpus, 3, 1, env(), []string{"slots", "5"}, "n1:5 n2:5 n3:5"},
		{"another resource", gpus, 3, 1, env(), []string{"slots", "gpus", "gres", "tpu"}, "n1:0 n2:0 n3:0"},
	} {
		s, _ := newFaked(t, &fake{job: always(record("7", "RUNNING", "n[1-3]", c.tasks, c.perNode, c.details...))}, c.settings...)
		s.lookup = c.env
		if got := found(t, s); got != c.want {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
	}
}

func TestTasksThatNobodyCanTell(t *testing.T) {
	s, _ := newFaked(t, &fake{job: always(record("7", "RUNNING", "n[1-2]", 7, 0))})
	if hosts, err := s.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "--ntasks-per-node") {
		t.Errorf("%v, %v", hosts, err)
	}
	s.lookup = env("SLURM_JOB_ID", "7", "SLURM_JOB_NODELIST", "n[1-2]", "SLURM_TASKS_PER_NODE", "4(x3)")
	if hosts, err := s.Discover(t.Context()); err == nil {
		t.Errorf("numbers for 3 nodes, names of 2: %v", hosts)
	}
}

func TestAFailedNodeLeavesATaskANode(t *testing.T) {
	nodes := "n[1-3]"
	f := &fake{}
	f.job = func(string) (string, error) { return record("7", "RUNNING", nodes, 3, 0), nil }
	s, _ := newFaked(t, f)
	before := found(t, s)
	nodes = "n[1,3]" // Slurm continues to report NumTasks=3
	if after := found(t, s); before != "n1:1 n2:1 n3:1" || after != "n1:1 n3:1" {
		t.Errorf("%s, then %s", before, after)
	}
}

func TestStatesOfNodes(t *testing.T) {
	f := &fake{
		job: always(record("7", "RUNNING", "n[1-6]", 6, 1)),
		nodes: map[string]string{"n2": "MIXED+DRAIN", "n3": "DOWN+NOT_RESPONDING", "n4": "IDLE+DRAIN", "n5": "ALLOCATED+COMPLETING",
			"n6": "ALLOCATED*"},
	}
	s, _ := newFaked(t, f)
	if got, want := found(t, s), "n1:1 n2:1/draining n5:1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	f.nodes["n1"] = "UNKNOWN"
	if hosts, err := s.Discover(t.Context()); err == nil {
		t.Errorf("a node of no known state: %v", hosts)
	}
}

func TestLifeOfAJob(t *testing.T) {
	state, nodes := "PENDING", "(null)"
	f := &fake{}
	f.job = func(id string) (string, error) {
		if state == "" {
			return "", errors.New("slurm: scontrol show: slurm_load_jobs error: Invalid job id specified")
		}
		return record(id, state, nodes, 2, 1), nil
	}
	s, logged := newFaked(t, f)
	for _, step := range []struct{ state, nodes, want string }{
		{"PENDING", "(null)", ""},
		{"CONFIGURING", "n[1-2]", ""},
		{"RUNNING", "n[1-2]", "n1:1 n2:1"},
		{"SUSPENDED", "n[1-2]", ""},
		{"RUNNING", "n[1-2]", "n1:1 n2:1"},
		{"COMPLETING", "n[1-2]", "n1:1/draining n2:1/draining"},
		{"CANCELLED", "n[1-2]", ""},
		{"", "", ""},
	} {
		state, nodes = step.state, step.nodes
		if got := found(t, s); got != step.want {
			t.Errorf("%s: %q, want %q", step.state, got, step.want)
		}
	}
	if n := strings.Count(logged.String(), "has ended"); n != 1 || !strings.Contains(logged.String(), "CANCELLED") {
		t.Errorf("logged %d times: %s", n, logged)
	}
}

func TestAJobThatWasNeverThere(t *testing.T) {
	ended, _ := newFaked(t, &fake{job: always(record("7", "TIMEOUT", "n1", 1, 1))})
	if hosts, err := ended.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "TIMEOUT") {
		t.Errorf("%v, %v", hosts, err)
	}
	unknown, _ := newFaked(t, &fake{job: func(string) (string, error) { return "", errors.New("Invalid job id specified") }})
	if hosts, err := unknown.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "job 7") {
		t.Errorf("%v, %v", hosts, err)
	}
}

func TestSeveralJobs(t *testing.T) {
	f := &fake{named: "12\n9\n"}
	f.job = func(id string) (string, error) {
		return map[string]string{
			"9":  record("9", "RUNNING", "n[2-3]", 2, 1),
			"12": record("12", "COMPLETING", "n[3-4]", 2, 2),
		}[id], nil
	}
	s, _ := newFaked(t, f, "job_name", "train")
	if got, want := found(t, s), "n2:1 n3:3 n4:2/draining"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if want := "squeue --noheader --me --array --name=train --format=%A"; !slices.Contains(f.calls, want) {
		t.Errorf("calls: %q", f.calls)
	}
	f.named = ""
	if got := found(t, s); got != "" {
		t.Errorf("no job of the name: %s", got)
	}
}

func TestTwoNodesOfOneName(t *testing.T) {
	f := &fake{job: always(record("7", "RUNNING", "n[1-2]", 2, 1)), addrs: map[string]string{"n2": "10.0.0.1"}}
	s, _ := newFaked(t, f, "host", "addr")
	if hosts, err := s.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "host=name") {
		t.Errorf("%v, %v", hosts, err)
	}
	s, _ = newFaked(t, f, "host", "hostname")
	if got := found(t, s); got != "host-n1:1 host-n2:1" {
		t.Error(got)
	}
}

func TestWatchPaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := "RUNNING"
		f := &fake{}
		f.job = func(id string) (string, error) { return record(id, state, "n1", 1, 1), nil }
		s, _ := newFaked(t, f, "interval", "10")
		ctx, cancel := context.WithCancel(t.Context())
		lists := make(chan []plan.Host, 10)
		ended := make(chan error, 1)
		go func() { ended <- s.Watch(ctx, func(hosts []plan.Host) { lists <- hosts }) }()
		if got := text(<-lists); got != "n1:1" {
			t.Error(got)
		}
		start := time.Now()
		synctest.Wait()
		f.mu.Lock()
		state = "COMPLETING"
		f.mu.Unlock()
		if got, after := text(<-lists), time.Since(start); got != "n1:1/draining" || after != 10*time.Second {
			t.Errorf("%s after %v", got, after)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) || len(lists) > 0 {
			t.Errorf("%v, and %d lists", err, len(lists))
		}
	})
}

func TestSettings(t *testing.T) {
	inside := env("SLURM_JOB_ID", "42")
	if c, err := readConfig(map[string]string{}, inside); err != nil || !slices.Equal(c.jobIDs, []string{"42"}) {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := readConfig(map[string]string{"job_id": "9, 7,9"}, inside); err != nil || !slices.Equal(c.jobIDs, []string{"7", "9"}) {
		t.Errorf("%+v, %v", c, err)
	}
	for _, c := range []struct{ key, value, says string }{
		{"jobid", "7", `unknown setting "jobid"; the settings are: bin, cpus_per_slot, gres, host, interval, job_id, job_name, notice, script, slots, step, timeout`},
		{"job_id", "x", "job_id"}, {"job_id", "-1", "job_id"}, {"job_id", "", "job_id"}, {"slots", "many", "slots"}, {"slots", "-1", "slots"},
		{"slots", "65537", "slots"}, {"host", "ip", "host"}, {"gres", "gpu:a100", "gres"}, {"cpus_per_slot", "0", "cpus_per_slot"},
		{"script", "x", "job_name is missing"}, {"notice", "5s", "no script"},
		{"timeout", "soon", "timeout"}, {"interval", "0", "interval"}, {"job_name", "--all", "job_name"},
	} {
		if _, err := readConfig(map[string]string{c.key: c.value}, inside); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s=%s: %v", c.key, c.value, err)
		}
	}
	if _, err := readConfig(map[string]string{"job_id": "7", "job_name": "x"}, inside); err == nil {
		t.Error("both job_id and job_name")
	}
	if _, err := readConfig(map[string]string{}, env()); err == nil || !strings.Contains(err.Error(), "SLURM_JOB_ID") {
		t.Errorf("outside of a job: %v", err)
	}
	if _, err := newSource().Discover(t.Context()); err == nil {
		t.Error("found hosts without settings")
	}
}

// program writes a shell script with this name and returns its folder.
func program(t *testing.T, name, script string) string {
	t.Helper()
	dir := t.TempDir()
	if err := sandbox.WriteProgram(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestNoAnswer(t *testing.T) {
	s := newSource()
	values := map[string]string{"job_id": "7", "timeout": "100ms", "bin": program(t, "scontrol", "echo JobId=7; sleep 1000")}
	if err := s.Configure(values); err != nil {
		t.Fatal(err)
	}
	if hosts, err := s.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "no answer in 100ms") {
		t.Errorf("%v, %v", hosts, err)
	}
}

func TestCommands(t *testing.T) {
	run := func(script string, timeout time.Duration) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		return commands{dir: program(t, "scontrol", script)}.run(ctx, "scontrol", "show")
	}
	t.Setenv("SQUEUE_PARTITION", "other")
	if out, err := run(`echo "$1 $SQUEUE_PARTITION$SLURM_TIME_FORMAT"`, time.Minute); err != nil || out != "show standard\n" {
		t.Errorf("%q, %v", out, err)
	}
	if _, err := run("echo one >&2; echo slurm_load error: no >&2; exit 1", time.Minute); err == nil ||
		err.Error() != "slurm: scontrol show: slurm_load error: no" {
		t.Error(err)
	}
	if out, err := run("echo half; sleep 1000 & sleep 1000", 100*time.Millisecond); err == nil || out != "" ||
		!errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%q, %v", out, err)
	}
	if _, err := run("yes | tr -d '\\n'", time.Minute); !errors.Is(err, errTooMuchOutput) {
		t.Error(err)
	}
	if _, err := (commands{}).run(t.Context(), "no-such-program", "x"); err == nil ||
		!strings.Contains(err.Error(), "not found in $PATH") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (commands{}).run(ctx, "true", "x"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
