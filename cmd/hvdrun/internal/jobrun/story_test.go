package jobrun

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/job"
)

// told plays events of a job to its story, and collects the story's lines.
type told struct {
	*story
	lines      *logtest.Hook
	generation uint64
}

func newTold() *told {
	log, lines := logtest.NewNullLogger()
	return &told{story: newStory(&settings.Settings{RunID: "7cc1d2e3f4a5b6c7", OutputSettings: settings.OutputSettings{EventsFile: "ev"}}, log), lines: lines}
}

func (t *told) happens(name job.EventName, fields ...any) { t.event(eventOf(name, fields)) }

// replays plays an event as one of the previous driver.
func (t *told) replays(name job.EventName, fields ...any) { t.replay(eventOf(name, fields)) }

func eventOf(name job.EventName, fields []any) job.Event {
	e := job.Event{Time: time.Now(), Name: name}
	for i := 0; i < len(fields); i += 2 {
		e.Fields = append(e.Fields, job.Field{Key: fields[i].(string), Value: fields[i+1]})
	}
	return e
}

// trainsOn publishes a world of one worker on each of these hosts, followed by its first commit.
func (t *told) trainsOn(seconds float64, hosts ...string) {
	t.meets("growth", hosts...)
	t.happens(job.FirstCommit, "generation", t.generation, "commits", 1, "seconds", seconds)
}

// meets publishes a world of one worker on each of these hosts.
func (t *told) meets(cause job.Cause, hosts ...string) {
	t.generation++
	var slots []job.PublishedSlot
	next := map[string]int{}
	for i, h := range hosts {
		slots = append(slots, job.PublishedSlot{Rank: i, Host: h, Slot: next[h]})
		next[h]++
	}
	t.happens(job.WorldPublished, "generation", t.generation, "size", len(hosts), "cause", cause, "slots", slots)
}

func (t *told) lists(hosts ...string) {
	var all []job.FoundHost
	for _, h := range hosts {
		all = append(all, job.FoundHost{Host: h, Slots: 1})
	}
	t.happens(job.HostsFound, "hosts", all)
}

func (t *told) text() string {
	var b strings.Builder
	for _, e := range t.lines.AllEntries() {
		if e.Level != logrus.InfoLevel {
			fmt.Fprintf(&b, "%v ", e.Level)
		}
		b.WriteString(e.Message + "\n")
	}
	return b.String()
}

// pass lets virtual time pass.
func pass(d time.Duration) { <-time.After(d) }

// TestStory: a start, a death, growth, a removal, a drain, other bounds, and the end are logged.
// Nothing is logged about programs that are in no world.
func TestStory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTold()
		s.lists("a", "b")
		s.trainsOn(0.31, "a", "a", "b")
		pass(4 * time.Second)
		s.happens(job.WorkerDying, "host", "b", "slot", 0, "rank", 2, "signal", 9, "what", "is killed")
		s.happens(job.WorkerExited, "host", "b", "slot", 0, "rank", 2, "code", -1, "signal", 9, "cause", "failed")
		s.happens(job.Excluded, "host", "b", "slot", 0, "until", time.Now().Add(time.Second))
		s.trainsOn(0.0124, "a", "a")
		pass(time.Second)
		s.happens(job.Returned, "host", "b", "slot", 0)
		s.lists("a", "b", "c", "d", "e", "f")
		s.trainsOn(0.008, "a", "a", "b", "c", "d", "e", "f")
		pass(4 * time.Second)
		s.lists("a", "c")
		s.happens(job.WorkerExited, "host", "b", "slot", 0, "rank", 2, "code", 0, "signal", nil, "cause", "left")
		s.happens(job.DrainAsked, "host", "c", "slot", nil)
		s.happens(job.Scaled, "min_np", 1, "max_np", 2)
		s.trainsOn(1.26, "a", "a")
		pass(time.Minute)
		s.happens(job.JobDone, "status", 0, "message", "", "commits", uint64(12345), "checkpoint", uint64(12345))
		s.close()
		want := `job 7cc1d2e3f4a5b6c7: 3 workers on 2 hosts; hvdrun top 7cc1 shows them
world 1: 3 workers on 2 hosts, a step after 310ms
world 2: 2 workers on 1 host, a step after 12ms: rank 2 on b:0 was lost
world 3: 7 workers on 6 hosts, a step after 8ms: b:0 is back, c came, d came, and 2 more
world 4: 2 workers on 1 host, a step after 1.3s: b went, d went, e went, and 4 more
the job is done after 1m9s: 2 workers, 12,345 commits, checkpoint of commit 12,345 written; events in ev
`
		if got := s.text(); got != want {
			t.Errorf("told is\n%s\nwant\n%s", got, want)
		}

		s = newTold()
		s.lists("a")
		s.happens(job.WorkerStarted, "host", "a", "slot", 0, "pid", 7)
		s.happens(job.WorkerExited, "host", "a", "slot", 0, "rank", -1, "code", 0, "signal", nil, "cause", "done")
		s.happens(job.JobDone, "status", 0, "message", "")
		s.close()
		if got := s.text(); got != "" {
			t.Errorf("of a program in no world is told\n%s", got)
		}
	})
}

