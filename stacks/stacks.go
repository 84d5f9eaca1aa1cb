// Package stacks describes where a process is: its goroutines, and its threads as the kernel
// reports them. Worker.Text and Text select the frames of the user's own code and format them. Data
// from other processes passes Clean before it is shown. Package probe collects the values.
package stacks

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of the data about a process.
const (
	MaxGroups    = 256 // of goroutines
	MaxFrames    = 128 // of a stack, innermost first
	MaxText      = 256 // bytes of a name or path
	MaxProcesses = 16
	MaxThreads   = 64 // of a process
	MaxKernel    = 24 // frames of a thread's stack in the kernel
)

// Frame is a call in a stack.
type Frame struct {
	// Func is the function with the path of its package: main.(*loader).next.
	Func string `json:"func"`
	// File is the path of the source file, as it was passed to the compiler.
	File string `json:"file"`
	Line int    `json:"line"`
}

// Goroutines are the goroutines of a process that have the same stack.
type Goroutines struct {
	Count int `json:"count"`
	// Training reports whether they are in elastic.Run.
	Training bool    `json:"training,omitempty"`
	Frames   []Frame `json:"frames"`
}

// Thread is a thread of a process as the kernel reports it.
type Thread struct {
	TID  int    `json:"tid"`
	Name string `json:"name"`
	// State is R (running), S (sleeping), D (waiting in the kernel, not interruptible by signals),
	// T (stopped by a signal), t (stopped by a debugger) or another letter of proc_pid_stat(5).
	State string `json:"state"`
	// Wait is the function of the kernel in which the thread waits; empty: unknown, or it does not
	// wait.
	Wait string `json:"wait,omitempty"`
	// Syscall is the name of the thread's current system call; empty: none, or unknown. Of is the
	// file to which the call's first argument refers, if that is a descriptor.
	Syscall string `json:"syscall,omitempty"`
	Of      string `json:"of,omitempty"`
	// Kernel is the thread's stack in the kernel, innermost first, if this process may read it.
	Kernel []string `json:"kernel,omitempty"`
}

// Process is a process with its threads; the first is the main thread.
type Process struct {
	PID     int      `json:"pid"`
	Parent  int      `json:"parent"`
	Command string   `json:"command"`
	Threads []Thread `json:"threads"`
	// More is the number of threads that exceed the bound of Threads.
	More int `json:"more_threads,omitempty"`
}

// Worker describes where a worker is.
type Worker struct {
	// Goroutines are the worker's goroutines, those in elastic.Run first, if it is a Go program
	// that has reported them.
	Goroutines []Goroutines `json:"goroutines,omitempty"`
	// Processes are the worker's process and its descendants.
	Processes []Process `json:"processes,omitempty"`
	// Error is why some of this is missing; empty: nothing is missing.
	Error string `json:"error,omitempty"`
}

// Module is the path of this module, which prefixes the names of hvdrun's functions.
const Module = "github.com/hvdrun/hvdrun"

// standard holds the first path elements of the packages of Go's standard library.
var standard = map[string]bool{}

func init() {
	for _, name := range strings.Fields(`archive arena bufio builtin bytes cmp cmd compress container context crypto database debug embed
		encoding errors expvar flag fmt go hash html image index internal io iter log maps math mime net os path plugin reflect
		regexp runtime simd slices sort strconv strings structs sync syscall testing text time type unicode unique unsafe vendor weak`) {
		standard[name] = true
	}
}

// Package returns the path of the function's package.
func (f Frame) Package() string {
	slash := strings.LastIndexByte(f.Func, '/') + 1
	name, _, _ := strings.Cut(f.Func[slash:], ".")
	return f.Func[:slash] + name
}

// beneath lists modules in whose code every worker has goroutines.
var beneath = []string{"google.golang.org/grpc", "golang.org/x/net", "golang.org/x/sys", "github.com/ebitengine/purego"}

