package elastic

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/elastic/fetch"
	"github.com/hvdrun/hvdrun/elastic/image"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// InitOption changes what Init does.
type InitOption struct{ name string }

// Late has the worker enter its first world in Run, and not in Init. The others stop for it only
// then, so what the program does between Init and Run, as loading data and making its model, costs
// them nothing. Where they train already, Run first fetches their newest commit of tensors that are
// large, more than 16 KiB, while they go on; the sync of the new world then sends only what has
// changed since. All ranks of a job may give it. From the process's start to Run there is as much
// time as --start-timeout says (30 s), and a fetch has that anew as long as bytes arrive.
//
// Before Run such a worker has Rank −1, Size 0 and a nil Group; its Host and Slot are known.
var Late = InitOption{"late"}

// stayOut leaves the first world to Run.
func (w *Worker) stayOut(slot plan.SlotID) {
	w.late = true
	w.place.Store(&place{slot: plan.Slot{SlotID: slot, Rank: -1, LocalRank: -1, CrossRank: -1}, unwatch: func() {}})
}

// supplier is a meeting through which workers read each other's commits.
type supplier interface {
	// give has others read what newest returns, from any goroutine; nil: nothing more.
	give(newest func() *fetch.Commit)
	// sources are some workers that may have a commit.
	sources(ctx context.Context) ([]fetch.Source, error)
}

const (
	lookBound    = 5 * time.Second // longest that the driver is asked for sources
	mostSources  = 8               // that one worker asks
	fetchReports = 5 * time.Second // pause between what is said of a fetch under way
	fetchedCount = ^uint64(0)      // of the imageID of what was fetched, which is no save's
	bytesPerMega = 1e6
)

// arrive enters the first world of a late worker, with what it can have of the state before.
func (r *runner) arrive() error {
	if err := r.fetch(); err != nil {
		return err
	}
	if err := r.worker.enter(r.ctx, func() {}, rendezvous.Joining{}); err != nil {
		return err
	}
	r.worker.late = false
	return nil
}

// fetch makes the parts in memory those of the others' newest commit, if there is one. Whatever
// goes wrong, the sync brings all.
func (r *runner) fetch() error {
	s, w := r.state, r.worker
	from, ok := w.meeting.(supplier)
	layout, memory := s.inMemory()
	if !ok || len(memory) == 0 {
		return nil
	}
	w.doing.enter(rendezvous.Fetches)
	look, cancel := context.WithTimeout(r.ctx, lookBound)
	sources, err := from.sources(look)
	cancel()
	if err != nil || len(sources) == 0 {
		return r.ctx.Err() // the join will tell
	}
	began := time.Now()
	said := began
	taken, err := fetch.Take(r.ctx, sources, layout, memory, fetch.Options{
		Progress: func(have, of int64) {
			if now := time.Now(); now.Sub(said) >= fetchReports {
				said = now
				w.log.Infof("the state is being fetched: %.0f MB of %.0f", float64(have)/bytesPerMega, float64(of)/bytesPerMega)
				w.sayFetching()
			}
		},
		Rejected: func(_ int, err error) { w.log.Debugf("a worker gives nothing of the state: %v", err) },
	})
	if err != nil {
		w.log.Infof("the state could not be fetched while the others train, so they send it: %v", err)
		if err := s.Restore(); err != nil {
			return err
		}
		return r.ctx.Err()
	}
	if err := s.save(s.commits); err != nil {
		return err
	}
	s.adopt()
	w.log.Debugf("commit %d is here: %.1f MB in %d rounds, %v", taken.Number, float64(taken.Bytes)/bytesPerMega, taken.Rounds, time.Since(began))
	return nil
}

// sayFetching tells the driver that it shall be patient; the fetch does not wait for that.
func (w *Worker) sayFetching() {
	w.reports.Go(func() { _ = w.meeting.report(w.reportCtx, rendezvous.Fetching, 0, 0) })
}

// adopt takes what has just been saved for another's save: a sync compares it with the root's. What
// that and the first commit will ask of it is computed now, when nobody waits.
func (s *State) adopt() {
	s.mark, s.clean = imageID{Count: fetchedCount}, true
	for _, p := range s.inMemoryOf(s.saved.Last()) {
		p.Prepare()
	}
}

// inMemory returns the parts in memory, and what they are.
func (s *State) inMemory() (layout string, memory [][]byte) {
	var text strings.Builder
	for i, o := range s.own {
		if m := asInMemory(o); m != nil {
			fmt.Fprintf(&text, "%d %s\n", i, m.layout())
			memory = append(memory, m.memory()...)
		}
	}
	return text.String(), memory
}

// inMemoryOf returns an image's pieces of the parts in memory, in their order.
func (s *State) inMemoryOf(m *image.Image) (pieces []*image.Piece) {
	for i, o := range s.own {
		if p := asInMemory(o); p != nil {
			for j := range p.memory() {
				pieces = append(pieces, &m.Pieces()[s.first[i]+j])
			}
		}
	}
	return pieces
}

// supply lets others fetch this state's commits.
func (s *State) supply() {
	to, ok := s.worker.meeting.(supplier)
	layout, memory := s.inMemory()
	if !ok || s.supplies || len(memory) == 0 {
		return
	}
	s.supplies = true
	to.give(func() *fetch.Commit {
		held := s.saved.Hold()
		if held == nil {
			return nil
		}
		return &fetch.Commit{Number: held.Number(), Layout: layout, Pieces: s.inMemoryOf(held), Release: held.Release}
	})
}

// withdraw ends that.
func (s *State) withdraw() {
	if to, ok := s.worker.meeting.(supplier); ok && s.supplies {
		to.give(nil)
		s.supplies = false
	}
}

func (d *driven) give(newest func() *fetch.Commit) {
	if newest == nil {
		d.supply.Store(nil)
		return
	}
	d.supply.Store(&newest)
}

// visited answers another worker.
func (d *driven) visited(conn net.Conn) {
	err := fetch.Serve(conn, func() *fetch.Commit {
		if newest := d.supply.Load(); newest != nil {
			return (*newest)()
		}
		return nil
	})
	if err != nil {
		logrus.Debugf("elastic: a worker that fetches the state: %v", err)
	}
}

func (d *driven) sources(ctx context.Context) ([]fetch.Source, error) {
	world, err := d.client.Look(ctx)
	if err != nil {
		return nil, err
	}
	addrs := world.DataAddrs()
	var sources []fetch.Source
	for _, rank := range rand.Perm(len(addrs)) {
		if len(sources) < mostSources {
			sources = append(sources, func(ctx context.Context) (net.Conn, error) { return d.endpoint.Visit(ctx, addrs[rank]) })
		}
	}
	return sources, nil
}
