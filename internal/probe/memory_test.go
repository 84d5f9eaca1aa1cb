package probe

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/stacks"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

const victim = `package main

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

var held sync.Mutex
var spun atomic.Bool

type loader struct{ n int }

func (l *loader) next(depth int) {
	if depth > 0 {
		l.next(depth - 1)
		runtime.KeepAlive(l)
		return
	}
	<-make(chan int) // next
}

func spin() {
	for !spun.Load() { // spin
	}
}

func lock() { held.Lock() } // lock

func sleep() { time.Sleep(time.Hour) } // sleep

func pipe() {
	f, err := os.OpenFile(os.Args[1], os.O_RDONLY, 0) // pipe
	fmt.Fprintln(os.Stderr, f, err)
}

func main() {
	held.Lock()
	for range 2 {
		go (&loader{}).next(5)
	}
	go spin()
	go lock()
	go sleep()
	go pipe()
	time.AfterFunc(200*time.Millisecond, func() { fmt.Println("ready") })
	select {} // main
}
`

var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "stacks")
	if err != nil {
		return "", err
	}
	source := filepath.Join(dir, "victim.go")
	if err := os.WriteFile(source, []byte(victim), 0o600); err != nil {
		return "", err
	}
	for _, mode := range []string{"exe", "pie"} {
		cmd := exec.Command("go", "build", "-buildmode", mode, "-o", filepath.Join(dir, mode), source)
		cmd.Env = append(os.Environ(), "GO111MODULE=off", "GOFLAGS=", "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%w: %s", err, out)
		}
	}
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", filepath.Join(dir, "stripped"), source)
	cmd.Env = append(os.Environ(), "GO111MODULE=off", "GOFLAGS=", "CGO_ENABLED=0")
	return dir, cmd.Run()
})

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

// lineOf returns the line of the victim that has a comment.
func lineOf(mark string) string {
	n := 0
	for line := range strings.Lines(victim) {
		n++
		if strings.HasSuffix(strings.TrimSpace(line), "// "+mark) {
			return fmt.Sprintf("victim.go:%d", n)
		}
	}
	return "nowhere"
}

func startVictim(t *testing.T, mode string) (pid int, fifo string) {
	t.Helper()
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	fifo = filepath.Join(t.TempDir(), "data.fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(dir, mode), fifo)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd.Process.Pid, fifo
}

// stop stops a process.
func stop(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if !follow.Await(t, func() bool {
		all, err := Probe(pid)
		return err == nil && !slices.ContainsFunc(all[0].Threads, func(t stacks.Thread) bool { return t.State != "T" })
	}) {
		t.Fatal("it does not stop")
	}
}

// TestFromMemory: the goroutines of a process that a signal has stopped are read; of a running
// process, all but the goroutine that is running.
func TestFromMemory(t *testing.T) {
	if !readable {
		t.Skip("the layout is not known")
	}
	for _, mode := range []string{"exe", "pie"} {
		t.Run(mode, func(t *testing.T) {
			pid, _ := startVictim(t, mode)
			wants := []string{"main.(*loader).next " + lineOf("next"), "main.lock " + lineOf("lock"), "main.sleep " + lineOf("sleep"),
				"main.pipe " + lineOf("pipe"), "main.main " + lineOf("main")}
			check := func(wants ...string) {
				t.Helper()
				all, err := FromMemory(pid)
				if err != nil {
					t.Fatal(err)
				}
				var texts []string
				for _, g := range all {
					texts = append(texts, fmt.Sprintf("%d× %s", g.Count, stacks.Text(g.Frames)))
				}
				for _, want := range wants {
					if !strings.Contains(strings.Join(texts, "\n"), want) {
						t.Errorf("%s is missing in:\n%s", want, strings.Join(texts, "\n"))
					}
				}
				if !strings.Contains(strings.Join(texts, "\n"), "2× main.(*loader).next") {
					t.Errorf("equal stacks are not joined:\n%s", strings.Join(texts, "\n"))
				}
			}
			check(wants...)
			stop(t, pid)
			check(append(wants, "main.spin "+lineOf("spin"))...)
		})
	}
	pid, _ := startVictim(t, "stripped")
	if _, err := FromMemory(pid); err == nil || !strings.Contains(err.Error(), "symbol table") {
		t.Errorf("of a stripped program: %v", err)
	}
	if _, err := FromMemory(1 << 30); err == nil {
		t.Error("of no process")
	}
	sleep := exec.Command("sleep", "600")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sleep.Process.Kill(); _ = sleep.Wait() }()
	if _, err := FromMemory(sleep.Process.Pid); err == nil || !strings.Contains(err.Error(), "not a Go program") {
		t.Errorf("of sleep: %v", err)
	}
}
