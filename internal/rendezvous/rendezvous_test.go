package rendezvous

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/plan"
)

// job is a rendezvous server. The test acts as its handler and its workers.
type job struct {
	t      testing.TB
	server *Server
	log    *logtest.Hook
	logger *logrus.Logger

	joins []string // "worker after"
	said  []string // other calls of the handler
	beats []line.Beat
	noted int

	told map[string][]told // lines sent, by worker
}

// told is a line that was sent to a worker, and the tail that follows it.
type told struct {
	line.Message
	tail []byte
}

func newJob(t testing.TB) *job {
	j := &job{t: t, told: make(map[string][]told)}
	j.logger, j.log = logtest.NewNullLogger()
	j.server = NewServer(ServerConfig{
		Handler: j, Log: j.logger,
		Tell: func(workers []string, ranks []uint32, text, tail []byte) {
			for i, w := range workers {
				m := told{tail: tail}
				if err := json.Unmarshal(text, &m.Message); err != nil {
					t.Error(err)
				}
				if ranks != nil {
					m.Rank = int(ranks[i])
				}
				j.told[w] = append(j.told[w], m)
			}
		},
	})
	return j
}

func (j *job) say(from identity.Subject, format string, args ...any) {
	j.said = append(j.said, from.Incarnation+" "+fmt.Sprintf(format, args...))
}

func (j *job) Joined(from identity.Subject, r line.Joining) {
	j.joins = append(j.joins, fmt.Sprint(from.Incarnation, " ", r.After))
}

func (j *job) Reported(from identity.Subject, r line.Report, generation, commits uint64, noted func()) {
	j.say(from, "%v %d %d", r, generation, commits)
	noted()
}

func (j *job) BackendReported(from identity.Subject, generation uint64, backend string, noted func()) {
	j.say(from, "backend %d %s", generation, backend)
	noted()
}

func (j *job) FailureReported(from identity.Subject, text string, noted func()) {
	j.say(from, "failed %s", text)
	noted()
}

func (j *job) Beaten(_ identity.Subject, b line.Beat)           { j.beats = append(j.beats, b) }
func (j *job) Heard(from identity.Subject, h line.Heard)        { j.say(from, "heard %+v", h) }
func (j *job) Located(from identity.Subject, s line.StacksLine) { j.say(from, "located %d", s.ID) }

// says admits a worker and makes it send a line.
func (j *job) says(worker, do string, v any) {
	j.server.Admit(identity.Subject{Host: "h", Incarnation: worker})
	j.server.Hear(worker, line.Up(do, v), func() { j.noted++ })
}

// hears returns what was sent to a worker since the last call, which must be one line of this kind.
func (j *job) hears(worker, is string) told {
	j.t.Helper()
	all := j.told[worker]
	delete(j.told, worker)
	if len(all) != 1 || all[0].Is != is {
		j.t.Fatalf("%s was told %+v; want %s", worker, all, is)
	}
	return all[0]
}

// silent checks that nothing was sent to the workers.
func (j *job) silent(workers ...string) {
	j.t.Helper()
	for _, w := range workers {
		if len(j.told[w]) > 0 {
			j.t.Fatalf("%s was told %+v", w, j.told[w])
		}
	}
}

func (j *job) publish(generation uint64, root int, seq uint64, workers ...string) {
	w := plan.World{Generation: generation, Slots: make([]plan.Slot, len(workers))}
	members := make([]line.Member, len(workers))
	for i, inc := range workers {
		w.Slots[i].SlotID = plan.SlotID{Host: "h", Index: i}
		if n, err := strconv.Atoi(inc[1:]); err == nil {
			w.Slots[i].Index = n // it keeps its slot
		}
		members[i] = line.Member{Incarnation: inc, DataAddrs: []string{inc + ":1"}}
	}
	if err := plan.Place(w.Slots); err != nil {
		j.t.Fatal(err)
	}
	j.server.Publish(w, members, root, seq)
}

// place reads the world that was sent to a worker.
func (j *job) place(m told, after uint64, before *line.Place) line.Place {
	j.t.Helper()
	p, err := line.ReadPlace(&m.Message, m.tail, after, before)
	if err != nil {
		j.t.Fatal(err)
	}
	return p
}

