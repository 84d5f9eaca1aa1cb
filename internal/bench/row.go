package bench

import (
	"math"
	"slices"
	"time"
)

// Row summarises the samples of a size, in microseconds.
type Row struct {
	Op      Op
	Bytes   int
	Samples int
	Min     float64
	Median  float64
	P99     float64 // smallest value that 99 % of the samples do not exceed
	Sent    float64 `json:",omitempty"` // bytes sent on sockets per sample, by all ranks
	HostOut float64 `json:",omitempty"` // the same for the host that sends most; 0: one host
}

// summarize sorts the samples, of which there must be at least one, and returns their row.
func summarize(op Op, bytes int, samples []time.Duration) Row {
	slices.Sort(samples)
	n := len(samples)
	us := func(i int) float64 { return float64(samples[i]) / float64(time.Microsecond) }
	return Row{Op: op, Bytes: bytes, Samples: n, Min: us(0), Median: (us((n-1)/2) + us(n/2)) / 2,
		P99: us(max(0, int(math.Ceil(0.99*float64(n)))-1))}
}

// Result is a row of one round.
type Result struct {
	Row
	Round int    // from 1
	Peer  string // library
}

// merged combines the rows of all rounds for a peer, operation and size: it takes the smallest
// minimum, the medians of the rounds' medians and 99th percentiles, and all samples.
func merged(results []Result) Row {
	row := results[0].Row
	row.Samples = 0
	var medians, p99s, sent, out []float64
	for _, r := range results {
		row.Min = min(row.Min, r.Min)
		row.Samples += r.Samples
		medians, p99s = append(medians, r.Median), append(p99s, r.P99)
		sent, out = append(sent, r.Sent), append(out, r.HostOut)
	}
	row.Median, row.P99, row.Sent, row.HostOut = median(medians), median(p99s), median(sent), median(out)
	return row
}

func median(v []float64) float64 {
	slices.Sort(v)
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// gbps returns the bandwidth as the caller sees it, in bytes per nanosecond. It returns 0 if the
// median time is 0.
func (r Row) gbps() float64 {
	if r.Median == 0 {
		return 0
	}
	return float64(r.Bytes) / r.Median / 1e3
}
