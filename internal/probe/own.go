// Package probe determines what processes are doing: it collects the goroutines of this process,
// and the threads of a process tree from the kernel.
package probe

import (
	"bytes"
	"encoding/json"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"github.com/hvdrun/hvdrun/stacks"
)

// mostRecords bounds the goroutines that own looks at.
const mostRecords = 100_000

// own returns the goroutines of this process, except the calling one. It stops the world only at
// the beginning: the stack of each goroutine is recorded when it is next scheduled, or at once if
// it waits. This is by far the cheapest way: for 10,000 goroutines it takes 9 ms and stops the
// world for 0.3 ms, while runtime.Stack stops it for 77 ms. A signal interrupts a goroutine in a
// loop without calls.
func own() []stacks.Goroutines {
	records := make([]runtime.StackRecord, min(runtime.NumGoroutine()+64, mostRecords))
	n, ok := runtime.GoroutineProfile(records)
	for !ok && n < mostRecords {
		records = make([]runtime.StackRecord, min(n+n/8+64, mostRecords))
		n, ok = runtime.GoroutineProfile(records)
	}
	if !ok {
		return []stacks.Goroutines{{Count: n, Frames: []stacks.Frame{{Func: "more goroutines than are looked at"}}}}
	}
	g := grouping{at: map[string]int{}}
	cut := false // records have the innermost 32 frames
	for i := range records[:n] {
		pcs := records[i].Stack()
		cut = cut || len(pcs) == len(records[i].Stack0)
		g.add(pcs, 1)
	}
	if cut && !slices.ContainsFunc(g.all, func(g stacks.Goroutines) bool { return g.Training }) {
		if deep := deepStacks(); deep != nil {
			g.all = deep
		}
	}
	stacks.Sort(g.all)
	return g.all[:min(len(g.all), stacks.MaxGroups)]
}

// grouping groups equal stacks, and resolves each once.
type grouping struct {
	all []stacks.Goroutines
	at  map[string]int // index in all by stack; negative: left out
}

func (g *grouping) add(pcs []uintptr, count int) {
	key := unsafe.String((*byte)(unsafe.Pointer(unsafe.SliceData(pcs))), len(pcs)*int(unsafe.Sizeof(pcs[0])))
	i, known := g.at[key]
	if !known {
		frames := resolve(pcs)
		if i = len(g.all); len(frames) == 0 || isOwn(frames) {
			i = -1
		} else {
			g.all = append(g.all, stacks.Goroutines{Training: stacks.Trains(frames), Frames: frames})
		}
		g.at[strings.Clone(key)] = i
	}
	if i >= 0 {
		g.all[i].Count += count
	}
}

// deepStacks returns the goroutines with 128 frames of each, at four times the cost. It parses the
// lines "COUNT @ PC PC…" of runtime/pprof; nil: the format differs.
func deepStacks() []stacks.Goroutines {
	var text bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&text, 1); err != nil {
		return nil
	}
	g := grouping{at: map[string]int{}}
	for line := range strings.Lines(text.String()) {
		count, rest, is := strings.Cut(strings.TrimSpace(line), " @ ")
		n, err := strconv.Atoi(count)
		if !is || err != nil {
			continue
		}
		var pcs []uintptr
		for _, word := range strings.Fields(rest) {
			pc, err := strconv.ParseUint(word, 0, 64)
			if err != nil {
				return nil
			}
			pcs = append(pcs, uintptr(pc))
		}
		if len(pcs) > 0 {
			g.add(pcs, n)
		}
	}
	return g.all
}

// isOwn reports whether the stack is that of own's caller.
func isOwn(frames []stacks.Frame) bool {
	for _, f := range frames {
		if f.Func == stacks.Module+"/internal/probe.own" || f.Func == stacks.Module+"/internal/probe.deepStacks" {
			return true
		}
	}
	return false
}

func resolve(pcs []uintptr) (all []stacks.Frame) {
	if len(pcs) == 0 {
		return nil
	}
	frames := runtime.CallersFrames(pcs)
	for {
		f, more := frames.Next()
		if f.Function != "" {
			all = append(all, stacks.Frame{Func: f.Function, File: f.File, Line: f.Line})
		}
		if !more {
			return all
		}
	}
}

// OwnText returns the result of Own as JSON of at most most bytes. Goroutines beyond that are left
// out and counted.
func OwnText(most int) []byte {
	w := stacks.Worker{Goroutines: own()}
	for {
		text, err := json.Marshal(w)
		if err != nil || len(text) <= most || len(w.Goroutines) == 0 {
			return text
		}
		n := len(w.Goroutines) / 2
		w.Error = strconv.Itoa(n) + " or more groups of goroutines are left out"
		w.Goroutines = w.Goroutines[:n]
	}
}
