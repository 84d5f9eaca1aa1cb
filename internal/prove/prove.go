// Package prove is what the proving grounds share: which cases a run does, for how long, and the
// tally of what it did.
package prove

import (
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// Run says which cases a proving ground does: those of the seeds from Seed on, one after the other,
// until For has passed or, with One, the first alone. A case is determined by its seed.
type Run struct {
	For  time.Duration // no case begins later; 0: no bound
	Seed uint64
	One  bool
}

// Flags defines -for, -seed and -one. The seed's default is random, and small enough to be typed.
func (r *Run) Flags(f *flag.FlagSet) {
	f.DurationVar(&r.For, "for", 10*time.Minute, "for how long cases begin; 0: without end")
	f.Uint64Var(&r.Seed, "seed", uint64(rand.Uint32()), "of the first case; the next case's is one more")
	f.BoolVar(&r.One, "one", false, "do the first case alone")
}

// More tells whether the case with this number, from 0, is to be done after so much time.
func (r *Run) More(number int, passed time.Duration) bool {
	if r.One {
		return number == 0
	}
	return r.For <= 0 || passed < r.For
}

// Tally counts what a run did. The zero value is empty. It is not for several goroutines at a time.
type Tally struct {
	Cases, Operations int
	Bytes             int64
	Took              time.Duration
	counts            map[string]map[string]int
	failures          []string
}

// Count counts a case for a value of a dimension.
func (t *Tally) Count(dimension, value string) {
	if t.counts == nil {
		t.counts = map[string]map[string]int{}
	}
	if t.counts[dimension] == nil {
		t.counts[dimension] = map[string]int{}
	}
	t.counts[dimension][value]++
}

// Fail counts a failed case.
func (t *Tally) Fail(seed uint64, what string) {
	t.failures = append(t.failures, fmt.Sprintf("seed %d: %s", seed, what))
}

// Failures is the number of failed cases.
func (t *Tally) Failures() int { return len(t.failures) }

// Print writes the tally, one dimension a line and one failure a line.
func (t *Tally) Print(w io.Writer) {
	fmt.Fprintf(w, "%d cases, %d operations, %.1f GiB, %v, %d failed\n", t.Cases, t.Operations, float64(t.Bytes)/(1<<30),
		t.Took.Round(time.Second), len(t.failures))
	for _, dimension := range slices.Sorted(maps.Keys(t.counts)) {
		var words []string
		for _, value := range slices.Sorted(maps.Keys(t.counts[dimension])) {
			words = append(words, fmt.Sprintf("%s %d", value, t.counts[dimension][value]))
		}
		fmt.Fprintf(w, "  %s: %s\n", dimension, strings.Join(words, ", "))
	}
	for _, failure := range t.failures {
		fmt.Fprintf(w, "FAILED %s\n", failure)
	}
}
