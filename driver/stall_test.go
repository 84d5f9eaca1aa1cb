package driver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/job"
)

// jobOfBeats is a world whose workers send a test's heartbeats.
type jobOfBeats struct {
	*stalls
	now time.Time
}

// newJobOfBeats returns a world of generation 4 with workers w0, w1, …, which are reported after 5
// s and stopped after 120 s.
func newJobOfBeats(n int) *jobOfBeats {
	j := &jobOfBeats{stalls: newStalls(job.Timeouts{}.WithDefaults()), now: time.Unix(1_700_000_000, 0)}
	members := make([]string, n)
	for r := range members {
		members[r] = fmt.Sprint("w", r)
		j.expect(members[r])
	}
	j.enter(j.now.Add(-time.Hour), 4, members)
	return j
}

// in returns a heartbeat of a worker that is in operation n of the group of all ranks, and out a
// heartbeat of a worker that has left it.
func in(n uint64, since time.Duration) line.Beat {
	return line.Beat{Generation: 4, Phase: line.Training, Quiet: since,
		Lanes: []line.Lane{{Operation: n, Waiting: true, For: since, What: "AllReduce"}}}
}

func out(n uint64, since time.Duration) line.Beat {
	b := in(n, since)
	b.Lanes[0].Waiting = false
	return b
}

// beats sends heartbeats of workers, by rank; the zero Beat is silence.
func (j *jobOfBeats) beats(all ...line.Beat) {
	for r, b := range all {
		if b.Phase != 0 {
			j.hear(j.now, fmt.Sprint("w", r), b)
		}
	}
}

// pass advances time and returns what is detected.
func (j *jobOfBeats) pass(d time.Duration) (found []string) {
	for range d / j.pause() {
		j.now = j.now.Add(j.pause())
		for _, ev := range j.look(j.now) {
			switch e := ev.(type) {
			case decide.WorkerStalled:
				found = append(found, "stalled "+e.ID+": "+e.What)
			case decide.WorkerStirred:
				found = append(found, "stirred "+e.ID)
			case decide.WorkerHung:
				found = append(found, "hung "+e.ID+": "+e.What)
			case decide.WorldJammed:
				found = append(found, "jammed: "+e.What)
			case decide.WorldStuck:
				found = append(found, "stuck: "+e.What)
			}
		}
	}
	return found
}

func (j *jobOfBeats) expectOnly(t *testing.T, d time.Duration, want ...string) {
	t.Helper()
	found := j.pass(d)
	for i := range max(len(found), len(want)) {
		if i >= len(found) || i >= len(want) || !strings.HasPrefix(found[i], want[i]) {
			t.Fatalf("found\n%s\nwant\n%s", strings.Join(found, "\n"), strings.Join(want, "\n"))
		}
	}
}

const look = 250 * time.Millisecond

// TestManyBeatMoreRarely: in a small world a worker is silent after 3 s without a heartbeat, in one
// of 300 after 8 s.
func TestManyBeatMoreRarely(t *testing.T) {
	for size, silent := range map[int]time.Duration{3: 3 * time.Second, 300: 8 * time.Second} {
		j := newJobOfBeats(size)
		all := make([]line.Beat, size)
		for r := range all {
			all[r] = in(7, 6*time.Second)
		}
		j.beats(all...)
		all[1] = line.Beat{} // it was stopped in the operation
		var named time.Duration
		for passed := look; named == 0 && passed < time.Minute; passed += look {
			for _, found := range j.pass(look) {
				if strings.HasPrefix(found, "stalled w1: silent for") {
					named = passed
				}
			}
			j.beats(all...)
		}
		if named > silent || named < silent-time.Second {
			t.Errorf("one of %d is named after %v, not %v", size, named, silent)
		}
	}
}

