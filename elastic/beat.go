package elastic

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// beater is a meeting whose driver wants to know what the worker does.
type beater interface {
	meeting
	// beat tells it, once, if that is possible now.
	beat(ctx context.Context, b rendezvous.Beat) error
	// connections is how many connections to other ranks there have been so far.
	connections() uint64
	// stallWarning is how long a worker may wait for others before that is told at once. Zero: as
	// is usual; negative: never.
	stallWarning() time.Duration
}

const (
	beatEvery    = time.Second // pause between two beats, at most
	looksPerBeat = 4
	leastPause   = 5 * time.Millisecond // between two looks
	usualWarning = 5 * time.Second
)

// doing is what the worker does, in one word: a phase, and above it how often there was another. It
// is free of clocks and locks; who looks at it twice and finds it the same knows that nothing has
// changed.
type doing struct {
	word    atomic.Uint64
	entered func(rendezvous.Phase)        // nil: nobody listens
	commits atomic.Uint64                 // number of the last commit in the world that Worker.entering tells; 0: none
	last    atomic.Pointer[atomic.Uint64] // bytes of the job's last checkpoint that are on the disk; nil: it does not write that
}

// enter begins a phase.
func (d *doing) enter(p rendezvous.Phase) {
	for {
		was := d.word.Load()
		if d.word.CompareAndSwap(was, was&^0xff+0x100|uint64(p)) {
			break
		}
	}
	if d.entered != nil {
		d.entered(p)
	}
}

func (d *doing) phase() rendezvous.Phase { return rendezvous.Phase(d.word.Load()) }

// pulse looks at what its worker does, again and again, and tells the driver: about once a second,
// more rarely in a large world, and at once where the worker has begun to wait too long.
type pulse struct {
	worker *Worker
	to     beater

	every, pause time.Duration // between two beats, and between two looks, in a world of few
	warning      time.Duration // 0: never

	last  uint64 // the doing's word, as of the last look
	made  uint64 // connections, likewise
	quiet time.Duration

	generation uint64 // of the world that lanes are of
	lanes      map[uint64]*laneSeen
	told       bool // that the worker waits too long
}

// laneSeen is what the last look found of a lane.
type laneSeen struct {
	collective.Progress
	since time.Duration // ago
	seen  bool          // by the look under way
}

// startPulse tells the driver what the worker does, until the function that it returns is called,
// which waits for that.
func (w *Worker) startPulse() (stop func()) {
	to, ok := w.meeting.(beater)
	if !ok {
		return func() {}
	}
	p := newPulse(w, to)
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

// run beats until ctx ends. While the driver does not answer, a beat delays the next look, and
// nothing else.
func (p *pulse) run(ctx context.Context) {
	spacing := p.spacing()
	ticker := time.NewTicker(spacing * p.pause)
	defer ticker.Stop()
	looked := time.Now()
	var told time.Time
	for {
		now := time.Now()
		if is := p.spacing(); is != spacing {
			spacing = is
			ticker.Reset(spacing * p.pause)
		}
		// A process that was stopped has not waited for the others: they have waited for it.
		waits := p.look(min(now.Sub(looked), 2*spacing*beatEvery))
		looked = now
		long := p.warning > 0 && waits >= p.warning
		if long && !p.told || now.Sub(told) >= spacing*(p.every-p.pause/2) {
			err := p.to.beat(ctx, p.beat())
			if err == nil {
				p.told = long
			}
			if !errors.Is(err, rendezvous.ErrNotConnected) { // otherwise it is tried again at the next look
				told = now
			}
		}
		p.told = p.told && long
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// spacing is that of the beats in the worker's world.
func (p *pulse) spacing() time.Duration {
	size := 1
	if place := p.worker.place.Load(); place != nil {
		size = place.world.Size()
	}
	return time.Duration(rendezvous.BeatSpacing(size))
}

// look finds out what has changed since the last look, which is so long ago, and returns the
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
		if p.made = made; rendezvous.Phase(p.last) == rendezvous.Connecting {
			p.quiet = 0
		}
	}
	generation, found := p.progress()
	if generation != p.generation { // the lanes and operations of each world are numbered from the beginning
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

// progress is how far the worker has come in its world, and the generation of that.
func (p *pulse) progress() (generation uint64, lanes []collective.Progress) {
	generation = p.worker.entering.Load()
	switch phase := rendezvous.Phase(p.last); {
	case phase == rendezvous.Joins:
		return generation, nil // the world has been left
	case phase == rendezvous.Connecting:
		return generation, []collective.Progress{{Waiting: true, What: "connecting"}}
	}
	place := p.worker.place.Load()
	if place == nil {
		return generation, nil
	}
	return place.world.Generation, place.group.Progress()
}

// beat is what the last look has found. Of many lanes those count where the worker has waited
// longest.
func (p *pulse) beat() rendezvous.Beat {
	b := rendezvous.Beat{Generation: p.generation, Phase: rendezvous.Phase(p.last), Quiet: p.quiet}
	// A worker that enters a world sets its commits to 0, then its generation.
	if commits := p.worker.doing.commits.Load(); p.worker.entering.Load() == b.Generation {
		b.Commits = commits
	}
	if last := p.worker.doing.last.Load(); last != nil {
		b.Written = last.Load()
	}
	for id, l := range p.lanes {
		b.Lanes = append(b.Lanes, rendezvous.Lane{ID: id, Operation: l.Operation, Waiting: l.Waiting, For: l.since, What: l.What})
	}
	slices.SortFunc(b.Lanes, func(x, y rendezvous.Lane) int {
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
	b.Lanes = b.Lanes[:min(len(b.Lanes), rendezvous.MaxLanes)]
	return b
}

// first is a comparison of which it is known who comes first.
func first(x bool) int {
	if x {
		return -1
	}
	return 1
}
