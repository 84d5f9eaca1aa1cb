package elastic

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wake"
)

// beater is a meeting whose driver receives reports about the worker's activity.
type beater interface {
	meeting
	// Beat sends b once, if a connection exists.
	Beat(ctx context.Context, b line.Beat) error
	// connections returns the number of connections made to other ranks so far, and operations
	// returns the collective operations.
	connections() uint64
	operations() []collective.Operations
	// stallWarning is the wait for other ranks after which the driver is informed at once. 0: the
	// default; negative: never.
	stallWarning() time.Duration
	// usage returns what the worker's process uses; nil: unknown. It takes about a millisecond.
	usage() *proc.Usage
}

const (
	beatEvery    = time.Second // longest interval between two beats
	looksPerBeat = 4
	leastPause   = 5 * time.Millisecond // between two observations
	usualWarning = 5 * time.Second
)

// doing is the worker's phase, and a counter of phases in the upper bits. It uses neither clock nor
// lock. An observer that reads the same word twice knows that nothing has changed.
type doing struct {
	word    atomic.Uint64
	entered func(line.Phase)              // nil: none
	commits atomic.Uint64                 // number of the last commit in the generation Worker.entering; 0: none
	trained atomic.Bool                   // the training function has returned nil in that generation
	trace   line.Trace                    // trace of its entry into its world
	last    atomic.Pointer[atomic.Uint64] // bytes of the job's last checkpoint on disk; nil: this rank does not write it
	made    commitCounts
	figures figures
	news    wake.Flag // makes the pulse beat at once; nil without a pulse
}

// commitCounts counts commits. Run's goroutine writes it, and the pulse reads it.
type commitCounts struct{ commits, nanoseconds, bytes atomic.Uint64 }

// note counts a commit that began at the given time.
func (c *commitCounts) note(begun time.Time, bytes int) {
	c.commits.Add(1)
	c.nanoseconds.Add(uint64(max(0, time.Since(begun))))
	c.bytes.Add(uint64(bytes))
}

// hasNews makes the pulse report the phase to the driver at once, instead of at the next beat.
func (d *doing) hasNews() {
	d.news.Set()
}

func (d *doing) enter(p line.Phase) {
	for {
		was := d.word.Load()
		if d.word.CompareAndSwap(was, was&^0xff+0x100|uint64(p)) {
			break
		}
	}
	if p == line.Joins || p == line.Fetches || d.trace.Recording() {
		d.trace.Enter(p, time.Now())
	}
	if d.entered != nil {
		d.entered(p)
	}
}

func (d *doing) phase() line.Phase { return line.Phase(d.word.Load()) }

// pulse observes its worker periodically and reports to the driver: about once a second, less often
// in a large world, and at once when the worker has waited too long.
type pulse struct {
	worker *Worker
	to     beater

	every, pause time.Duration // between beats and between observations, in a small world
	warning      time.Duration // 0: never

	last  uint64 // the doing's word at the last observation
	made  uint64 // connections at the last observation
	quiet time.Duration

	generation uint64 // of the world of the lanes
	lanes      map[uint64]*laneSeen
	reported   bool // the current long wait was reported

	usedAt time.Time // when the usage of the process was last read
}

// laneSeen is the state of a lane at the last observation.
type laneSeen struct {
	collective.Progress
	since time.Duration // time since the last change
	seen  bool          // the current observation has seen it
}