// TestMoves: progress of workers that were reported for not joining the next world is detected.
func TestMoves(t *testing.T) {
	j := newJobOfBeats(3)
	connects := line.Beat{Generation: 4, Phase: line.Connecting}
	old := connects
	old.Generation = 3
	moved := func(beats ...line.Beat) (found []decide.Input) {
		j.beats(beats...)
		j.now = j.now.Add(look)
		return j.look(j.now)
	}
	if found := moved(connects, connects, connects); len(found) > 0 {
		t.Errorf("nobody is late: %v", found)
	}
	j.await(j.now, []string{"w0", "w1", "w2"})
	j.now = j.now.Add(2 * time.Second)
	if found := moved(connects, old, out(3, 0)); len(found) != 1 || found[0] != decide.Input(decide.WorkerMoved{ID: "w0", Generation: 4, Ago: look}) {
		t.Errorf("one connects: %v", found)
	}
	if found := moved(line.Beat{}, line.Beat{}, line.Beat{}); len(found) > 0 {
		t.Errorf("it was told already: %v", found)
	}
	j.now = j.now.Add(2 * time.Second)
	connects.Quiet = time.Minute
	if found := moved(connects, connects); len(found) > 0 {
		t.Errorf("nothing has moved: %v", found)
	}
	j.enter(j.now, 5, nil)
	connects.Quiet = 0
	if found := moved(connects, connects); len(found) > 0 {
		t.Errorf("all have come: %v", found)
	}
}

// TestStalls: the worker that is reported as awaited by the others, for simultaneous heartbeats of
// all.
func TestStalls(t *testing.T) {
	const s = time.Second
	older := in(17, 0)
	older.Generation = 3
	joins := line.Beat{Generation: 3, Phase: line.Joins, Quiet: 6 * s}
	connects := line.Beat{Generation: 4, Phase: line.Connecting, Quiet: 6 * s,
		Lanes: []line.Lane{{Waiting: true, For: 6 * s, What: "connecting"}}}
	subset := func(n uint64, waiting bool, since time.Duration) line.Beat {
		b := out(17, 6*s)
		b.Lanes = append(b.Lanes, line.Lane{ID: 7, Operation: n, Waiting: waiting, For: since, What: "Broadcast"})
		return b
	}
	saving := out(17, 6*s)
	saving.Phase = line.Saving
	for name, c := range map[string]struct {
		beats []line.Beat
		want  []string
	}{
		"nobody waits for long": {[]line.Beat{in(18, 4*s), in(18, 3*s), out(17, 9*s)}, nil},
		"in its own code": {[]line.Beat{in(18, 5*s), in(18, 6*s), out(17, 7*s)},
			[]string{"stalled w2: training, after AllReduce (operation 17) for 7.3s; ranks 0 1 wait for it in AllReduce (operation 18) for 6s; it will be stopped in 1m54s (--stall-timeout)"}},
		"saves":                    {[]line.Beat{in(18, 5*s), saving}, []string{"stalled w1: saving its state, after AllReduce"}},
		"two":                      {[]line.Beat{in(18, 5*s), out(17, 6*s), out(16, 6*s)}, []string{"stalled w1", "stalled w2"}},
		"never heard of, too soon": {[]line.Beat{in(18, 5*s), {}}, nil},
		"all wait": {[]line.Beat{in(18, 5*s), in(18, 6*s)},
			[]string{"jammed: all 2 ranks wait, and none is missing: ranks 0 1 in AllReduce (operation 18) for 6s; they are sent back to their last commit in 1m55s (--stall-timeout)"}},
		"all wait, at different places": {[]line.Beat{in(18, 5*s), subset(3, true, 6*s), in(18, 7*s)},
			[]string{"jammed: all 3 ranks wait, and none is missing: ranks 0 2 in AllReduce (operation 18) for 7s; rank 1 in Broadcast of a group of its own for 6s; they"}},
		"all wait for too long": {[]line.Beat{in(18, 121*s), subset(3, true, 120*s)}, []string{"jammed: all 2 ranks wait",
			"stuck: rank 0 in AllReduce (operation 18) for 2m1s; rank 1 in Broadcast of a group of its own for 2m0s"}},
		"nearly all for too long":             {[]line.Beat{in(18, 121*s), subset(3, true, 119*s)}, []string{"jammed: all 2 ranks wait"}},
		"nearly all":                          {[]line.Beat{in(18, 5*s), in(18, s)}, nil},
		"the one who is first does not count": {[]line.Beat{in(18, 5*s), out(18, 6*s), out(17, 6*s)}, []string{"stalled w2"}},
		"behind, and waits for another":       {[]line.Beat{in(18, 5*s), in(17, 5*s), out(16, 5*s)}, []string{"stalled w2"}},
		"has just come":                       {[]line.Beat{in(18, 5*s), in(18, 0)}, nil},
		"in a group of its own": {[]line.Beat{subset(3, true, 5*s), subset(2, false, 6*s), out(17, 6*s)},
			[]string{"stalled w1: training, after AllReduce (operation 17) for 6.3s; rank 0 waits for it in Broadcast of a group of its own for 5s"}},
		"held up by who is held up": {[]line.Beat{in(18, 8*s), subset(3, true, 6*s), subset(2, false, 9*s)}, []string{"stalled w2"}},
		"on its way into the world": {[]line.Beat{connects, connects, joins},
			[]string{"stalled w2: joining for 6.3s; ranks 0 1 wait for it in connecting for 6s"}},
		"all connect":  {[]line.Beat{connects, connects}, []string{"jammed: all 2 ranks wait, and none is missing: ranks 0 1 in connecting for 6s"}},
		"an old world": {[]line.Beat{older, older, older}, nil},
		"alone":        {[]line.Beat{in(18, 60*s)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			j := newJobOfBeats(len(c.beats))
			j.beats(c.beats...)
			j.expectOnly(t, look, c.want...)
			j.expectOnly(t, look)
		})
	}
}

