package elastic

import (
	"github.com/hvdrun/hvdrun/elastic/internal/fakeproc"
	"github.com/hvdrun/hvdrun/internal/line"
)

// kill closes everything of this worker that other processes can see, without messages and without
// blocking. The goroutines for which close waits then end.
func (d *driven) kill() {
	d.endpoint.Kill()
	d.Client.Kill()
}

// appear makes it possible to kill a worker that is a goroutine like a process.
func (w *Worker) appear() {
	if w.fake == nil {
		return
	}
	w.log = w.fake.Log
	w.doing.entered = func(p line.Phase) { w.reach(p, false) }
	w.fake.Enter(func() {
		w.reports.stop()
		if m, ok := w.meeting.(*driven); ok {
			m.kill()
		}
	}, func() { w.use.closing.Do(func() { w.use.closeErr = w.close() }) })
}

// reach reports the worker's progress to its fakeproc.Process, if it has one. If that process was
// killed, reach does not return.
func (w *Worker) reach(p line.Phase, committed bool) {
	if w.fake == nil {
		return
	}
	m := fakeproc.Moment{Phase: p, Commit: w.run.commit, Committed: committed, Rank: -1}
	if p := w.member.Load(); p != nil && p.group != nil {
		m.Rank, m.Generation = p.slot.Rank, p.world.Generation
	}
	w.fake.Reach(m)
}
