// Package prove is the code shared by the randomized test programs: the selection and time limit of
// a run's cases, and the summary of results.
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

// Run selects the cases of a run. A seed determines its case. The seeds are Seed and the following
// ones, until the time For has passed; with Cases, that number of seeds, whatever the time; with
// One, only the first.
type Run struct {
	For   time.Duration // no case begins later; 0: no bound
	Cases int           // 0: no bound
	Seed  uint64
	One   bool
}

// Flags defines -for, -cases, -seed and -one. The default seed is random and short.
func (r *Run) Flags(f *flag.FlagSet) {
	f.DurationVar(&r.For, "for", 10*time.Minute, "time in which cases begin; 0: no limit")
	f.IntVar(&r.Cases, "cases", 0, "number of cases, in place of -for; 0: as many as begin in that time")
	f.Uint64Var(&r.Seed, "seed", uint64(rand.Uint32()), "seed of the first case, incremented for each further case")
	f.BoolVar(&r.One, "one", false, "run only the first case")
}

// More reports whether to run the case with this number, from 0, given the time that has passed.
func (r *Run) More(number int, passed time.Duration) bool {
	if r.One {
		return number == 0
	}
	if r.Cases > 0 {
		return number < r.Cases
	}
	return r.For <= 0 || passed < r.For
}

// Failure is a failed case, formatted for printing: what was wrong, how to repeat it, and where the
// files are that it left.
type Failure struct {
	Room  string // folder of the program below test/prove
	Seed  uint64
	Args  []string // on one line
	Case  string   // in a line
	What  string
	Files string // folder
}

// String formats a block of lines.
func (f Failure) String() string {
	args := ""
	if len(f.Args) > 0 {
		args = fmt.Sprintf(" ARGS='%s'", strings.Join(f.Args, " "))
	}
	return fmt.Sprintf("FAILED seed %d: %s\n  %s\n  repeat it by:  make prove ROOM=%s SEED=%d%s\n  its files are: %s\n",
		f.Seed, f.Case, strings.ReplaceAll(strings.TrimSpace(f.What), "\n", "\n  "), f.Room, f.Seed, args, f.Files)
}

// Tally counts the cases of a run. The zero value is empty. It is not safe for concurrent use.
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

// Fail adds a failed case.
func (t *Tally) Fail(seed uint64, what string) {
	t.failures = append(t.failures, fmt.Sprintf("seed %d: %s", seed, what))
}

// Failures returns the number of failed cases.
func (t *Tally) Failures() int { return len(t.failures) }

// Print prints the tally, one line per dimension and per failure.
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