// TestSilence: a suspended process is silent, wherever it was suspended.
func TestSilence(t *testing.T) {
	const s = time.Second
	for name, last := range map[string]line.Beat{
		"between operations": out(17, 0), "in the operation": in(18, 0), "after it": out(18, 0), "never heard of": {},
		"in an older world": {Generation: 3, Phase: line.Joins},
	} {
		t.Run(name, func(t *testing.T) {
			j := newJobOfBeats(3)
			j.beats(in(18, 0), in(18, 0), last)
			for i := range 4 {
				j.expectOnly(t, s)
				j.beats(in(18, time.Duration(i+1)*s), in(18, time.Duration(i+1)*s))
			}
			j.expectOnly(t, s)
			j.beats(in(18, 5*s), in(18, 5*s))
			j.expectOnly(t, look, "stalled w2: silent f")
			for i := 6; i < 120; i++ {
				j.expectOnly(t, s)
				j.beats(in(18, time.Duration(i)*s), in(18, time.Duration(i)*s))
			}
			j.beats(in(18, 120*s), in(18, 120*s))
			j.expectOnly(t, look, "hung w2: silent f")
			j.beats(in(18, 121*s), in(18, 121*s), in(18, 0))
			j.expectOnly(t, s) // it is reported only once
		})
	}
}

// TestStirs: the end of a stall is reported once, and the next stall is a new one.
func TestStirs(t *testing.T) {
	const s = time.Second
	j := newJobOfBeats(2)
	j.beats(in(18, 5*s), out(17, 5*s))
	j.expectOnly(t, look, "stalled w1")
	j.beats(in(18, 6*s), out(17, 6*s))
	j.expectOnly(t, s)
	j.beats(in(18, 7*s)) // w1 makes progress, but the driver does not know that yet
	j.expectOnly(t, s)
	j.beats(out(18, 0), out(18, 0))
	j.expectOnly(t, look, "stirred w1")
	j.expectOnly(t, s)
	for long := range 5 * s / s {
		j.beats(out(18, (1+long)*s), in(19, long*s))
		j.expectOnly(t, s)
	}
	j.beats(out(18, 6*s), in(19, 5*s))
	j.expectOnly(t, look, "stalled w0")
}

