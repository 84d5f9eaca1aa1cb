package proxy

import (
	"errors"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
)

const (
	beatEvery  = time.Second
	leastPause = beatEvery / 10
)

// phases are the words for them.
var phases = map[string]rendezvous.Phase{
	"joining": rendezvous.Joins, "connecting": rendezvous.Connecting, "outside": rendezvous.Outside,
	"syncing": rendezvous.Syncing, "training": rendezvous.Training, "saving": rendezvous.Saving,
}

// hearBeat notes where the program is.
func (p *proxy) hearBeat(r request) {
	if _, is := phases[r.Phase]; !is {
		p.complain("a beat with the unknown phase " + r.Phase)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.joining {
		p.setBeat(r)
	}
}

// hearFigures notes the numbers that the program reports.
func (p *proxy) hearFigures(r request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(r.Figures)) {
		f := rendezvous.Figure{Name: name, Value: math.NaN()}
		if value := r.Figures[name]; value != nil {
			f.Value = *value
		}
		var err error
		if p.state.figures, err = rendezvous.SetFigure(p.state.figures, f); err != nil {
			p.complain("figures: " + err.Error())
			return
		}
	}
}

// setBeat notes where the program is; the lock is held.
func (p *proxy) setBeat(r request) {
	was := p.state.beat
	entered := was.Phase != r.Phase
	if entered || was.Written != r.Written || (was.Operation == nil) != (r.Operation == nil) || r.Operation != nil && *was.Operation != *r.Operation {
		p.changed = time.Now()
	}
	p.state.beat = r
	if entered {
		p.trace.Enter(phases[r.Phase], time.Now())
		select {
		case p.news <- struct{}{}:
		default: // the pulse is about to look
		}
	}
}

// pulse tells the driver where the program is, about once a second, and when it enters a phase.
func (p *proxy) pulse() {
	every := beatEvery
	if w := p.env.StallWarning; w > 0 {
		every = min(every, w/2)
	}
	timer := time.NewTimer(every)
	defer timer.Stop()
	var last time.Time
	for {
		select {
		case <-timer.C:
		case <-p.news:
			if pause := leastPause - time.Since(last); pause > 0 {
				timer.Reset(pause)
				continue
			}
		case <-p.ctx.Done():
			return
		}
		last = time.Now()
		if stopped(p.pid) {
			timer.Reset(every)
			continue
		}
		b, size := p.nextBeat(time.Now())
		next := every * time.Duration(rendezvous.BeatSpacing(size))
		switch err := p.member.Beat(p.ctx, b); {
		case err == nil && b.Entered != nil:
			p.trace.Sent()
		case errors.Is(err, rendezvous.ErrNotConnected):
			next = every / 4
		}
		timer.Reset(next)
	}
}

// stopped returns whether a process was stopped by a signal: the driver is to notice its silence,
// as it does with a worker that sends its heartbeats itself.
func stopped(pid int) bool {
	_, state, err := proc.Born(pid)
	return err == nil && (state == 'T' || state == 't')
}

// nextBeat returns what to tell, and the size of the world.
func (p *proxy) nextBeat(now time.Time) (rendezvous.Beat, int) {
	var usage *proc.Usage
	if now.Sub(p.usedAt) >= beatEvery/2 { // to look takes a millisecond, which the beats of a reset do not have
		usage, p.usedAt = new(p.usage(p.pid)), now
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.state.beat
	b := rendezvous.Beat{Generation: p.world.Generation, Phase: phases[was.Phase], Quiet: now.Sub(p.changed)}
	if b.Phase == 0 {
		b.Phase = rendezvous.Outside // it has said hello alone
	}
	if b.Phase != rendezvous.Joins {
		b.Commits = was.Commits
	}
	if b.Phase == rendezvous.Saving {
		b.Written = was.Written
	}
	if o := was.Operation; o != nil && b.Phase != rendezvous.Joins {
		b.Lanes = []rendezvous.Lane{{Operation: o.Number, Waiting: o.Waiting, For: b.Quiet, What: o.What}}
	}
	b.Entered, b.Figures, b.Usage = p.trace.Told(now), slices.Clone(p.state.figures), usage
	return b, max(1, p.world.Size())
}
