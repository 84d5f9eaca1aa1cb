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

	// lateCommit is after how long a world that has made no commit is told of.
	lateCommit = 5 * time.Second

	// mostReasons is how many reasons a line names.
	mostReasons = 3
)

// story tells in the log what happens to a job: who trains, each new world with its reasons, and
// the end. Programs that are in no world are not told of.
type story struct {
	log       logrus.FieldLogger
	run       string // the job's id
	places    string // where the job's output and events are; "": nowhere
	stateless bool   // its programs make no commits

	mu      sync.Mutex
	silent  bool // the events are those of the driver before
	begun   time.Time
	hosts   map[string]string // of the last list: what each is like; nil: there was none
	why     reasons           // what has led to the next world
	stalled map[string]bool   // places of workers that hold up others
	world   toldWorld         // the last one that was published
	pace    pace
}

// toldWorld is a published world.
type toldWorld struct {
	generation uint64
	hosts      int
	members    map[place]bool
	trains     bool        // it has made a commit, or was told of without one
	late       *time.Timer // tells of a world that makes none
}

// place is where a worker is.
type place struct {
	host string
	slot int
}

// reasons are why there is another world, each once. The zero value has none.
type reasons struct {
	all   []string
	known map[string]bool
}

// add adds a reason; empty: there is none.
func (r *reasons) add(why string) {
	if why == "" || r.known[why] {
		return
	}
	if r.known == nil {
		r.known = make(map[string]bool)
	}
	r.known[why] = true
	r.all = append(r.all, why)
}

// String lists them, or the first where there are many.
func (r *reasons) String() string {
	text := strings.Join(r.all[:min(len(r.all), mostReasons)], ", ")
	if n := len(r.all) - mostReasons; n > 0 {
		text += fmt.Sprintf(", and %d more", n)
	}
	return text
}

// pace has lines about worlds wait, so that there is one a second at most.
type pace struct {
	told    time.Time // when there was the last line
	line    string    // which waits for the pause to end
	why     reasons   // of the waiting line and of those that it has replaced
	between int       // worlds that the waiting line has replaced
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
	t := &story{log: log, run: s.RunID, stateless: s.Restart.Workers, stalled: map[string]bool{}}
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
	switch of.Name {
	case job.WorkerStarted, job.WorkerReady, job.Audit, job.HostsUpdated, job.Reset:
		return
	case job.HostsFound: // which may be of thousands
		t.list(fieldOf[[]job.FoundHost](of, "hosts"))
		return
	case job.WorldPublished:
		t.published(of)
		return
	}
	e, err := of.Entry()
	if err != nil {
		return
	}
	switch e.Name {
	case job.WorkerDying:
		t.why.add(e.Why())
	case job.WorkerExited:
		t.exited(e)
	case job.Stalled:
		t.stalled[e.Place()] = e.Host != ""
	case job.StallEnded:
		delete(t.stalled, e.Place())
	case job.FirstCommit:
		t.trains(e)
	case job.JobDone:
		t.ends(e)
	default:
		t.why.add(e.Why())
	}
}

// exited notes the end of a worker as a reason, unless that is known, or the world is without it.
func (t *story) exited(e job.Entry) {
	lost := e
	lost.Name = job.WorkerDying
	switch {
	case t.stalled[e.Place()]:
		delete(t.stalled, e.Place())
		t.why.add(e.Member() + " held up the others")
	case t.why.known[lost.Why()]:
	case e.Cause == "left" && e.Slot != nil && !t.world.members[place{e.Host, *e.Slot}]:
	default:
		t.why.add(e.Why())
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
func (t *story) published(of job.Event) {
	slots, hosts := fieldOf[[]job.PublishedSlot](of, "slots"), map[string]bool{}
	w := toldWorld{generation: fieldOf[uint64](of, "generation"), members: make(map[place]bool, len(slots))}
	cause := fieldOf[job.Cause](of, "cause")
	lost := slices.Contains([]job.Cause{job.CauseDeath, job.CauseDeparture, job.CauseStall}, cause)
	if len(t.why.all) == 0 {
		t.why.add(cause.Why())
	}
	for _, s := range slots {
		at := place{s.Host, s.Slot}
		hosts[s.Host], w.members[at] = true, true
		if lost && !t.world.members[at] {
			t.why.add(fmt.Sprintf("%s:%d is in its place", s.Host, s.Slot))
		}
	}
	w.hosts = len(hosts)
	if t.world.late != nil {
		t.world.late.Stop()
	}
	t.world = w
	switch who := w.who(); {
	case t.silent:
		return
	case w.generation == 1:
		t.log.Infof("job %s: %s; hvdrun top %s shows them", t.run, who, t.run[:min(4, len(t.run))])
	case t.stateless:
		t.tell(of.Time, "")
		return
	}
	if !t.stateless {
		t.world.late = time.AfterFunc(lateCommit, func() { t.late(w.generation) })
	}
}

// who is the size of a world in words.
func (w *toldWorld) who() string {
	return fmt.Sprintf("%s on %s", show.Plural(len(w.members), "worker"), show.Plural(w.hosts, "host"))
}

// late tells of a world that has made no commit for a while.
func (t *story) late(generation uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.world.generation == generation && !t.world.trains {
		t.tell(time.Now(), fmt.Sprintf(", no commit within %v", lateCommit))
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
				t.why.add(name + " came")
			} else if was != now[name] {
				t.why.add(name + " is now " + now[name])
			}
		}
		for _, name := range slices.Sorted(maps.Keys(t.hosts)) {
			if _, there := now[name]; !there {
				t.why.add(name + " went")
			}
		}
	}
	t.hosts = now
}

// trains tells of a world that has made its first commit.
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
	why, p := t.why.all, &t.pace
	t.why = reasons{}
	if t.silent {
		return
	}
	for _, w := range why {
		p.why.add(w)
	}
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
	if len(p.why.all) > 0 {
		p.line += ": " + p.why.String()
	}
	if p.between > 0 {
		p.line += fmt.Sprintf(" (%s since the last line)", show.Plural(p.between+1, "world"))
	}
	t.log.Info(p.line)
	p.told, p.line, p.why, p.between = at, "", reasons{}, 0
}

// ends tells of the end: the outcome, who trained last, how far the job has come, and where its
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
	text += fmt.Sprintf(" after %v: %s", show.Round(e.Time.Sub(t.begun)), show.Plural(len(t.world.members), "worker"))
	if e.Commits > 0 {
		text += fmt.Sprintf(", %s commits", show.Grouped(e.Commits))
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
