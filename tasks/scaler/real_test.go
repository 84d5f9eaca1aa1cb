package scaler

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the golden frames anew")

// The real Scaler is not part of this repository. HVDRUN_SCALER names a folder with the sources of
// version 1.7.14, and Debian's packages python3-zmq, python3-bidict, python3-psutil, python3-tblib
// and python3-cloudpickle run them.
func scalerSources(t *testing.T) string {
	t.Helper()
	folder := os.Getenv("HVDRUN_SCALER")
	if folder == "" {
		t.Skip("HVDRUN_SCALER is not set")
	}
	return folder
}

// process is one that a test has started.
type process struct {
	*exec.Cmd
	out  *bufio.Reader
	in   io.Writer
	seen bytes.Buffer
}

// start runs a command, whose standard output and errors are read together unless split is set.
func startProcess(t *testing.T, split bool, env []string, name string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(name, args...)}
	p.Env = append(os.Environ(), env...)
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Stdout, p.Stderr = w, w
	if split {
		p.Stderr = &p.seen
	}
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.in = in
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	p.out = bufio.NewReader(r)
	t.Cleanup(func() {
		_ = syscall.Kill(-p.Process.Pid, syscall.SIGKILL) // what it has started too
		_ = p.Wait()
		r.Close()
		if t.Failed() {
			t.Logf("%s: %s", name, &p.seen)
		}
	})
	return p
}

// until reads lines until one contains the text.
func (p *process) until(t *testing.T, text string) string {
	t.Helper()
	for {
		line, err := p.out.ReadString('\n')
		p.seen.WriteString(line)
		if strings.Contains(line, text) {
			return line
		}
		if err != nil {
			t.Fatalf("%q does not come: %v\n%s", text, err, &p.seen)
		}
	}
}

func startScheduler(t *testing.T, address string) *process {
	t.Helper()
	p := startProcess(t, false, []string{"PYTHONPATH=" + scalerSources(t), "PYTHONUNBUFFERED=1"}, "/usr/bin/python3", "-c",
		"import sys; from scaler.entry_points.scheduler import main; main()", "--worker-timeout-seconds", "3", address)
	p.until(t, "StatusReporter: started")
	return p
}

// real is a client of the real Scaler.
type realClient struct {
	t *testing.T
	*process
}

func startClient(t *testing.T, address string) *realClient {
	t.Helper()
	return &realClient{t, startProcess(t, true, []string{"PYTHONPATH=" + scalerSources(t)}, "/usr/bin/python3", "testdata/client.py", address)}
}

// tell gives a command, and returns at once.
func (c *realClient) tell(words ...any) {
	c.t.Helper()
	text, err := json.Marshal(words)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c.in, "%s\n", text); err != nil {
		c.t.Fatal(err)
	}
}

// outcome is what became of a call.
type clientOutcome struct {
	Result      any
	Error, Text string
}

// hear reads the answer to a command.
func (c *realClient) hear(answer any) {
	c.t.Helper()
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		c.t.Fatalf("the client ends: %v", err)
	}
	if err := json.Unmarshal(line, answer); err != nil {
		c.t.Fatalf("%s: %v", line, err)
	}
}

func (c *realClient) ask(answer any, words ...any) {
	c.t.Helper()
	c.tell(words...)
	c.hear(answer)
}

func freeAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return "tcp://" + ln.Addr().String()
}

// recorder writes down the frames of a socket.
type recorder struct {
	Socket
	mu    sync.Mutex
	lines []string
	most  map[string]int // messages of a type
}

// dial is a Config's Dial.
func (r *recorder) dial(address string) func(context.Context, []byte) (Socket, error) {
	return func(ctx context.Context, id []byte) (Socket, error) {
		socket, err := dial(ctx, address, id, 1<<20)
		r.Socket = socket
		return r, err
	}
}

func (r *recorder) note(way string, frames [][]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kind := way + " " + string(frames[0])
	if r.most[kind]++; r.most[kind] > 3 {
		return
	}
	line := kind
	for _, frame := range frames[1:] {
		line += fmt.Sprintf(" %x.", frame)
	}
	r.lines = append(r.lines, line)
}

func (r *recorder) Send(frames [][]byte) error {
	r.note(">", frames)
	return r.Socket.Send(frames)
}

func (r *recorder) Recv() ([][]byte, error) {
	frames, err := r.Socket.Recv()
	if err == nil {
		r.note("<", frames)
	}
	return frames, err
}

// TestRealScheduler: a worker in Go at the scheduler of Scaler 1.7.14, with its client.
func TestRealScheduler(t *testing.T) {
	address := freeAddress(t)
	scheduler := startScheduler(t, address)
	record := &recorder{most: make(map[string]int)}
	started := make(chan string, 100)
	functions := testFunctions()
	functions["wait"] = func(ctx context.Context, args [][]byte) ([]byte, error) {
		started <- string(args[0])
		<-ctx.Done()
		return nil, ctx.Err()
	}
	cfg := Config{Address: address, Functions: functions, Name: "go", Heartbeat: 200 * time.Millisecond}
	cfg.Dial = record.dial(address)
	_, ended := work(t, cfg)
	scheduler.until(t, "connected")
	client := startClient(t, address)

	points := make([]square, 400)
	for i := range points {
		points[i] = square{float64(i), 1}
	}
	var got []clientOutcome
	client.ask(nil2(), "submit", "norm", points)
	client.ask(&got, "gather")
	if len(got) != len(points) {
		t.Fatalf("%d results", len(got))
	}
	for i, r := range got {
		if r.Result != float64(i*i+1) {
			t.Errorf("task %d: %+v", i, r)
		}
	}
	var one clientOutcome
	for _, c := range []struct{ function, class, text string }{
		{"panic", "RuntimeError", "no such shard"},
		{"nosuch", "LookupError", "no function"},
		{"norm", "TypeError", "argument"},
	} {
		client.ask(&one, "call", c.function, []any{"text"})
		if one.Error != c.class || !strings.Contains(one.Text, c.text) {
			t.Errorf("%s: %+v", c.function, one)
		}
	}
	client.ask(&one, "pickled")
	if one.Error != "NotImplementedError" {
		t.Errorf("a pickled function: %+v", one)
	}
	// One that runs and one that waits are canceled. A new one shows that the slot is free.
	client.ask(nil2(), "submit", "wait", []string{"runs", "waits"})
	<-started
	client.ask(nil2(), "cancel", 1)
	client.ask(nil2(), "cancel", 0)
	client.ask(&one, "call", "norm", []any{square{3, 4}})
	if one.Result != 25.0 {
		t.Errorf("after a cancel: %+v", one)
	}
	client.ask(nil2(), "shutdown")
	if err := <-ended; err != nil {
		t.Errorf("Work returns %v", err)
	}
	checkRecord(t, record.lines, "scheduler.frames")
}