// TestJoinWaitsForPublish: a join waits for a world with its worker, and one line is sent to all
// members. A later join is answered at once.
func TestJoinWaitsForPublish(t *testing.T) {
	j := newJob(t)
	lines := 0
	tell := j.server.cfg.Tell
	j.server.cfg.Tell = func(workers []string, ranks []uint32, text, tail []byte) {
		lines++
		tell(workers, ranks, text, tail)
	}
	for _, w := range []string{"a", "b", "other"} {
		j.says(w, "join", line.Joining{Commits: 3})
	}
	j.silent("a", "b", "other")
	j.publish(4, 1, 7, "b", "a", "late")
	if lines != 1 {
		t.Errorf("%d lines", lines)
	}
	for rank, worker := range []string{"b", "a"} {
		p := j.place(j.hears(worker, "world"), 0, nil)
		w, err := p.World()
		if err != nil || p.Generation != 4 || p.Rank != rank || p.SyncRoot != 1 || p.Seq != 7 || p.Size != 3 || w.DataAddrs()[0][0] != "b:1" {
			t.Errorf("%s: %+v, %v", worker, p, err)
		}
	}
	j.silent("other")
	j.says("late", "join", line.Joining{})
	if m := j.hears("late", "world"); m.Rank != 2 {
		t.Errorf("%+v", m)
	}
	if want := []string{"a 0", "b 0", "other 0"}; !slices.Equal(j.joins, want) || j.noted != 4 {
		t.Errorf("heard %q, %d were noted", j.joins, j.noted)
	}
}

// TestGenerations: a join is answered only with a world that is newer than the one that its worker
// has left.
func TestGenerations(t *testing.T) {
	j := newJob(t)
	j.publish(3, 0, 0, "a")
	for after, answered := range map[uint64]bool{0: true, 2: true, 3: false, 4: false, 1 << 63: false} {
		j.says("a", "join", line.Joining{After: after})
		if is := len(j.told["a"]) == 1; is != answered {
			t.Errorf("after %d: answered %v", after, is)
		}
		delete(j.told, "a")
		delete(j.server.waiting, "a")
	}
	j.publish(2, 0, 0, "a")
	j.says("a", "join", line.Joining{After: 2})
	if m := j.hears("a", "world"); m.Generation != 3 {
		t.Errorf("an older world was published: %+v", m)
	}
}

