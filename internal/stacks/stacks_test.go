package stacks

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unicode"

	"github.com/hvdrun/hvdrun/test/follow"
)

// TestUser: what is of Go's library and of hvdrun is told from the user's code.
func TestUser(t *testing.T) {
	for name, want := range map[string]bool{
		"main.train": true, "main.(*loader).next": true, "main.main.func1": true, "example.com/data.Load[...]": true,
		"github.com/me/hvdrun/data.Load": true, "github.com/hvdrun/hvdrun/examples/ring/model.Step": true,
		"runtime.gopark": false, "sync.(*Mutex).Lock": false, "internal/poll.(*FD).Read": false, "os.Open": false,
		"github.com/hvdrun/hvdrun/elastic.Run": false, "github.com/hvdrun/hvdrun.x": false, "runtime/pprof.writeGoroutine": false,
		"": false, "_cgo_1234_Cfunc_read": false, "golang.org/x/sys/unix.Read": false,
		"google.golang.org/grpc.(*Server).Serve": false, "golang.org/x/net/http2.readFrameHeader": false, "google.golang.org/grpcx.F": true,
	} {
		if got := (Frame{Func: name}).User(); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestStandard: the list of the library's packages is complete.
func TestStandard(t *testing.T) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Skip(err)
	}
	dirs, err := os.ReadDir(filepath.Join(strings.TrimSpace(string(root)), "src"))
	if err != nil || len(dirs) == 0 {
		t.Skip("Go's source is not here")
	}
	for _, d := range dirs {
		if d.IsDir() && d.Name() != "testdata" && !strings.HasPrefix(d.Name(), "_") && !standard[d.Name()] {
			t.Errorf("%s is missing", d.Name())
		}
	}
}

func frames(names ...string) (all []Frame) {
	for i, n := range names {
		all = append(all, Frame{Func: n, File: "/src/f.go", Line: i + 1})
	}
	return all
}

