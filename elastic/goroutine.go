package elastic

import (
	"github.com/hvdrun/hvdrun/elastic/internal/life"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// killable is a meeting that can end as by the death of its process: without a word, and without
// blocking.
type killable interface{ kill() }

// kill ends all that others see of this worker. What close waits for comes to its end.
func (d *driven) kill() {
	d.endpoint.Kill()
	d.stopServing()
	_ = d.client.Close() // calls under way fail, and nobody sees why
}

// appear lets a worker that is a goroutine live and die as a process would.
func (w *Worker) appear() {
	if w.life == nil {
		return
	}
	w.log = w.life.Log
	w.doing.entered = func(p rendezvous.Phase) { w.reach(p, false) }
	w.life.Enter(func() {
		w.stopReports()
		if m, ok := w.meeting.(killable); ok {
			m.kill()
		}
	}, func() { w.closing.Do(func() { w.closeErr = w.close() }) })
}

// reach tells the worker's life, if it has one, where it is. It does not return where the life is
// over.
func (w *Worker) reach(p rendezvous.Phase, committed bool) {
	if w.life == nil {
		return
	}
	m := life.Moment{Phase: p, Commit: w.commit, Committed: committed, Rank: -1}
	if p := w.place.Load(); p != nil {
		m.Rank, m.Generation = p.slot.Rank, p.world.Generation
	}
	w.life.Reach(m)
}