// startPulse starts a pulse, if the driver wants beats. stop ends it and waits for that.
func (w *Worker) startPulse() (stop func()) {
	to, ok := w.meeting.(beater)
	if !ok {
		return func() {}
	}
	p := newPulse(w, to)
	w.doing.news = wake.New()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { p.run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

func newPulse(w *Worker, to beater) *pulse {
	p := &pulse{worker: w, to: to, lanes: map[uint64]*laneSeen{}, every: beatEvery, warning: to.stallWarning()}
	switch {
	case p.warning == 0:
		p.warning = usualWarning
	case p.warning < 0:
		p.warning = 0
	}
	if p.warning > 0 {
		p.every = min(p.every, p.warning/2)
	}
	p.pause = max(p.every/looksPerBeat, leastPause)
	return p
}

// run beats until ctx ends. A driver that does not answer delays only the next observation.
func (p *pulse) run(ctx context.Context) {
	spacing := p.spacing()
	ticker := time.NewTicker(spacing * p.pause)
	defer ticker.Stop()
	looked := time.Now()
	var lastBeat time.Time
	news := false
	for {
		now := time.Now()
		if is := p.spacing(); is != spacing {
			spacing = is
			ticker.Reset(spacing * p.pause)
		}
		// The limit excludes the time during which this process was stopped: then the other ranks
		// waited for it, not it for them.
		waits := p.look(min(now.Sub(looked), 2*spacing*beatEvery))
		looked = now
		long := p.warning > 0 && waits >= p.warning
		if news || long && !p.reported || now.Sub(lastBeat) >= spacing*(p.every-p.pause/2) {
			b := p.beat()
			err := p.to.Beat(ctx, b)
			if err == nil {
				p.reported = long
				if b.Entered != nil {
					p.worker.doing.trace.Sent()
				}
			}
			if !errors.Is(err, line.ErrNotConnected) { // otherwise the next observation tries again
				lastBeat = now
			}
		}
		p.reported, news = p.reported && long, false
		select {
		case <-ticker.C:
		case <-p.worker.doing.news:
			news = true
		case <-ctx.Done():
			return
		}
	}
}

// spacing returns the factor for intervals in the worker's world.
func (p *pulse) spacing() time.Duration {
	size := 1
	if place := p.worker.member.Load(); place != nil {
		size = place.world.Size()
	}
	return time.Duration(line.BeatSpacing(size))
}

// look records what has changed in the time passed since the last observation, and returns the
// longest wait.
func (p *pulse) look(passed time.Duration) (longest time.Duration) {
	p.quiet += passed
	if word := p.worker.doing.word.Load(); word != p.last {
		p.last, p.quiet = word, 0
	}
	for _, l := range p.lanes {
		l.seen = false
	}
	if made := p.to.connections(); made != p.made {
		if p.made = made; line.Phase(p.last) == line.Connecting {
			p.quiet = 0
		}
	}
	generation, found := p.progress()
	if generation != p.generation { // lanes and operations are numbered per world
		p.generation = generation
		clear(p.lanes)
	}
	for _, now := range found {
		l := p.lanes[now.Lane]
		switch {
		case l == nil:
			l = &laneSeen{}
			p.lanes[now.Lane] = l
			p.quiet = 0
		case l.Operation != now.Operation || l.Waiting != now.Waiting:
			l.since, p.quiet = 0, 0
		default:
			l.since += passed
		}
		l.Progress, l.seen = now, true
		if l.Waiting {
			longest = max(longest, l.since)
		}
	}
	for id, l := range p.lanes {
		if !l.seen {
			delete(p.lanes, id)
		}
	}
	return longest
}

// progress returns the progress of the worker's lanes, and their generation.
func (p *pulse) progress() (generation uint64, lanes []collective.Progress) {
	generation = p.worker.entering.Load()
	switch phase := line.Phase(p.last); {
	case phase == line.Joins:
		return generation, nil // the world has been left
	case phase == line.Connecting:
		return generation, []collective.Progress{{Waiting: true, What: "connecting"}}
	}
	place := p.worker.member.Load()
	if place == nil {
		return generation, nil
	}
	return place.world.Generation, place.group.Progress()
}

// beat returns the last observation as a heartbeat. If there are too many lanes it includes those
// with the longest waits.
func (p *pulse) beat() line.Beat {
	b := line.Beat{Generation: p.generation, Phase: line.Phase(p.last), Quiet: p.quiet}
	// A worker that enters a world resets commits first and sets its generation then.
	if commits := p.worker.doing.commits.Load(); p.worker.entering.Load() == b.Generation {
		b.Commits = commits
	}
	b.Trained = new(p.worker.doing.trained.Load())
	if last := p.worker.doing.last.Load(); last != nil {
		b.Written = last.Load()
	}
	b.Counters, b.Figures = p.counters(), p.worker.doing.figures.list()
	if now := time.Now(); now.Sub(p.usedAt) >= beatEvery/2 { // not in the frequent beats of a reset
		b.Usage, p.usedAt = p.to.usage(), now
	}
	b.Waits, b.Entered = p.waits(), p.worker.doing.trace.Told(time.Now())
	for id, l := range p.lanes {
		b.Lanes = append(b.Lanes, line.Lane{ID: id, Operation: l.Operation, Waiting: l.Waiting, For: l.since, What: l.What})
	}
	slices.SortFunc(b.Lanes, func(x, y line.Lane) int {
		switch {
		case (x.ID == 0) != (y.ID == 0):
			return first(x.ID == 0)
		case x.Waiting != y.Waiting:
			return first(x.Waiting)
		case x.For != y.For:
			return first(x.For > y.For)
		}
		return first(x.ID < y.ID)
	})
	b.Lanes = b.Lanes[:min(len(b.Lanes), line.MaxLanes)]
	return b
}

// addOperations adds o, the operations of one algorithm, to all, in which operations of the same
// kind are added up.
func addOperations(all []line.Operations, o line.Operations) []line.Operations {
	i := slices.IndexFunc(all, func(x line.Operations) bool {
		return x.Kind == o.Kind && x.Backend == o.Backend && x.SizeClass == o.SizeClass
	})
	if i < 0 {
		return append(all, o)
	}
	all[i].Count += o.Count
	all[i].Duration += o.Duration
	all[i].Bytes += o.Bytes
	return all
}

// counters returns what the worker has done so far.
func (p *pulse) counters() *line.Counters {
	s := &p.worker.doing.made
	c := &line.Counters{
		Commits: s.commits.Load(), CommitTime: time.Duration(s.nanoseconds.Load()), CommitBytes: s.bytes.Load(),
	}
	for _, o := range p.to.operations() {
		told := line.Operations{Kind: o.Kind, Backend: o.Backend, SizeClass: o.SizeClass, Count: o.Count, Duration: o.Duration, Bytes: o.Bytes}
		c.Operations = addOperations(c.Operations, told)
	}
	if len(c.Operations) > line.MaxOperations { // omit the rare ones
		slices.SortStableFunc(c.Operations, func(x, y line.Operations) int { return cmp.Compare(y.Count, x.Count) })
		c.Operations = c.Operations[:line.MaxOperations]
	}
	return c
}

// waits returns the durations of the operations that have ended since the last beat.
func (p *pulse) waits() (all []line.Wait) {
	place := p.worker.member.Load()
	if place == nil || place.world.Generation != p.generation {
		return nil
	}
	for _, w := range place.group.Waits() {
		all = append(all, line.Wait(w))
	}
	return all
}

// first returns a comparison result: negative if x comes first.
func first(x bool) int {
	if x {
		return -1
	}
	return 1
}