// nil2 takes an answer that says nothing.
func nil2() any { return new(any) }

// TestRealBalance: the scheduler takes tasks back from a worker that is full, for one that is idle.
func TestRealBalance(t *testing.T) {
	address := freeAddress(t)
	scheduler := startScheduler(t, address)
	release := make(chan struct{})
	var mu sync.Mutex
	calls := map[string]int{}
	worker := func(name string) Config {
		return Config{Address: address, Name: name, Functions: Functions{"slow": func(ctx context.Context, args [][]byte) ([]byte, error) {
			if name == "first" {
				select {
				case <-release:
				case <-ctx.Done():
				}
			}
			mu.Lock()
			calls[name]++
			mu.Unlock()
			return args[0], nil
		}}}
	}
	record := &recorder{most: make(map[string]int)}
	first := worker("first")
	first.Dial = record.dial(address)
	stop, ended := work(t, first)
	scheduler.until(t, "|first|")
	client := startClient(t, address)
	var numbers []int
	for i := range 30 {
		numbers = append(numbers, i)
	}
	client.ask(nil2(), "submit", "slow", numbers)
	work(t, worker("second"))
	scheduler.until(t, "|second|")
	scheduler.until(t, "balance:")
	client.tell("gather")
	for more := true; more; {
		scheduler.until(t, "balance:")
		mu.Lock()
		more = calls["second"] < 15
		mu.Unlock()
	}
	close(release)
	var got []clientOutcome
	client.hear(&got)
	for i, r := range got {
		if r.Result != float64(i) {
			t.Errorf("task %d: %+v", i, r)
		}
	}
	t.Logf("calls: %v", calls)
	stop(nil)
	<-ended
	checkRecord(t, record.lines, "balance.frames")
}

// TestRealWorkerDies: a worker is killed with tasks, the others do them.
func TestRealWorkerDies(t *testing.T) {
	if address := os.Getenv("SCALER_TEST_WORKER"); address != "" {
		_ = Work(t.Context(), Config{Address: address, Name: "dies", Functions: Functions{"slow": func(ctx context.Context, _ [][]byte) ([]byte, error) {
			fmt.Println("it runs")
			<-ctx.Done()
			return nil, ctx.Err()
		}}})
		return
	}
	address := freeAddress(t)
	scheduler := startScheduler(t, address)
	dies := startProcess(t, false, []string{"SCALER_TEST_WORKER=" + address}, os.Args[0], "-test.run=^TestRealWorkerDies$")
	scheduler.until(t, "|dies|")
	client := startClient(t, address)
	var numbers []int
	for i := range 200 {
		numbers = append(numbers, i)
	}
	client.ask(nil2(), "submit", "slow", numbers)
	dies.until(t, "it runs")
	for range 3 {
		work(t, Config{Address: address, Name: "lives", Functions: Functions{"slow": echoFunc}})
	}
	for range 3 {
		scheduler.until(t, "|lives|")
	}
	if err := dies.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	scheduler.until(t, "rerouting")
	var got []clientOutcome
	client.ask(&got, "gather")
	for i, r := range got {
		if r.Result != float64(i) {
			t.Errorf("task %d: %+v", i, r)
		}
	}
}

// TestRealSchedulerRestarts: a worker joins the scheduler that comes after the one that was killed.
func TestRealSchedulerRestarts(t *testing.T) {
	address := freeAddress(t)
	scheduler := startScheduler(t, address)
	work(t, Config{Address: address, Functions: Functions{"echo": echoFunc}})
	scheduler.until(t, "connected")
	if err := scheduler.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = scheduler.Wait()
	startScheduler(t, address).until(t, "connected")
	client := startClient(t, address)
	var one clientOutcome
	client.ask(&one, "call", "echo", []any{"again"})
	if one.Result != "again" {
		t.Errorf("%+v", one)
	}
}

// checkRecord writes the golden file, or compares the types that are in both: identities and times
// differ from run to run. A worker that is shut down may find the scheduler gone before it leaves.
func checkRecord(t *testing.T, lines []string, name string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	types := func(lines []string) (found []string) {
		for _, line := range lines {
			if len(line) > 4 && line[:4] != "> DR" && !slices.Contains(found, line[:4]) {
				found = append(found, line[:4])
			}
		}
		slices.Sort(found)
		return found
	}
	if a, b := types(lines), types(strings.Split(string(golden), "\n")); !slices.Equal(a, b) {
		t.Errorf("messages of types %v, in the golden file %v", a, b)
	}
}
