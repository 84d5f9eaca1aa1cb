package driver

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
)

// TestFalseWaits: one worker reports that it has always waited for all others, in an operation that
// none of them has begun. A worker that makes progress is neither named nor stopped, however long
// the lie is repeated.
func TestFalseWaits(t *testing.T) {
	const s = time.Second
	for name, operation := range map[string]uint64{"far": math.MaxUint64, "near": 1} {
		t.Run(name, func(t *testing.T) {
			j := newJobOfBeats(3)
			j.beats(out(1, 0), out(1, 0), out(1, 0))
			j.expectOnly(t, s)
			for n := uint64(2); n < 200; n++ {
				at := operation
				if at == 1 {
					at = n + 1
				}
				j.beats(out(n, 0), in(at, math.MaxInt64), out(n, 0))
				j.expectOnly(t, s)
			}
		})
	}
}

// TestFalseWaitOnce: a single heartbeat that reports a long wait stops no worker, because the
// driver has not observed the wait.
func TestFalseWaitOnce(t *testing.T) {
	const s = time.Second
	j := newJobOfBeats(3)
	for range 10 { // between two operations, as all are
		j.beats(out(7, 0), out(7, 0), out(7, 0))
		j.expectOnly(t, s)
	}
	j.beats(out(7, s), in(8, math.MaxInt64), out(7, s))
	j.expectOnly(t, 2*s)
	for n := range 3 { // then it becomes true
		j.beats(out(7, s), in(8, math.MaxInt64), out(7, s))
		if found := j.pass(s); n == 0 && len(found) > 0 {
			t.Errorf("after two seconds: %v", found)
		}
	}
}

// TestTrueWaits: a worker that makes no progress is stopped because others wait for it.
func TestTrueWaits(t *testing.T) {
	const s = time.Second
	j := newJobOfBeats(2)
	found := []string{}
	for n := range 125 * s / s {
		j.beats(in(18, n*s), out(17, n*s))
		found = append(found, j.pass(s)...)
	}
	if len(found) != 2 || found[0][:10] != "stalled w1" || found[1][:7] != "hung w1" {
		t.Errorf("found %q", found)
	}
}

// TestExtremeBeats: the driver accepts any number in a heartbeat.
func TestExtremeBeats(t *testing.T) {
	numbers := []uint64{0, 1, math.MaxInt64, math.MaxInt64 + 1, math.MaxUint64}
	for _, generation := range append(numbers, 4) {
		for _, n := range numbers {
			j := newJobOfBeats(3)
			j.watchDone(j.now, 4)
			j.await(j.now, []string{"w0", "w1"})
			for phase := line.Joins; phase <= line.Fetches; phase++ {
				for range 3 {
					b := line.Beat{Generation: generation, Phase: phase, Quiet: time.Duration(n & math.MaxInt64), Commits: n, Written: n}
					for i := range uint64(line.MaxLanes) {
						b.Lanes = append(b.Lanes, line.Lane{
							ID: n - i, Operation: n, Waiting: i%2 == 0, For: time.Duration(n & math.MaxInt64), What: "AllReduce",
						})
					}
					j.hear(j.now, "w0", b)
					j.pass(time.Second)
					j.what(j.now, "w0")
				}
			}
		}
	}
}

// TestRefutals: a worker that trains after another has reported done is recognised by its second
// heartbeat that must have been made after the report, and not before.
func TestRefutals(t *testing.T) {
	trains := func(trained *bool, commits uint64) line.Beat {
		return line.Beat{Generation: 4, Phase: line.Training, Trained: trained, Commits: commits}
	}
	no, yes := new(false), new(true)
	other := trains(no, 0)
	other.Generation = 3
	for name, c := range map[string]struct {
		beats []line.Beat // one a second
		found int         // seconds; 0: not
	}{
		"trains":              {[]line.Beat{trains(no, 5), trains(no, 5), trains(no, 5), trains(no, 5)}, 3},
		"had not yet trained": {[]line.Beat{trains(no, 5), trains(no, 5), trains(yes, 5), trains(yes, 5)}, 0},
		"is silent":           {[]line.Beat{trains(no, 5)}, 0},
		"of another world":    {[]line.Beat{other, other, other, other}, 0},
		"commits":             {[]line.Beat{trains(nil, 5), trains(nil, 5), trains(nil, 6), trains(nil, 7)}, 3},
		"does not commit":     {[]line.Beat{trains(nil, 5), trains(nil, 5), trains(nil, 5), trains(nil, 5)}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			j := newJobOfBeats(2)
			j.beats(trains(no, 5), c.beats[0])
			j.watchDone(j.now, 4)
			found := 0
			for n := range 6 {
				if n < len(c.beats) {
					j.hear(j.now, "w1", c.beats[n])
				}
				for _, in := range j.look(j.now) {
					if fmt.Sprint(in) != fmt.Sprint(decide.WorkerTrains{ID: "w1", Generation: 4}) || found != 0 {
						t.Errorf("second %d: %T %v", n, in, in)
					}
					found = n + 1
				}
				j.now = j.now.Add(time.Second)
			}
			if found != c.found {
				t.Errorf("found in second %d, want %d", found, c.found)
			}
		})
	}
}