// TestStoryOfLosses: a spare, a stall, a worker that leaves, one that ended late, a world that
// makes no commit, and another driver, which does not log earlier events again.
func TestStoryOfLosses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTold()
		before := newTold()
		play := func(name job.EventName, fields ...any) {
			s.happens(name, fields...)
			before.replays(name, fields...)
		}
		s.lists("a", "b")
		s.trainsOn(0.1, "a", "b")
		before.generation = 1
		play(job.WorldPublished, "generation", uint64(1), "size", 2, "cause", job.CauseStart, "slots", []job.PublishedSlot{{Host: "a"}, {Host: "b", Rank: 1}})
		s.lines.Reset()
		pass(time.Second)
		s.happens(job.WorkerExited, "host", "b", "slot", 0, "rank", 1, "code", 3, "signal", nil, "cause", "failed")
		s.meets(job.CauseDeath, "a", "c")
		pass(7 * time.Second)
		s.happens(job.FirstCommit, "generation", s.generation, "commits", 7, "seconds", 7.2)
		pass(time.Second)
		s.happens(job.Stalled, "host", "c", "slot", 0, "rank", 1, "what", "is silent")
		s.happens(job.WorkerExited, "host", "c", "slot", 0, "rank", 1, "code", 0, "signal", 9, "cause", "stopped")
		s.meets(job.CauseStall, "a")
		s.happens(job.FirstCommit, "generation", s.generation, "commits", 9, "seconds", 0.02)
		s.happens(job.WorkerExited, "host", "d", "slot", 0, "rank", 4, "code", 0, "signal", nil, "cause", "left") // of a previous world
		pass(time.Second)
		s.trainsOn(0.01, "a", "b")
		pass(time.Second)
		s.meets(job.CauseDeparture, "a")
		s.happens(job.FirstCommit, "generation", s.generation, "commits", 11, "seconds", 0.03)
		s.happens(job.JobDone, "status", 130, "message", "stopped by signal: interrupt", "commits", uint64(12))
		s.close()
		want := `world 2: 2 workers on 2 hosts, no commit within 5s: rank 1 on b:0 failed (exit status 3), c:0 is in its place
world 2: 2 workers on 2 hosts, a step after 7.2s
world 3: 1 worker on 1 host, a step after 20ms: rank 1 on c:0 held up the others
world 4: 2 workers on 2 hosts, a step after 10ms
world 5: 1 worker on 1 host, a step after 30ms: a worker left
the job was stopped after 11s: 1 worker, 12 commits, no checkpoint written; events in ev
`
		if got := s.text(); got != want {
			t.Errorf("told is\n%s\nwant\n%s", got, want)
		}

		before.trainsOn(0.05, "a")
		before.happens(job.JobDone, "status", 1, "message", "m", "commits", uint64(1))
		before.close()
		want = `world 2: 1 worker on 1 host, a step after 50ms
the job has failed, status 1, after 11s: 1 worker, at least 1 commit, no checkpoint written; events in ev
`
		if got := before.text(); got != want {
			t.Errorf("told by another driver is\n%s\nwant\n%s", got, want)
		}
	})
}

// TestStoryOfFlappingHosts: if some of a job's 300 hosts come and go ten times a second, one line a
// second is logged.
func TestStoryOfFlappingHosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newTold()
		var all []string
		for i := range 300 {
			all = append(all, fmt.Sprint("host-", i))
		}
		s.lists(all...)
		s.trainsOn(1, all...)
		for i := range 600 {
			pass(100 * time.Millisecond)
			now := all[:300-i%2*150]
			s.lists(now...)
			s.trainsOn(0.02, now...)
		}
		s.close()
		text := s.text()
		if n := strings.Count(text, "\n"); n < 50 || n > 63 {
			t.Errorf("%d lines in a minute", n)
		}
		if !strings.Contains(text, "world 5") || !strings.Contains(text, "and 297 more (10 worlds since the last line)") {
			t.Errorf("told is\n%.1000s", text)
		}
	})
}