// TestText: a line has the innermost frames of the user's code, and at least one of package main.
func TestText(t *testing.T) {
	for want, of := range map[string][]Frame{
		"":                                    frames("runtime.gopark", "sync.(*Mutex).Lock"),
		"main.load f.go:2, main.train f.go:3": frames("os.Open", "main.load", "main.train", own+"/elastic.Run"),
		"a.b/x.A f.go:1, a.b/x.B f.go:2, a.b/x.C f.go:3, … main.train f.go:5": frames("a.b/x.A", "a.b/x.B", "a.b/x.C", "a.b/x.D", "main.train", "main.main"),
	} {
		if got := Text(of); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	sh := Process{PID: 7, Threads: []Thread{{TID: 7, Name: "sh", State: "S", Syscall: "wait4", Wait: "do_wait"}}}
	python := Process{PID: 8, Parent: 7, Threads: []Thread{{TID: 8, Name: "python3", State: "D", Syscall: "read", Of: "/data/a", Wait: "folio_wait"}}}
	stopped := Process{PID: 7, Threads: []Thread{{Name: "train", State: "T"}}}
	trains := []Goroutines{{Count: 1, Frames: frames("main.other")}, {Count: 1, Training: true, Frames: frames("main.train")}}
	for want, w := range map[string]Worker{
		"python3 (pid 8) waits uninterruptibly in read of /data/a (folio_wait)": {Processes: []Process{sh, python}},
		"sh (pid 7) sleeps in wait4 (do_wait)":                                  {Processes: []Process{sh}},
		"main.train f.go:1 (is stopped by a signal)":                            {Processes: []Process{stopped}, Goroutines: trains[1:]},
		"train (pid 7) is stopped by a signal":                                  {Processes: []Process{stopped}},
		"main.train f.go:1":                                                     {Processes: []Process{sh}, Goroutines: trains[1:]},
		"main.other f.go:1":                                                     {Goroutines: trains[:1]},
		"":                                                                      {},
	} {
		if got := w.Text(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

//go:noinline
func deeper(n int, c chan int) {
	if n > 0 {
		deeper(n-1, c)
		return
	}
	<-c
}

// TestOwn: equal stacks are told once, a loop without calls is told, and one that is deeper than a
// cheap look goes has its outermost frames.
func TestOwn(t *testing.T) {
	c := make(chan int)
	var ended sync.WaitGroup
	var stop syncFlag
	for range 50 {
		ended.Go(func() { deeper(3, c) })
	}
	ended.Go(func() { deeper(60, c) })
	ended.Go(func() { stop.spin() })
	defer func() { close(c); stop.Store(true); ended.Wait() }()
	var text string
	for range 1000 {
		all := Own()
		found, depth := 0, 0
		text = ""
		for _, g := range all {
			text += Text(g.Frames) + "\n"
			for _, f := range g.Frames {
				if strings.HasSuffix(f.Func, "stacks.Own") {
					t.Fatal("the caller is among them")
				}
				if strings.HasSuffix(f.Func, "stacks.deeper") {
					depth = max(depth, len(g.Frames))
					found = max(found, g.Count)
				}
			}
		}
		if found >= 50 && depth > 60 {
			break
		}
		runtime.Gosched()
	}
	all := Own()
	if len(all) == 0 || len(all) > MaxGroups {
		t.Fatalf("%d groups:\n%s", len(all), text)
	}
	deepest, spins := 0, false
	for _, g := range all {
		deepest = max(deepest, len(g.Frames))
		for _, f := range g.Frames {
			spins = spins || strings.HasSuffix(f.Func, ".spin")
		}
	}
	if deepest < 60 || !spins {
		t.Errorf("%d frames at most, the loop is told: %v", deepest, spins)
	}
	if text := OwnText(2000); len(text) > 2000 || !json.Valid(text) {
		t.Errorf("%d bytes: %s", len(text), text)
	}
}

// syncFlag ends a loop without calls.
type syncFlag struct{ atomic.Bool }

func (s *syncFlag) spin() {
	for !s.Load() {
		continue
	}
}

// TestProbe: a process and those that it has started are told, with the system call and its file.
func TestProbe(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "data")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	keep, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer keep.Close()
	cmd := exec.Command("sh", "-c", "cat "+fifo+"; :")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	var w Worker
	follow.Poll(func() bool {
		w.Processes, err = Probe(cmd.Process.Pid)
		return err != nil || strings.Contains(w.Text(), "read of")
	})
	if len(w.Processes) != 2 || !strings.HasPrefix(w.Text(), "cat (pid ") || !strings.Contains(w.Text(), ") sleeps in read of "+fifo) {
		t.Errorf("%s: %+v", w.Text(), w.Processes)
	}
	if err := syscall.Kill(w.Processes[1].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := Probe(1 << 30); err == nil {
		t.Error("of no process")
	}
	own, err := Probe(os.Getpid())
	if err != nil || len(own[0].Threads) < 2 || own[0].Threads[0].TID != os.Getpid() {
		t.Errorf("%+v, %v", own, err)
	}
	for _, line := range []string{"", "running", "x 1", "-1 0x1 0x2", "0", "999999 0x0", "0 zzz", "0 0xffffffffffffffff"} {
		if name, of := syscallOf("/proc/self", line); of != "" && name == "" {
			t.Errorf("%q: %s of %s", line, name, of)
		}
	}
}

// FuzzParse: what another process tells is within the bounds, can be shown, and is read again as it
// was.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"goroutines":[{"count":-1,"training":true,"frames":[{"func":"main.\u001b[2Jx","file":"a\nb","line":-7}]}],"error":"\u0000"}`))
	f.Add([]byte(`{"processes":[{"pid":1,"parent":1,"threads":[{"state":"\u202e","kernel":["` + strings.Repeat("é", 300) + `"]}]},{"pid":1,"parent":1}]}`))
	f.Add(OwnText(4096))
	f.Fuzz(func(t *testing.T, text []byte) {
		w, err := Parse(text)
		if err != nil {
			return
		}
		if len(w.Goroutines) > MaxGroups || len(w.Processes) > MaxProcesses {
			t.Errorf("%d groups, %d processes", len(w.Goroutines), len(w.Processes))
		}
		shown := w.Text() + w.Key() + w.Error
		for _, g := range w.Goroutines {
			if len(g.Frames) > MaxFrames || g.Count < 0 {
				t.Errorf("%+v", g)
			}
			for _, frame := range g.Frames {
				shown += frame.Func + frame.File
			}
		}
		for _, p := range w.Processes {
			if len(p.Threads) > MaxThreads {
				t.Errorf("%d threads", len(p.Threads))
			}
			for _, thread := range p.Threads {
				shown += thread.Text() + strings.Join(thread.Kernel, "")
			}
		}
		if strings.ContainsFunc(shown, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%q is shown", shown)
		}
		w.Asks()
		again, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := Parse(again); err != nil || !reflect.DeepEqual(back, w) {
			t.Errorf("%+v became %+v, %v", w, back, err)
		}
	})
}

// BenchmarkOwn measures a look at 10,000 goroutines.
func BenchmarkOwn(b *testing.B) {
	c := make(chan int)
	for range 10_000 {
		go deeper(10, c)
	}
	defer close(c)
	for b.Loop() {
		Own()
	}
}