// TestWhatSaysWhenAWorkerIsStopped: while a worker holds up others, the description of what it does
// includes the time until it is stopped.
func TestWhatSaysWhenAWorkerIsStopped(t *testing.T) {
	const s = time.Second
	j := newJobOfBeats(2)
	j.beats(in(18, 5*s), out(17, 5*s))
	if what := j.what(j.now, "w1"); strings.Contains(what, "stopped") {
		t.Errorf("before it is reported: %q", what)
	}
	j.expectOnly(t, look, "stalled w1")
	at := j.now
	for after, want := range map[time.Duration]string{0: "in 1m55s", 10 * s: "in 1m45s", time.Hour: "in 0s"} {
		if what := j.what(at.Add(after), "w1"); !strings.Contains(what, "; it will be stopped "+want+" (--stall-timeout)") {
			t.Errorf("%v after it was reported: %q", after, what)
		}
	}
	if what := j.what(at, "w0"); strings.Contains(what, "stopped") {
		t.Errorf("one that waits: %q", what)
	}
	j.enter(j.now, 5, []string{"w0", "w1"})
	if what := j.what(j.now, "w1"); strings.Contains(what, "stopped") {
		t.Errorf("in the next world: %q", what)
	}
}

func TestWorldsForgetStalls(t *testing.T) {
	const s = time.Second
	j := newJobOfBeats(2)
	j.beats(in(18, 5*s), out(17, 5*s))
	j.expectOnly(t, look, "stalled w1")
	j.enter(j.now, 4, nil) // again, by a driver that has resumed
	j.expectOnly(t, s)
	j.enter(j.now, 5, []string{"w0", "w2"})
	j.beats(in(18, 6*s), out(17, 6*s)) // from the previous world
	j.expectOnly(t, s)
	j.forget("w1")
	j.hear(j.now, "w1", in(18, s))
	if what := j.what(j.now, "w1"); what != "" {
		t.Errorf("one who has ended does %q", what)
	}
	if len(j.workers) != 1 {
		t.Errorf("%d workers are listened to", len(j.workers))
	}
}

// TestDriverStoodStill: no worker counts as silent while the driver itself was suspended.
func TestDriverStoodStill(t *testing.T) {
	j := newJobOfBeats(2)
	j.beats(in(18, 4*time.Second), in(18, 4*time.Second))
	j.expectOnly(t, look)
	j.now = j.now.Add(time.Hour)
	j.beats(in(18, time.Hour))
	j.expectOnly(t, look)
}

// TestNever: the warning and the limit can each be disabled.
func TestNever(t *testing.T) {
	const s = time.Second
	for _, c := range []struct {
		warning, limit time.Duration
		want           []string
	}{
		{5 * s, -1, []string{"stalled w1: training, after AllReduce (operation 17) for 1m40s; rank 0 waits for it in AllReduce (operation 18) for 1m40s"}},
		{-1, 10 * s, []string{"hung w1"}},
		{10 * s, 5 * s, []string{"hung w1"}},
		{-1, -1, nil},
	} {
		j := newJobOfBeats(2)
		other := newStalls(job.Timeouts{StallWarning: c.warning, Stall: c.limit})
		j.warning, j.limit = other.warning, other.limit
		j.beats(in(18, 100*s), out(17, 100*s))
		found := j.pass(look)
		if len(found) != len(c.want) || len(found) == 1 && !strings.HasPrefix(found[0], c.want[0]) || strings.Contains(strings.Join(found, ""), "stopped in") {
			t.Errorf("warning %v, limit %v: %q", c.warning, c.limit, found)
		}
	}
}

func TestNamesOfRanks(t *testing.T) {
	for want, n := range map[string]int{"rank 0": 1, "ranks 0 1": 2, "ranks 0 1 2 3 4 5 6 7": 8, "ranks 0 1 2 3 4 5 6 7 and 992 more": 1000} {
		all := make([]int, n)
		for i := range all {
			all[i] = i
		}
		if got := ranks(all); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// BenchmarkStalls measures one look at 1,000 workers, all but one of which wait.
func BenchmarkStalls(b *testing.B) {
	j := newJobOfBeats(1000)
	for r := range 1000 {
		j.hear(j.now, fmt.Sprint("w", r), in(18, time.Minute))
	}
	j.hear(j.now, "w7", out(17, time.Minute))
	for b.Loop() {
		for _, w := range j.workers {
			w.looks = 0
		}
		j.look(j.now)
	}
}
