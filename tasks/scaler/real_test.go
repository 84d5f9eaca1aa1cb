package scaler

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

func startScheduler(t *testing.T, address string) *process {
	t.Helper()
	p := startProcess(t, false, []string{"PYTHONPATH=" + realSources(t), "PYTHONUNBUFFERED=1"}, "/usr/bin/python3", "-c",
		"import sys; from scaler.entry_points.scheduler import main; main()", "--worker-timeout-seconds", "3", address)
	p.Until(t, "StatusReporter: started")
	return p
}

// realClient is a client of the real Scaler.
type realClient struct {
	t *testing.T
	*process
}

func startClient(t *testing.T, address string) *realClient {
	t.Helper()
	return &realClient{t, startProcess(t, true, []string{"PYTHONPATH=" + realSources(t)}, "/usr/bin/python3", "testdata/client.py", address)}
}

// tell sends a command and returns at once.
func (c *realClient) tell(words ...any) {
	c.t.Helper()
	text, err := json.Marshal(words)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c.In, "%s\n", text); err != nil {
		c.t.Fatal(err)
	}
}

// clientOutcome is the outcome of a call.
type clientOutcome struct {
	Result      any
	Error, Text string
}

// hear reads the answer to a command.
func (c *realClient) hear(answer any) {
	c.t.Helper()
	line, err := c.Out.ReadBytes('\n')
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

// recorder records the frames of a socket.
type recorder struct {
	Socket
	frameLog
}

// dial returns a function for Config.Dial.
func (r *recorder) dial(address string) func(context.Context, []byte) (Socket, error) {
	return func(ctx context.Context, id []byte) (Socket, error) {
		socket, err := dial(ctx, address, id, 1<<20)
		r.Socket = socket
		return r, err
	}
}

func (r *recorder) Send(frames [][]byte) error {
	r.Note(">", frames)
	return r.Socket.Send(frames)
}

func (r *recorder) Recv() ([][]byte, error) {
	frames, err := r.Socket.Recv()
	if err == nil {
		r.Note("<", frames)
	}
	return frames, err
}

// TestRealScheduler: a worker in Go works for the scheduler and the client of Scaler 1.7.14.
func TestRealScheduler(t *testing.T) {
	address := freeAddress(t)
	scheduler := startScheduler(t, address)
	record := &recorder{}
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
	scheduler.Until(t, "connected")
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
	// One task that runs and one that waits are canceled. A new one shows that the slot is free.
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
	record.Check(t, "scheduler.frames")
}

// nil2 returns a place for an answer without content.
func nil2() any { return new(any) }

// TestRealBalance: the scheduler takes tasks back from a full worker for an idle one.
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
	record := &recorder{}
	first := worker("first")
	first.Dial = record.dial(address)
	stop, ended := work(t, first)
	scheduler.Until(t, "|first|")
	client := startClient(t, address)
	var numbers []int
	for i := range 30 {
		numbers = append(numbers, i)
	}
	client.ask(nil2(), "submit", "slow", numbers)
	work(t, worker("second"))
	scheduler.Until(t, "|second|")
	scheduler.Until(t, "balance:")
	client.tell("gather")
	for more := true; more; {
		scheduler.Until(t, "balance:")
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
	record.Check(t, "balance.frames")
}

// TestRealWorkerDies: a worker is killed while it has tasks, and the others run them.
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
	scheduler.Until(t, "|dies|")
	client := startClient(t, address)
	var numbers []int
	for i := range 200 {
		numbers = append(numbers, i)
	}
	client.ask(nil2(), "submit", "slow", numbers)
	dies.Until(t, "it runs")
	for range 3 {
		work(t, Config{Address: address, Name: "lives", Functions: Functions{"slow": echoFunc}})
	}
	for range 3 {
		scheduler.Until(t, "|lives|")
	}
	if err := dies.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	scheduler.Until(t, "rerouting")
	var got []clientOutcome
	client.ask(&got, "gather")
	for i, r := range got {
		if r.Result != float64(i) {
			t.Errorf("task %d: %+v", i, r)
		}
	}
}

// TestRealSchedulerRestarts: after the scheduler was killed, a worker joins the next one.
func TestRealSchedulerRestarts(t *testing.T) {
	address := freeAddress(t)
	scheduler := startScheduler(t, address)
	work(t, Config{Address: address, Functions: Functions{"echo": echoFunc}})
	scheduler.Until(t, "connected")
	if err := scheduler.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = scheduler.Wait()
	startScheduler(t, address).Until(t, "connected")
	client := startClient(t, address)
	var one clientOutcome
	client.ask(&one, "call", "echo", []any{"again"})
	if one.Result != "again" {
		t.Errorf("%+v", one)
	}
}
