package bridge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/tasks/scaler/internal/scalertest"
)

// startCluster runs workers of the real Scaler, and returns once they have joined.
func startCluster(t *testing.T, p *aPool, names ...string) *scalertest.Process {
	t.Helper()
	cluster := scalertest.Start(t, true, []string{"PYTHONPATH=" + scalertest.Sources(t), "PYTHONUNBUFFERED=1"}, "/usr/bin/python3", "-c",
		"from scaler.entry_points.cluster import main; main()", "-n", fmt.Sprint(len(names)), "-wn", strings.Join(names, ","),
		"--heartbeat-interval", "1", p.address)
	for _, name := range names {
		p.worker(name)
	}
	return cluster
}

// worker waits for a worker of a name, and returns its process.
func (p *aPool) worker(name string) int {
	p.t.Helper()
	for {
		s, err := p.client.Status(p.t.Context())
		if err != nil {
			p.t.Fatal(err)
		}
		for _, w := range s.Workers {
			if text, ok := strings.CutPrefix(w.Name, name+":"); ok {
				pid, err := strconv.Atoi(strings.TrimSuffix(text, " (Scaler)"))
				if err != nil {
					p.t.Fatal(err)
				}
				return pid
			}
		}
	}
}

func python(t *testing.T, name, source string) *Function {
	t.Helper()
	f, err := Python(name, source)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestRealServe: workers of Scaler 1.7.14 run tasks of a pool.
func TestRealServe(t *testing.T) {
	scalertest.Sources(t)
	record := &scalertest.Frames{}
	p := servePool(t, ServeConfig{record: record.Note, Return: 100 * time.Millisecond})
	cluster := startCluster(t, p, "one", "two")

	norm := python(t, "norm", "def norm(p):\n    return p['X'] ** 2 + p['Y'] ** 2\n")
	began := time.Now()
	var futures []*tasks.Future[[]byte]
	const n = 400
	for i := range n {
		futures = append(futures, p.submit(norm, map[string]int{"X": i, "Y": 1}))
	}
	for i, f := range futures {
		if got, want := p.get(f), fmt.Sprint(i*i+1); got != want {
			t.Errorf("task %d: %s, want %s", i, got, want)
		}
	}
	t.Logf("%d tasks in %v", n, time.Since(began))
	if got := p.get(p.submit(python(t, "half", "def half(n): return n / 2"), p.submit(norm, map[string]int{"X": 3, "Y": 4}))); got != "12.5" {
		t.Errorf("half of a result: %s", got)
	}
	for source, want := range map[string]string{
		"def f(x): raise ValueError('no such shard', x)":       "ValueError: no such shard, 1",
		"class Own(Exception): pass\ndef f(x): raise Own('a')": "RuntimeError: Own: a",
		"def f(x): return open":                                "TypeError: Object of type builtin_function_or_method is not JSON serializable",
		"def f(x) return":                                      "SyntaxError: expected ':'",
		"g = 1":                                                "KeyError: f",
		"import nosuchmodule":                                  "ModuleNotFoundError: No module named 'nosuchmodule'",
	} {
		var failed *tasks.FunctionError
		if err := python(t, "f", source).Call(t.Context(), p.client, new(any), 1); !errors.As(err, &failed) || !strings.HasPrefix(failed.Text, want) {
			t.Errorf("%s: %v", source, err)
		}
	}
	testRealPickles(t, p)

	// One that runs is cancelled: its worker kills the process, and goes on.
	sleeps := python(t, "sleeps", "import time\ndef sleeps(path):\n    open(path, 'w').close()\n    time.sleep(1000)\n")
	path := t.TempDir() + "/began"
	f := p.submit(sleeps.With(tasks.Resource(Label("one"), 1)), path)
	awaitFile(t, path)
	f.Cancel()
	if _, err := f.Get(t.Context()); !errors.Is(err, tasks.ErrCancelled) {
		t.Errorf("cancelled: %v", err)
	}
	if got := p.get(p.submit(norm.With(tasks.Resource(Label("one"), 1)), map[string]int{"X": 3, "Y": 4})); got != "25" {
		t.Errorf("after a cancel: %s", got)
	}
	// One ends the process that runs it, each time.
	ends := python(t, "ends", "import os\ndef ends(): os._exit(3)\n")
	if err := ends.Call(t.Context(), p.client, new(any)); !errors.Is(err, tasks.ErrPoison) {
		t.Errorf("one that ends its process: %v", err)
	}
	p.stop()
	if err := <-p.ended; err != nil {
		t.Errorf("Serve returns %v", err)
	}
	if err := cluster.Wait(); err != nil {
		t.Errorf("the cluster ends: %v", err)
	}
	record.Check(t, "serve.frames")
}

// testRealPickles: functions, arguments and results as Scaler's own serializer has them.
func testRealPickles(t *testing.T, p *aPool) {
	t.Helper()
	out, err := exec.Command("/usr/bin/python3", "-c", `
import cloudpickle, pickle, sys
factor = 3
def times(a, b): return [a * factor, b.upper()]
for x in times, 14, "text", [42, "TEXT"]: sys.stdout.write(cloudpickle.dumps(x, protocol=pickle.HIGHEST_PROTOCOL).hex() + "\n")`).Output()
	if err != nil {
		t.Fatal(err)
	}
	var all [][]byte
	for _, line := range strings.Fields(string(out)) {
		var content []byte
		if _, err := fmt.Sscanf(line, "%x", &content); err != nil {
			t.Fatal(err)
		}
		all = append(all, content)
	}
	times, err := Pickled("times", nil, all[0])
	if err != nil {
		t.Fatal(err)
	}
	var got []byte
	if err := times.Call(t.Context(), p.client, &got, all[1], all[2]); err != nil || string(got) != string(all[3]) {
		t.Errorf("times: %q, want %q, %v", got, all[3], err)
	}
	// What is no serializer ends the process that reads it.
	bad, err := Pickled("bad", []byte("no pickle"), all[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := bad.With(tasks.Retries(0)).Call(t.Context(), p.client, &got, all[1], all[2]); !errors.Is(err, tasks.ErrWorkerLost) {
		t.Errorf("no serializer: %v", err)
	}
}

func awaitFile(t *testing.T, path string) {
	t.Helper()
	for t.Context().Err() == nil {
		if _, err := os.Stat(path); err == nil {
			return
		}
		pause(t)
	}
}

// TestRealWorkerKilled: a worker of Scaler is killed with a task, which another runs; one that is
// stopped is silent, and its late result is refused.
func TestRealWorkerKilled(t *testing.T) {
	scalertest.Sources(t)
	p := servePool(t, ServeConfig{Return: 100 * time.Millisecond, Silence: 4 * time.Second})
	startCluster(t, p, "one", "two")
	waits := python(t, "waits", `
import os, time
def waits(began, go, n):
    with open(began, "a") as f: f.write(str(os.getppid()) + "\n")
    while not os.path.exists(go): time.sleep(0.01)
    return n
`)
	for i, how := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		folder := t.TempDir()
		f := p.submit(waits, folder+"/began", folder+"/go", i)
		awaitFile(t, folder+"/began")
		var first int
		for first == 0 {
			text, _ := os.ReadFile(folder + "/began")
			first, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		if err := syscall.Kill(first, how); err != nil {
			t.Fatal(err)
		}
		if how == syscall.SIGKILL {
			startCluster(t, p, "three")
		}
		for strings.Count(string(must(os.ReadFile(folder+"/began"))), "\n") < 2 {
			pause(t)
		}
		if err := os.WriteFile(folder+"/go", nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := p.get(f); got != fmt.Sprint(i) {
			t.Errorf("%v: %s", how, got)
		}
		if how == syscall.SIGSTOP {
			_ = syscall.Kill(first, syscall.SIGCONT) // its result is late, and it joins again
			s, err := p.client.Status(context.Background())
			if err != nil || s.Retried != 2 {
				t.Errorf("%d retried, %v", s.Retried, err)
			}
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// pause waits a little: nothing else tells what a process in Python has done.
func pause(t *testing.T) {
	t.Helper()
	select {
	case <-time.After(10 * time.Millisecond):
	case <-t.Context().Done():
	}
}
