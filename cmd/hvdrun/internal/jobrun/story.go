package jobrun

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/driver/job"
)

const (
	// storyPause is the least time between two lines about worlds: what happens meanwhile is in the
	// next one.
	storyPause = time.Second

	// mostReasons is how many reasons a line names.
	mostReasons = 3
)

// story tells in the log what happens to a job: who trains, each new world with its reasons, and
// the end. Programs that are in no world are not told of.
type story struct {
	log    logrus.FieldLogger
	run    string // the job's id
	places string // where the job's output and events are; "": nowhere

	mu    sync.Mutex
	begun time.Time
	hosts map[string]string // of the last list: what each is like; nil: there was none
	why   []string          // what has led to the next world, once each
	known map[string]bool
	world struct { // the last one that was published
		generation     uint64
		workers, hosts int
	}
	told    time.Time // when there was the last line about a world
	line    string    // about a world, which waits for the pause to end
	between int       // worlds that the waiting line has replaced
	timer   *time.Timer
}

// storyHook tells in the log what happens to the job.
type storyHook struct{ story *story }

func (h *storyHook) start(_ context.Context, r *run) error {
	h.story = newStory(r.settings, r.log)
	r.events = append(r.events, h.story.event)
	return nil
}

func (h *storyHook) stop(*run) { h.story.close() }

func newStory(s *settings.Settings, log logrus.FieldLogger) *story {
	t := &story{log: log, run: s.RunID, known: map[string]bool{}}
	var places []string
	if s.OutputDir != "" {
		places = append(places, "output in "+s.OutputDir)
	}
	if s.EventsFile != "" {
		places = append(places, "events in "+s.EventsFile)
	}
	t.places = strings.Join(places, ", ")
	return t
}

// event takes the job's next event.
func (t *story) event(of job.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.begun.IsZero() {
		t.begun = of.Time
	}
	switch of.Name {
	case job.WorkerStarted, job.WorkerReady, job.Audit, job.HostsUpdated, job.Reset:
		return
	case job.HostsFound: // which may be of thousands
		t.list(fieldOf[[]job.FoundHost](of, "hosts"))
		return
	case job.WorldPublished:
		hosts := map[string]bool{}
		for _, s := range fieldOf[[]job.PublishedSlot](of, "slots") {
			hosts[s.Host] = true
		}
		t.world.generation, t.world.workers, t.world.hosts = fieldOf[uint64](of, "generation"), fieldOf[int](of, "size"), len(hosts)
		return
	}
	e, err := of.Entry()
	if err != nil {
		return
	}
	switch e.Name {
	case job.WorkerDying:
		t.because(e.Member() + " was lost")
	case job.WorkerExited:
		switch {
		case e.Cause == "failed" && !t.known[e.Member()+" was lost"]:
			t.because(fmt.Sprintf("%s failed (%s)", e.Member(), e.Exit()))
		case e.Cause == "left":
			t.because(e.Member() + " left")
		}
	case job.Draining:
		t.because(e.Member() + " was asked to leave")
	case job.DrainAsked:
		t.because(e.Place() + " is drained")
	case job.Excluded:
		if e.Until == nil {
			t.because(e.Place() + " is excluded")
		}
	case job.Returned:
		t.because(e.Place() + " is back")
	case job.Scaled:
		_, text := e.Words()
		t.because(text)
	case job.FirstCommit:
		t.trains(e)
	case job.JobDone:
		t.ends(e)
	}
}

// fieldOf returns the value of an event's field, which is of this type.
func fieldOf[T any](e job.Event, key string) (v T) {
	if i := slices.IndexFunc(e.Fields, func(f job.Field) bool { return f.Key == key }); i >= 0 {
		v, _ = e.Fields[i].Value.(T)
	}
	return v
}

// because notes a reason for the next world.
func (t *story) because(why string) {
	if !t.known[why] {
		t.known[why] = true
		t.why = append(t.why, why)
	}
}

// list takes a list of hosts: those that have come, changed and gone are reasons.
func (t *story) list(found []job.FoundHost) {
	now := make(map[string]string, len(found))
	for _, h := range found {
		now[h.Host] = "with " + show.Plural(h.Slots, "slot")
		if h.Draining {
			now[h.Host] = "draining"
		}
	}
	if t.hosts != nil {
		for _, name := range slices.Sorted(maps.Keys(now)) {
			if was, known := t.hosts[name]; !known {
				t.because(name + " came")
			} else if was != now[name] {
				t.because(name + " is now " + now[name])
			}
		}
		for _, name := range slices.Sorted(maps.Keys(t.hosts)) {
			if _, there := now[name]; !there {
				t.because(name + " went")
			}
		}
	}
	t.hosts = now
}

// trains tells of a world that has made its first commit.
func (t *story) trains(e job.Entry) {
	if e.Generation != t.world.generation {
		return // it is over, or was published by a driver before
	}
	who := fmt.Sprintf("%s on %s", show.Plural(t.world.workers, "worker"), show.Plural(t.world.hosts, "host"))
	after := time.Duration(e.Seconds * float64(time.Second))
	if e.Generation == 1 {
		t.log.Infof("job %s: %s, the first step after %v; hvdrun top %s shows them", t.run, who, show.Round(after), t.run[:min(4, len(t.run))])
	} else {
		t.say(e.Time, fmt.Sprintf("world %d: %s, a step after %s%s", e.Generation, who, milliseconds(after), t.reasons()))
	}
	t.why = nil
	clear(t.known)
}

// reasons lists them, or the first where there are many.
func (t *story) reasons() string {
	why := t.why
	if len(why) == 0 {
		return ""
	}
	text := ": " + strings.Join(why[:min(len(why), mostReasons)], ", ")
	if n := len(why) - mostReasons; n > 0 {
		text += fmt.Sprintf(", and %d more", n)
	}
	return text
}

// say logs a line about a world, at once or when the pause is over.
func (t *story) say(at time.Time, line string) {
	if t.line != "" {
		t.between++
	}
	t.line = line
	if wait := storyPause - at.Sub(t.told); wait <= 0 {
		t.flush(at)
	} else if t.timer == nil {
		t.timer = time.AfterFunc(wait, func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.flush(time.Now())
		})
	}
}

// flush logs the line that waits.
func (t *story) flush(at time.Time) {
	if t.timer != nil {
		t.timer.Stop()
		t.timer = nil
	}
	if t.line == "" {
		return
	}
	if t.between > 0 {
		t.line += fmt.Sprintf(" (%s since the last line)", show.Plural(t.between+1, "world"))
	}
	t.log.Info(t.line)
	t.told, t.line, t.between = at, "", 0
}

// ends tells of the end.
func (t *story) ends(e job.Entry) {
	t.flush(e.Time)
	if t.world.generation == 0 {
		return
	}
	_, text := e.Words()
	if e.Status != 0 {
		text = fmt.Sprintf("the job has ended with status %d", e.Status) // the error is said by hvdrun
	}
	text += fmt.Sprintf(" after %v", show.Round(e.Time.Sub(t.begun)))
	if t.places != "" {
		text += "; " + t.places
	}
	t.log.Info(text)
}

// close ends what waits.
func (t *story) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.flush(time.Now())
}

// milliseconds is a short time for people.
func milliseconds(d time.Duration) string {
	if d < time.Second {
		return d.Round(time.Millisecond).String()
	}
	return show.Round(d).String()
}
