package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// weigh records the most memory that any of these workers has had.
func (b *bench) weigh(kind string, pids []int) {
	for _, pid := range pids {
		if b.resident == nil {
			b.resident = make(map[string]int64)
		}
		b.resident[kind] = max(b.resident[kind], peak(pid))
	}
}

// peak returns the most bytes that a process has had in memory, 0 if it has ended.
func peak(pid int) int64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		var kilobytes int64
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kilobytes); n == 1 {
			return kilobytes << 10
		}
	}
	return 0
}

// reportMemory prints the memory of the largest worker.
func (b *bench) reportMemory(w io.Writer) {
	state := int64(b.ballast)*1_000_000 + int64(b.size)*4
	for _, kind := range slices.Sorted(maps.Keys(b.resident)) {
		most := b.resident[kind]
		fmt.Fprintf(w, "most memory of a worker, %s: %d MB, %.2f bytes for each of the state; beside twice the state %d MB\n",
			kind, most/1_000_000, float64(most)/float64(state), (most-2*state)/1_000_000)
	}
}