// User reports whether the frame is of the user's own code: not of Go's library, of hvdrun, or of
// the packages with which hvdrun uses gRPC and system calls.
func (f Frame) User() bool {
	pkg := f.Package()
	first, _, _ := strings.Cut(pkg, "/")
	for _, module := range beneath {
		if pkg == module || strings.HasPrefix(pkg, module+"/") {
			return false
		}
	}
	if pkg == Module || strings.HasPrefix(pkg, Module+"/") {
		return strings.HasPrefix(pkg, Module+"/examples/")
	}
	return f.Func != "" && !standard[first] && !strings.HasPrefix(f.Func, "_cgo") && pkg != "goexit" && pkg != "cgo"
}

// UserFrames returns the frames of the user's own code, innermost first.
func UserFrames(frames []Frame) (of []Frame) {
	for _, f := range frames {
		if f.User() {
			of = append(of, f)
		}
	}
	return of
}

// shownFrames is the number of frames that Text returns.
const shownFrames = 3

// Text returns the innermost of the user's frames in one line, the caller last. If none of them is
// in package main, the innermost frame of package main follows: "main.loadBatch data.go:41,
// main.train train.go:88". Empty: there are no such frames.
func Text(frames []Frame) string {
	frames = UserFrames(frames)
	shown := frames[:min(len(frames), shownFrames)]
	isMain := func(f Frame) bool { return f.Package() == "main" }
	var all []string
	for _, f := range shown {
		all = append(all, f.text())
	}
	if i := slices.IndexFunc(frames, isMain); i >= len(shown) {
		all = append(all, "…", frames[i].text())
	}
	return strings.ReplaceAll(strings.Join(all, ", "), "…, ", "… ")
}

func (f Frame) text() string { return fmt.Sprintf("%s %s:%d", f.Func, path.Base(f.File), f.Line) }

// Text returns where the worker is, in one line: the user's frames of the goroutine that trains, or
// of the only goroutines with such frames; otherwise what the worker's leaf process does in the
// kernel. Empty: unknown.
func (w *Worker) Text() string {
	text := ""
	for i := range w.Goroutines {
		if g := &w.Goroutines[i]; i == 0 || g.Training {
			if text = Text(g.Frames); text != "" {
				break
			}
		}
	}
	if leaf := w.leaf(); text == "" && leaf != nil {
		return leaf.text()
	}
	return text
}

// isGo reports whether the goroutines include the user's code.
func isGo(all []Goroutines) bool {
	return slices.ContainsFunc(all, func(g Goroutines) bool { return len(UserFrames(g.Frames)) > 0 })
}

// leaf returns the process at the end of the chain of last-started children, such as the
// interpreter below a shell.
func (w *Worker) leaf() *Process {
	if len(w.Processes) == 0 {
		return nil
	}
	at := &w.Processes[0]
	for range w.Processes {
		i := slices.IndexFunc(w.Processes, func(p Process) bool { return p.Parent == at.PID })
		if i < 0 {
			break
		}
		at = &w.Processes[i]
	}
	return at
}

func (p *Process) stopped() bool {
	return len(p.Threads) > 0 && (p.Threads[0].State == "T" || p.Threads[0].State == "t")
}

// waits returns the first thread that waits uninterruptibly in the kernel, or else the main thread.
// The process must have a thread.
func (p *Process) waits() *Thread {
	return &p.Threads[max(0, slices.IndexFunc(p.Threads, func(t Thread) bool { return t.State == "D" }))]
}

// text describes the process in one line, by the thread that waits returns.
func (p *Process) text() string {
	if len(p.Threads) == 0 {
		return ""
	}
	t := p.waits()
	return fmt.Sprintf("%s (pid %d) %s", t.Name, p.PID, t.text())
}

// text describes the thread, as the predicate of a sentence about it.
func (t *Thread) text() string {
	in := ""
	if t.Syscall != "" {
		in = " in " + t.Syscall
		if t.Of != "" {
			in += " of " + t.Of
		}
	}
	if t.Wait != "" {
		in += " (" + t.Wait + ")"
	}
	switch t.State {
	case "R":
		return "runs"
	case "S":
		return "sleeps" + in
	case "D":
		return "waits uninterruptibly" + in
	case "T":
		return "is stopped by a signal"
	case "t":
		return "is stopped by a debugger"
	case "Z":
		return "has ended"
	}
	return "is in state " + t.State + in
}

