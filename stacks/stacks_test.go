package stacks

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
)

// TestUser: frames of Go's library and of hvdrun are distinguished from the user's code.
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

// TestStandard: the list of the standard library's packages is complete.
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
		"main.load f.go:2, main.train f.go:3": frames("os.Open", "main.load", "main.train", Module+"/elastic.Run"),
		"a.b/x.A f.go:1, a.b/x.B f.go:2, a.b/x.C f.go:3, … main.train f.go:5": frames("a.b/x.A", "a.b/x.B", "a.b/x.C", "a.b/x.D", "main.train", "main.main"),
	} {
		if got := Text(of); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	sh := Process{PID: 7, Threads: []Thread{{TID: 7, Name: "sh", State: "S", Syscall: "wait4", Wait: "do_wait"}}}
	python := Process{PID: 8, Parent: 7, Threads: []Thread{{TID: 8, Name: "python3", State: "D", Syscall: "read", Of: "/data/a", Wait: "folio_wait"}}}
	stopped := Process{PID: 7, Threads: []Thread{{Name: "train", State: "T"}}}
	faulting := Process{PID: 8, Parent: 7, Threads: []Thread{{TID: 8, Name: "python3", State: "S", Syscall: "futex"}, {TID: 9, Name: "python3", State: "D"}}}
	trains := []Goroutines{{Count: 1, Frames: frames("main.other")}, {Count: 1, Training: true, Frames: frames("main.train")}}
	for want, w := range map[string]Worker{
		"python3 (pid 8) waits uninterruptibly in read of /data/a (folio_wait)": {Processes: []Process{sh, python}},
		"sh (pid 7) sleeps in wait4 (do_wait)":                                  {Processes: []Process{sh}},
		"python3 (pid 8) waits uninterruptibly":                                 {Processes: []Process{sh, faulting}},
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

// FuzzParse: what another process reports stays within the bounds, can be printed, and is read back
// unchanged.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"goroutines":[{"count":-1,"training":true,"frames":[{"func":"main.\u001b[2Jx","file":"a\nb","line":-7}]}],"error":"\u0000"}`))
	f.Add([]byte(`{"processes":[{"pid":1,"parent":1,"threads":[{"state":"\u202e","kernel":["` + strings.Repeat("é", 300) + `"]}]},{"pid":1,"parent":1}]}`))
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
		back, err := Parse(again)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := json.Marshal(back); err != nil || string(text) != string(again) {
			t.Errorf("%s became %s, %v", again, text, err)
		}
	})
}