func TestPublishPanics(t *testing.T) {
	s := NewServer(ServerConfig{Log: newJob(t).logger})
	for name, f := range map[string]func(){
		"members": func() {
			s.Publish(plan.World{Generation: 1, Slots: make([]plan.Slot, 2)}, make([]line.Member, 1), 0, 0)
		},
		"root": func() {
			s.Publish(plan.World{Generation: 1, Slots: make([]plan.Slot, 1)}, make([]line.Member, 1), 1, 0)
		},
		"dismissal": func() { s.Dismiss("a", io.EOF) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

// TestSecondJoinSupersedes: a repeated join counts once, and the latest one is answered.
func TestSecondJoinSupersedes(t *testing.T) {
	j := newJob(t)
	j.publish(1, 0, 0, "a")
	j.says("a", "join", line.Joining{After: 2, DataAddrs: []string{"old:1"}})
	j.says("a", "join", line.Joining{After: 1, DataAddrs: []string{"new:1"}})
	j.publish(2, 0, 0, "a")
	j.hears("a", "world")
	j.publish(3, 0, 0, "a")
	j.silent("a")
}

func TestDismiss(t *testing.T) {
	for why, err := range map[string]error{"removed": line.ErrRemoved, "removed last": line.ErrLast, "finished": line.ErrFinished} {
		j := newJob(t)
		j.says("a", "join", line.Joining{})
		j.server.Dismiss("a", err)
		for range 2 {
			m := j.hears("a", "dismissed")
			if got := strings.TrimSpace(m.Why + map[bool]string{true: " last"}[m.Last]); got != why {
				t.Errorf("%s: %q", why, got)
			}
			j.says("a", "join", line.Joining{})
		}
		j.publish(1, 0, 0, "b")
	}
}

// TestExpelled: lines of a worker that has ended, or was never admitted, are ignored.
func TestExpelled(t *testing.T) {
	j := newJob(t)
	j.says("a", "join", line.Joining{Handle: "h"})
	j.server.Expel("a")
	j.server.Hear("a", line.Up("report", line.ReportLine{What: "done"}), func() { j.noted++ })
	j.server.Hear("stranger", line.Up("join", line.Joining{}), func() { j.noted++ })
	j.publish(1, 0, 0, "a", "stranger")
	j.silent("a", "stranger")
	if len(j.said) > 0 || !slices.Equal(j.joins, []string{"a 0"}) || j.noted != 3 || j.server.handles.total != 0 {
		t.Errorf("heard %q, %q, %d were noted", j.said, j.joins, j.noted)
	}
}

func TestReport(t *testing.T) {
	j := newJob(t)
	for _, word := range []string{"done", "leaving", "committed", "draining", "fetching", "writing", "written", "not_written"} {
		j.says("a", "report", line.ReportLine{What: word, Generation: 4, Commits: 7})
	}
	j.silent("a")
	want := []string{"a done 4 7", "a leaving 4 7", "a committed 4 7", "a draining 4 7", "a fetching 4 7", "a writing 4 7", "a written 4 7", "a not written 4 7"}
	if !slices.Equal(j.said, want) || j.noted != len(want) {
		t.Errorf("%q, %d", j.said, j.noted)
	}
	j.says("a", "report", line.ReportLine{What: "dancing"})
	if m := j.hears("a", "error"); m.Fatal || !strings.Contains(m.Text, `"dancing" is no report`) {
		t.Errorf("%+v", m)
	}
}

func TestReportBackend(t *testing.T) {
	j := newJob(t)
	j.says("a", "report", line.ReportLine{What: "backend", Generation: 4, Backend: "ipc+hosts"})
	for _, name := range []string{"", "a/b", "a b", strings.Repeat("x", 33), "\x1b[2J"} {
		j.says("a", "report", line.ReportLine{What: "backend", Backend: name})
		j.hears("a", "error")
	}
	if !slices.Equal(j.said, []string{"a backend 4 ipc+hosts"}) || j.noted != 6 {
		t.Errorf("%q, %d", j.said, j.noted)
	}
}

// TestReportFailure: the error that a program reports is either one line that a log can show, or
// refused.
func TestReportFailure(t *testing.T) {
	j := newJob(t)
	j.says("a", "report", line.ReportLine{What: "failed", Error: line.CleanError("bad\nsample" + strings.Repeat("é", 1000))})
	if len(j.said) != 1 || len(j.said[0]) > len("a failed ")+line.MaxError || !strings.HasPrefix(j.said[0], "a failed bad sample") {
		t.Errorf("%q", j.said)
	}
	for _, text := range []string{"", "a\nb", "\x1b", strings.Repeat("x", line.MaxError+1)} {
		j.says("a", "report", line.ReportLine{What: "failed", Error: text})
		j.hears("a", "error")
	}
}

// TestBounds: a join beyond its bounds is refused.
func TestBounds(t *testing.T) {
	for name, r := range map[string]line.Joining{
		"addresses": {DataAddrs: make([]string, 65)}, "an address": {DataAddrs: []string{strings.Repeat("a", 257)}},
		"a cause": {Cause: strings.Repeat("c", 4<<10+1)}, "a rank": {Lost: []int{1 << 31}}, "a negative rank": {Lost: []int{-1}},
		"a handle": {Handle: strings.Repeat("h", line.MaxHandle+1)}, "a program": {Program: strings.Repeat("p", 65)},
		"a terminal": {Program: "\x1b[2J"}, "a duration": {Undone: -1},
	} {
		j := newJob(t)
		j.says("a", "join", r)
		if m := j.hears("a", "error"); !m.Fatal || len(j.joins) > 0 || len(j.server.waiting) > 0 {
			t.Errorf("%s: %+v, heard %q", name, m, j.joins)
		}
	}
	j := newJob(t)
	j.says("a", "dance", nil)
	j.hears("a", "error")
	j.server.Hear("a", []byte("no JSON"), func() {})
	j.hears("a", "error")
}

// TestHandles: the members of a world get each other's handles, whose total size is bounded.
func TestHandles(t *testing.T) {
	h := handles{of: make(map[string]int)}
	for i := range maxHandles / line.MaxHandle {
		if err := h.take(fmt.Sprint(i), line.MaxHandle); err != nil {
			t.Fatal(err)
		}
	}
	if h.take("more", 1) == nil || h.take("0", line.MaxHandle) != nil {
		t.Error("the bound of all handles does not hold, or a worker counts twice")
	}
	_ = h.take("0", 0)
	if err := h.take("more", line.MaxHandle); err != nil {
		t.Error(err)
	}
}

// TestLookHidesTheKey: a worker that looks gets the newest world and the key of visits, but not
// that of the members; a dismissed one gets nothing.
func TestLookHidesTheKey(t *testing.T) {
	j := newJob(t)
	j.says("a", "look", nil)
	if m := j.hears("a", "looked"); m.Generation != 0 {
		t.Errorf("%+v", m)
	}
	j.publish(2, 0, 0, "b")
	j.says("a", "look", nil)
	m := j.hears("a", "looked")
	key := j.server.current.key
	if m.Generation != 2 || m.DataKey == hex.EncodeToString(key.Bytes()) || m.DataKey != hex.EncodeToString(key.ForVisits().Bytes()) {
		t.Errorf("%+v", m)
	}
	j.server.Dismiss("a", line.ErrRemoved)
	j.says("a", "look", nil)
	if m := j.hears("a", "looked"); m.Generation != 0 || m.DataKey != "" {
		t.Errorf("%+v", m)
	}
}

// TestWorldsDiffer: a worker that has the members of the previous world gets the next ones as a
// difference; one that has others or none gets all. Each ends up with the same members.
func TestWorldsDiffer(t *testing.T) {
	j := newJob(t)
	many := make([]string, 40)
	for i := range many {
		many[i] = fmt.Sprintf("w%02d", i)
	}
	join := func(worker string, after uint64, before *line.Place) (line.Place, told) {
		t.Helper()
		r := line.Joining{After: after}
		if before != nil {
			r.Has = before.Number()
		}
		j.says(worker, "join", r)
		m := j.hears(worker, "world")
		return j.place(m, after, before), m
	}
	j.publish(1, 0, 0, many...)
	stays, _ := join("w00", 0, nil)
	skips, _ := join("w01", 0, nil)
	for generation := uint64(2); generation < 30; generation++ {
		many = slices.Delete(many, 5, 6)
		j.publish(generation, 0, 0, many...)
		p, m := join("w00", generation-1, &stays)
		if stays = p; m.Base == 0 {
			t.Errorf("generation %d: all members again", generation)
		}
		if generation%5 > 0 {
			continue
		}
		p, m = join("w01", generation-1, &skips)
		if skips = p; m.Base != 0 {
			t.Errorf("generation %d: a difference from another world", generation)
		}
		old, _ := join("w02", generation-1, nil)
		var worlds [3]line.World
		for i, p := range []line.Place{stays, skips, old} {
			w, err := p.World()
			if err != nil {
				t.Fatal(err)
			}
			worlds[i] = w
		}
		for _, w := range worlds[1:] {
			if !reflect.DeepEqual(w.Slots, worlds[0].Slots) || !reflect.DeepEqual(w.DataAddrs(), worlds[0].DataAddrs()) {
				t.Errorf("generation %d: other members", generation)
			}
		}
	}
}

// TestBeats: heartbeats within their bounds are accepted, and others refused.
func TestBeats(t *testing.T) {
	j := newJob(t)
	j.says("a", "pulse", line.Beat{Phase: line.Training, Commits: 3})
	j.says("a", "pulse", line.Beat{Phase: 99})
	if j.hears("a", "error"); len(j.beats) != 1 || j.beats[0].Commits != 3 {
		t.Errorf("%+v", j.beats)
	}
	j.says("a", "heard", line.Heard{Seq: 3, Again: true})
	j.says("a", "stacks", line.StacksLine{ID: 7})
	if len(j.said) != 2 || j.said[1] != "a located 7" {
		t.Errorf("%q", j.said)
	}
}

// BenchmarkPublish measures how the driver publishes a world to ten thousand waiting workers, one
// in a hundred of which has died.
func BenchmarkPublish(b *testing.B) {
	const n = 10_000
	var answered int
	s := NewServer(ServerConfig{Handler: newJob(b), Tell: func(workers []string, _ []uint32, _, _ []byte) { answered += len(workers) }})
	w, members := plan.World{Slots: make([]plan.Slot, n)}, make([]line.Member, n)
	for i := range n {
		w.Slots[i].SlotID = plan.SlotID{Host: fmt.Sprintf("host%05d", i/8), Index: i % 8}
		members[i] = line.Member{Incarnation: fmt.Sprint(i), DataAddrs: []string{fmt.Sprintf("10.0.%d.%d:%d", i/8/256, i/8%256, 20000+i*7919%40000)}}
		s.Admit(identity.Subject{Incarnation: members[i].Incarnation})
	}
	for b.Loop() {
		for i := range n {
			s.Hear(members[i].Incarnation, line.Up("join", line.Joining{After: w.Generation}), func() {})
		}
		w.Generation++
		s.Publish(w, members, 0, 0)
	}
	b.ReportMetric(float64(answered)/float64(b.N), "answers/op")
}
