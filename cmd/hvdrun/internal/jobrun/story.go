package jobrun

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/job"
)

const (
	// storyPause is the least time between two lines about worlds: what happens meanwhile is in the
	// next one.
	storyPause = time.Second

	// lateCommit is after how long a world that has made no commit is told of.
	lateCommit = 5 * time.Second

	// mostReasons is how many reasons a line names.
	mostReasons = 3
)

// story tells in the log what happens to a job: who trains, each new world with its reasons, and
// the end. Programs that are in no world are not told of.
type story struct {
	log       logrus.FieldLogger
	run, name string // the job's id, and what commands may call it
	places    string // where the job's output and events are; "": nowhere
	stateless bool   // its programs make no commits

	mu      sync.Mutex
	silent  bool // the events are those of the driver before
	begun   time.Time
	reasons job.Reasons // since the last line about a world
	world   toldWorld   // the last one that was published
	pace    pace
}

// toldWorld is a published world.
type toldWorld struct {
	generation uint64
	size       int
	hosts      int
	trains     bool        // it has made a commit, or was told of without one
	late       *time.Timer // tells of a world that makes none
}

// pace has lines about worlds wait, so that there is one a second at most.
type pace struct {
	told    time.Time // when there was the last line
	line    string    // which waits for the pause to end
	why     []string  // the reasons of the waiting line and of the lines that it has replaced, each once
	known   map[string]bool
	between int // worlds that the waiting line has replaced
	timer   *time.Timer
}

// storyHook tells in the log what happens to the job.
type storyHook struct{ story *story }

func (h *storyHook) start(_ context.Context, r *run) error {
	h.story = newStory(r.settings, r.log)
	r.events = append(r.events, h.story.event)
	r.replayed = append(r.replayed, h.story.replay)
	return nil
}

func (h *storyHook) stop(*run) { h.story.close() }

