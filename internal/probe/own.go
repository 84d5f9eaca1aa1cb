// Package probe determines what processes are doing: it collects the goroutines of this process,
// and the threads of a process tree from the kernel.
package probe

import (
	"bytes"
	"encoding/json"
	"runtime"
	"runtime/pprof"
	"strconv"
	"strings"

	"github.com/hvdrun/hvdrun/stacks"
)

// mostGoroutines bounds the goroutines that own looks at.
const mostGoroutines = 100_000

// own returns the goroutines of this process, except the calling one, with 128 frames of each. It
// stops the world only at the beginning: the stack of each goroutine is recorded when it is next
// scheduled, or at once if it waits. runtime.Stack stops the world until it has all. A signal
// interrupts a goroutine in a loop without calls. own parses the lines "COUNT @ PC PC…" of
// runtime/pprof; other lines are ignored.
func own() []stacks.Goroutines {
	if n := runtime.NumGoroutine(); n > mostGoroutines {
		return []stacks.Goroutines{{Count: n, Frames: []stacks.Frame{{Func: "more goroutines than are looked at"}}}}
	}
	var text bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&text, 1) // never fails: it writes to memory
	var all []stacks.Goroutines
	at := map[string]int{} // index in all by the stack's PCs
	for line := range strings.Lines(text.String()) {
		count, stack, is := strings.Cut(strings.TrimSpace(line), " @ ")
		n, err := strconv.Atoi(count)
		if !is || err != nil {
			continue
		}
		if i, known := at[stack]; known { // goroutines with other labels have the same stack
			all[i].Count += n
		} else if frames := resolve(stack); len(frames) > 0 && !isOwn(frames) {
			at[stack] = len(all)
			all = append(all, stacks.Goroutines{Count: n, Training: stacks.Trains(frames), Frames: frames})
		}
	}
	stacks.Sort(all)
	return all[:min(len(all), stacks.MaxGroups)]
}

// isOwn reports whether the stack is that of own's caller.
func isOwn(frames []stacks.Frame) bool {
	for _, f := range frames {
		if f.Func == stacks.Module+"/internal/probe.own" {
			return true
		}
	}
	return false
}

// resolve returns the frames of a stack's PCs, which are separated by blanks.
func resolve(stack string) (all []stacks.Frame) {
	var pcs []uintptr
	for word := range strings.FieldsSeq(stack) {
		if pc, err := strconv.ParseUint(word, 0, 64); err == nil {
			pcs = append(pcs, uintptr(pc))
		}
	}
	for frames, more := runtime.CallersFrames(pcs), len(pcs) > 0; more; {
		var f runtime.Frame
		if f, more = frames.Next(); f.Function != "" {
			all = append(all, stacks.Frame{Func: f.Function, File: f.File, Line: f.Line})
		}
	}
	return all
}

// OwnText returns the goroutines of this process as a stacks.Worker in JSON. To keep the JSON
// within most bytes, it leaves out goroutines and counts them.
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
