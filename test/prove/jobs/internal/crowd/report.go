package crowd

import (
	"fmt"
	"math"
	"runtime"
	"slices"

	"github.com/hvdrun/hvdrun/test/report"
)

// quantity is a measured quantity.
type quantity struct {
	name, unit string
	of         func(*Sample) *float64
}

// Sample is the result of a job. Times are in milliseconds, memory in MiB.
type Sample struct {
	Formed, Received         float64
	Acked, AckedWarm         float64
	ReformedFew, Reformed    float64
	Left                     float64
	Stopped                  float64
	FormCPU, GrowCPU, DieCPU float64
	WorkersCPU               float64
	RSS, Peak, Heap, Stacks  float64
	Descriptors, Goroutines  float64
	Journal, Lines           float64
}

var quantities = []quantity{
	{"from the start until all have the first world", "ms", func(s *Sample) *float64 { return &s.Formed }},
	{"of which: from the last join until all have the world", "ms", func(s *Sample) *float64 { return &s.Received }},
	{"a first notification, until the last has it", "ms", func(s *Sample) *float64 { return &s.Acked }},
	{"a later notification, until the last has it", "ms", func(s *Sample) *float64 { return &s.AckedWarm }},
	{"1 % dies at once, until the others have the next world", "ms", func(s *Sample) *float64 { return &s.ReformedFew }},
	{"a tenth dies at once, until the others have the next world", "ms", func(s *Sample) *float64 { return &s.Reformed }},
	{"a third of the hosts leaves, until the others have the next world", "ms", func(s *Sample) *float64 { return &s.Left }},
	{"all stopped", "ms", func(s *Sample) *float64 { return &s.Stopped }},
	{"the driver's processor: start", "ms", func(s *Sample) *float64 { return &s.FormCPU }},
	{"the driver's processor: two notifications, two worlds", "ms", func(s *Sample) *float64 { return &s.GrowCPU }},
	{"the driver's processor: a tenth dies, and the next world", "ms", func(s *Sample) *float64 { return &s.DieCPU }},
	{"the processor of hosts and workers, altogether", "ms", func(s *Sample) *float64 { return &s.WorkersCPU }},
	{"the driver's memory: resident", "MiB", func(s *Sample) *float64 { return &s.RSS }},
	{"the driver's memory: peak", "MiB", func(s *Sample) *float64 { return &s.Peak }},
	{"the driver's memory: heap in use", "MiB", func(s *Sample) *float64 { return &s.Heap }},
	{"the driver's memory: stacks", "MiB", func(s *Sample) *float64 { return &s.Stacks }},
	{"the driver's descriptors", "", func(s *Sample) *float64 { return &s.Descriptors }},
	{"the driver's goroutines", "", func(s *Sample) *float64 { return &s.Goroutines }},
	{"journal", "KiB", func(s *Sample) *float64 { return &s.Journal }},
	{"lines of the driver's log", "", func(s *Sample) *float64 { return &s.Lines }},
}

// Median returns the median of each quantity.
func Median(samples []Sample) (m Sample) {
	for _, q := range quantities {
		var values []float64
		for i := range samples {
			values = append(values, *q.of(&samples[i]))
		}
		slices.Sort(values)
		n := len(values)
		*q.of(&m) = (values[(n-1)/2] + values[n/2]) / 2
	}
	return m
}

// exponent returns k for a quantity that grows with the k-th power of the number of workers: 1 is
// proportional.
func exponent(fewer, more int, v, w float64) float64 {
	return math.Log(w/v) / math.Log(float64(more)/float64(fewer))
}

// Table formats the results of jobs of these numbers of workers, in increasing order.
func Table(sizes []int, rows []Sample) string {
	var table report.Table
	head := []any{"workers"}
	for _, n := range sizes {
		head = append(head, n)
	}
	table.Add(append(head, "exponent")...)
	for _, q := range quantities {
		name := q.name
		if q.unit != "" {
			name += ", " + q.unit
		}
		cells := []any{name}
		for i := range rows {
			cells = append(cells, fmt.Sprintf("%.4g", *q.of(&rows[i])))
		}
		growth := ""
		if last := len(sizes) - 1; last > 0 {
			growth = fmt.Sprintf("%.2f", exponent(sizes[0], sizes[last], *q.of(&rows[0]), *q.of(&rows[last])))
		}
		table.Add(append(cells, growth)...)
	}
	return fmt.Sprintf("%d CPUs\n\n%s", runtime.NumCPU(), table.Markdown())
}