func newStory(s *settings.Settings, log logrus.FieldLogger) *story {
	t := &story{log: log, run: s.RunID, name: cmp.Or(s.Name, s.RunID[:min(4, len(s.RunID))]), stateless: s.Restart.Workers}
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

// replay takes an event of the driver before, of which nothing is told again.
func (t *story) replay(of job.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.silent = true
	t.take(of)
	t.silent = false
}

// event takes the job's next event.
func (t *story) event(of job.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.take(of)
}

func (t *story) take(of job.Event) {
	if t.begun.IsZero() {
		t.begun = of.Time
	}
	var e job.Entry
	switch of.Name {
	case job.WorkerStarted, job.WorkerReady, job.Audit, job.HostsUpdated, job.Reset:
		return
	case job.HostsFound: // which may be of thousands
		e = job.Entry{Name: of.Name, Hosts: fieldOf[[]job.FoundHost](of, "hosts")}
	case job.WorldPublished:
		e = job.Entry{
			Time: of.Time, Name: of.Name, Generation: fieldOf[uint64](of, "generation"),
			Cause: string(fieldOf[job.Cause](of, "cause")), Slots: fieldOf[[]job.PublishedSlot](of, "slots"),
		}
	default:
		var err error
		if e, err = of.Entry(); err != nil {
			return
		}
	}
	t.reasons.Add(e)
	switch e.Name {
	case job.WorldPublished:
		t.published(e)
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

// published takes a world. The first is told of at once, those that make no commit after a while.
func (t *story) published(e job.Entry) {
	hosts := map[string]bool{}
	for _, s := range e.Slots {
		hosts[s.Host] = true
	}
	w := toldWorld{generation: e.Generation, size: len(e.Slots), hosts: len(hosts)}
	if t.world.late != nil {
		t.world.late.Stop()
	}
	t.world = w
	switch who := w.who(); {
	case t.silent:
		return
	case w.generation == 1:
		t.log.Infof("job %s: %s; hvdrun top %s shows them", t.run, who, t.name)
	case t.stateless:
		t.tell(e.Time, "")
		return
	}
	if !t.stateless {
		t.world.late = time.AfterFunc(lateCommit, func() { t.late(w.generation) })
	}
}

// who is the size of a world in words.
func (w *toldWorld) who() string {
	return fmt.Sprintf("%s on %s", show.Plural(w.size, "worker"), show.Plural(w.hosts, "host"))
}

// late reports a world that has made no commit for a while.
func (t *story) late(generation uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.world.generation == generation && !t.world.trains {
		t.tell(time.Now(), fmt.Sprintf(", no commit within %v", lateCommit))
	}
}

// trains reports a world that has made its first commit.
func (t *story) trains(e job.Entry) {
	if e.Generation != t.world.generation {
		return // it is over
	}
	t.world.trains = true
	if t.world.late != nil {
		t.world.late.Stop()
	}
	t.tell(e.Time, ", a step after "+brief(time.Duration(e.Seconds*float64(time.Second))))
}

// tell logs how the last world does, and why there is one, at once or when the pause is over.
func (t *story) tell(at time.Time, how string) {
	reasons, p := t.reasons.Take(), &t.pace
	if t.silent {
		return
	}
	p.add(reasons)
	if p.line != "" {
		p.between++
	}
	p.line = fmt.Sprintf("world %d: %s%s", t.world.generation, t.world.who(), how)
	if wait := storyPause - at.Sub(p.told); wait <= 0 {
		t.flush(at)
	} else if p.timer == nil {
		p.timer = time.AfterFunc(wait, func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.flush(time.Now())
		})
	}
}

// add adds reasons to those of the waiting line.
func (p *pace) add(reasons []job.Reason) {
	for _, r := range reasons {
		if r.Why == "" || p.known[r.Why] {
			continue
		}
		if p.known == nil {
			p.known = make(map[string]bool)
		}
		p.known[r.Why] = true
		p.why = append(p.why, r.Why)
	}
}

// flush logs the line that waits.
func (t *story) flush(at time.Time) {
	p := &t.pace
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	if p.line == "" {
		return
	}
	if len(p.why) > 0 {
		p.line += ": " + strings.Join(p.why[:min(len(p.why), mostReasons)], ", ")
	}
	if n := len(p.why) - mostReasons; n > 0 {
		p.line += fmt.Sprintf(", and %d more", n)
	}
	if p.between > 0 {
		p.line += fmt.Sprintf(" (%s since the last line)", show.Plural(p.between+1, "world"))
	}
	t.log.Info(p.line)
	p.told, p.line, p.why, p.known, p.between = at, "", nil, nil, 0
}

// ends reports the end: the outcome, who trained last, how far the job has come, and where its
// files are. The error is said by hvdrun.
func (t *story) ends(e job.Entry) {
	t.flush(e.Time)
	if t.world.generation == 0 {
		return
	}
	text := "the job is done"
	switch {
	case e.Status > 128:
		text = "the job was stopped"
	case e.Status != 0:
		text = fmt.Sprintf("the job has failed, status %d,", e.Status)
	}
	text += fmt.Sprintf(" after %v: %s", show.Round(e.Time.Sub(t.begun)), show.Plural(t.world.size, "worker"))
	if e.Commits > 0 {
		text += ", "
		if e.Status != 0 && !job.Stopped(e.Status) {
			text += "at least " // workers that fail do not say how many they have made
		}
		text += show.Plural(e.Commits, "commit")
	}
	switch {
	case e.Checkpoint > 0:
		text += fmt.Sprintf(", checkpoint of commit %s written", show.Grouped(e.Checkpoint))
	case !t.stateless:
		text += ", no last checkpoint"
	}
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
	if t.world.late != nil {
		t.world.late.Stop()
	}
}

// brief is a short time for people.
func brief(d time.Duration) string {
	if d < time.Second {
		return d.Round(time.Millisecond).String()
	}
	return show.Round(d).String()
}
