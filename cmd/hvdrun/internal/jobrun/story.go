package jobrun

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/job"
)

const (
	// storyPause is the least time between two log lines about worlds. The next line covers what
	// happens meanwhile.
	storyPause = time.Second

	// lateCommit is the time after which a world without a commit is logged.
	lateCommit = 5 * time.Second

	// mostReasons is the largest number of reasons in a line.
	mostReasons = 3
)

// story logs what happens to a job: its first world, each later world with its reasons, and the
// end. It does not log programs that join no world.
type story struct {
	log       logrus.FieldLogger
	run, name string // the job's run id, and a name that commands accept
	places    string // the files of the job's output and events; "": none
	stateless bool   // its programs make no commits

	mu      sync.Mutex
	silent  bool // the events are those of the previous driver
	begun   time.Time
	reasons job.Reasons // since the last line about a world
	world   toldWorld   // the last published world
	pace    pace
}

// toldWorld is a published world.
type toldWorld struct {
	generation uint64
	size       int
	hosts      int
	trains     bool        // it has made a commit
	late       *time.Timer // logs a world that makes no commit
}

// pace delays the lines about worlds, so that at most one is logged per storyPause.
type pace struct {
	told    time.Time // when the last line was logged
	line    string    // the line that waits for the end of the pause; "": none
	why     []string  // the reasons of the waiting line and of the lines that it replaced, each once
	known   map[string]bool
	between int // number of worlds whose lines the waiting line replaced
	timer   *time.Timer
}

// tellStory logs what happens to the job.
func tellStory(_ context.Context, r *run) (stop func(), err error) {
	t := newStory(r.settings, r.log)
	r.events = append(r.events, t.event)
	r.replayed = append(r.replayed, t.replay)
	return t.close, nil
}

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

// replay takes an event of the previous driver. It logs nothing.
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
	case job.HostsFound: // there may be thousands of hosts
		e = job.Entry{Name: of.Name, Hosts: job.FieldOf[[]job.FoundHost](of, "hosts")}
	case job.WorldPublished:
		e = job.Entry{
			Time: of.Time, Name: of.Name, Generation: job.FieldOf[uint64](of, "generation"),
			Cause: string(job.FieldOf[job.Cause](of, "cause")), Slots: job.FieldOf[[]job.PublishedSlot](of, "slots"),
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

// published takes a new world. It logs the first world at once. Later worlds are logged at their
// first commit, or after lateCommit without one.
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

// who returns the size of a world in words.
func (w *toldWorld) who() string {
	return fmt.Sprintf("%s on %s", show.Plural(w.size, "worker"), show.Plural(w.hosts, "host"))
}

// late logs a world that has made no commit within lateCommit.
func (t *story) late(generation uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.world.generation == generation && !t.world.trains {
		t.tell(time.Now(), fmt.Sprintf(", no commit within %v", lateCommit))
	}
}

// trains logs a world that has made its first commit.
func (t *story) trains(e job.Entry) {
	if e.Generation != t.world.generation {
		return // the world is over
	}
	t.world.trains = true
	if t.world.late != nil {
		t.world.late.Stop()
	}
	t.tell(e.Time, ", a step after "+show.Brief(e.Seconds))
}

// tell logs the last world, with how appended and the reasons for the world, at once or at the end
// of the pause.
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

// flush logs the waiting line, if there is one.
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

// ends logs the end of the job: the outcome, the size of the last world, the number of commits, and
// the files of the job. hvdrun itself prints the error.
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
	text += fmt.Sprintf(" after %v: %s", job.Round(e.Time.Sub(t.begun)), show.Plural(t.world.size, "worker"))
	if e.Commits > 0 {
		text += ", "
		if e.Status != 0 && !job.Stopped(e.Status) {
			text += "at least " // failed workers do not report their last commits
		}
		text += show.Plural(e.Commits, "commit")
	}
	switch {
	case e.Checkpoint > 0:
		text += fmt.Sprintf(", checkpoint of commit %s written", show.Grouped(e.Checkpoint))
	case !t.stateless:
		text += ", no checkpoint written"
	}
	if t.places != "" {
		text += "; " + t.places
	}
	t.log.Info(text)
}

// close logs the waiting line and stops the timers.
func (t *story) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.flush(time.Now())
	if t.world.late != nil {
		t.world.late.Stop()
	}
}