// Text describes the thread in one line.
func (t Thread) Text() string { return fmt.Sprintf("%s (%d) %s", t.Name, t.TID, t.text()) }

// Sort sorts the goroutines: first those that train, then those with the user's code, then those
// with the most goroutines.
func Sort(all []Goroutines) {
	rank := func(g *Goroutines) int {
		switch {
		case g.Training:
			return 0
		case slices.ContainsFunc(g.Frames, Frame.User):
			return 1
		}
		return 2
	}
	slices.SortStableFunc(all, func(a, b Goroutines) int {
		return cmp.Or(cmp.Compare(rank(&a), rank(&b)), cmp.Compare(b.Count, a.Count))
	})
}

// Trains reports whether a stack passes through elastic.Run.
func Trains(frames []Frame) bool {
	return slices.ContainsFunc(frames, func(f Frame) bool {
		return f.Func == Module+"/elastic.Run" || strings.HasPrefix(f.Func, Module+"/elastic.(*runner).")
	})
}

// Key is equal for workers whose text is equal apart from process ids.
func (w *Worker) Key() string {
	if isGo(w.Goroutines) {
		return w.Text()
	}
	if leaf := w.leaf(); leaf != nil && len(leaf.Threads) > 0 {
		t := leaf.waits()
		return t.Name + " " + t.text()
	}
	return w.Error
}

// Clean returns at most MaxText bytes of the text, with only characters that a terminal and a log
// can show.
func Clean(s string) string {
	s = s[:min(len(s), MaxText)]
	for len(s) > 0 && !utf8.ValidString(s[max(0, len(s)-utf8.UTFMax):]) && !utf8.RuneStart(s[len(s)-1]) {
		s = s[:len(s)-1]
	}
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// Clean makes data from another process safe for a log and a terminal: within the bounds of this
// package, and without unprintable characters.
func (w *Worker) Clean() {
	w.Error = Clean(w.Error)
	w.Goroutines = w.Goroutines[:min(len(w.Goroutines), MaxGroups)]
	for i := range w.Goroutines {
		g := &w.Goroutines[i]
		g.Count = max(0, g.Count)
		g.Frames = g.Frames[:min(len(g.Frames), MaxFrames)]
		for j := range g.Frames {
			f := &g.Frames[j]
			f.Func, f.File, f.Line = Clean(f.Func), Clean(f.File), max(0, f.Line)
		}
	}
	w.Processes = w.Processes[:min(len(w.Processes), MaxProcesses)]
	for i := range w.Processes {
		p := &w.Processes[i]
		p.Command, p.More = Clean(p.Command), max(0, p.More)
		p.Threads = p.Threads[:min(len(p.Threads), MaxThreads)]
		for j := range p.Threads {
			t := &p.Threads[j]
			t.Name, t.State, t.Wait, t.Syscall, t.Of = Clean(t.Name), Clean(t.State), Clean(t.Wait), Clean(t.Syscall), Clean(t.Of)
			t.Kernel = t.Kernel[:min(len(t.Kernel), MaxKernel)]
			for k := range t.Kernel {
				t.Kernel[k] = Clean(t.Kernel[k])
			}
		}
	}
}

// Parse decodes JSON from another process. The caller bounds its length.
func Parse(text []byte) (Worker, error) {
	var w Worker
	if err := json.Unmarshal(text, &w); err != nil {
		return Worker{}, fmt.Errorf("stacks: %w", err)
	}
	w.Clean()
	return w, nil
}

// Asks reports whether it is safe to ask the worker for its goroutines. A stopped process does not
// answer. If a thread waits uninterruptibly in the kernel and outside of a system call, for example
// for a page of a file, the request would stop all other threads until that wait ends.
func (w *Worker) Asks() bool {
	if len(w.Processes) == 0 {
		return true
	}
	p := &w.Processes[0]
	return !p.stopped() && !slices.ContainsFunc(p.Threads, func(t Thread) bool { return t.State == "D" && t.Syscall == "" })
}
