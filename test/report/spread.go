package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Spread is a set of durations, in any order.
type Spread []time.Duration

// Quantile returns the smallest duration that a share q of them does not exceed: the minimum for 0,
// the median for 0.5, the maximum for 1. It returns 0 without values.
func (s Spread) Quantile(q float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// Mean returns the mean; 0 without values.
func (s Spread) Mean() time.Duration {
	sum := time.Duration(0)
	for _, d := range s {
		sum += d
	}
	return sum / time.Duration(max(len(s), 1))
}

// header is the header of Spread.row.
const header = "                                          n     min  median     p90     p99     max  (ms)"

// row formats quantiles as a line, in milliseconds.
func (s Spread) row(name string) string {
	row := fmt.Sprintf("%-38s %4d", name, len(s))
	for _, q := range []float64{0, 0.5, 0.9, 0.99, 1} {
		row += fmt.Sprintf(" %7.1f", Milliseconds(s.Quantile(q)))
	}
	return row
}

// histogram formats a histogram, a line per bin; the width of bins grows by the square root of two.
func (s Spread) histogram() string {
	if len(s) == 0 {
		return ""
	}
	bin := func(d time.Duration) int { return int(math.Floor(2 * math.Log2(max(Milliseconds(d), 0.1)))) }
	counts, most := make(map[int]int), 0
	low, high := bin(s[0]), bin(s[0])
	for _, d := range s {
		b := bin(d)
		counts[b]++
		low, high, most = min(low, b), max(high, b), max(most, counts[b])
	}
	var text strings.Builder
	for b := low; b <= high; b++ {
		bar := strings.Repeat("#", (counts[b]*50+most-1)/most)
		fmt.Fprintf(&text, "%8.1f to %7.1f ms %5d %s\n", math.Exp2(float64(b)/2), math.Exp2(float64(b+1)/2), counts[b], bar)
	}
	return text.String()
}

// Milliseconds converts a duration.
func Milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
