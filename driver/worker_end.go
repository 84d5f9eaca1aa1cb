package driver

import (
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// workerEnd posts the end of a worker: when its output is written, or outputGrace after its process
// has ended if that is earlier. The loop's wg must count it until it has posted the end or forget
// has been called.
type workerEnd struct {
	loop    *loop
	process *process
	slot    plan.SlotID
	written chan job.Exit // capacity 1

	mu         sync.Mutex
	ended, all bool // processEnded, outputWritten have been called

	posted, wrote sync.Once // let the loop's wg, and its output, be decremented only once
}

// forget records that nobody waits for the worker any more, because its host may never answer.
func (e *workerEnd) forget() {
	e.posted.Do(e.loop.wg.Done)
	e.wrote.Do(e.loop.output.Done)
}

// processEnded records that the process has ended. Its output may still be being written. It does
// not block.
func (e *workerEnd) processEnded(exit job.Exit) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended || e.all {
		return
	}
	e.ended = true
	go func() { // the worker's count in wg covers this goroutine
		ran := e.ran(exit)
		late := time.NewTimer(outputGrace)
		defer late.Stop()
		select {
		case exit = <-e.written:
		case <-late.C:
			e.process.over.Store(true)
			e.loop.cfg.Log.Debugf("%v has ended; its output is still being written", e.slot)
		}
		e.post(exit, ran)
	}()
}

// outputWritten records that the process has ended and its output is written. It is called once.
func (e *workerEnd) outputWritten(exit job.Exit) {
	e.mu.Lock()
	e.all = true
	ended := e.ended
	e.mu.Unlock()
	if ended {
		e.written <- exit
	} else {
		e.post(exit, e.ran(exit))
	}
}

// ran returns the functions whose tasks the worker was running when it ended.
func (e *workerEnd) ran(exit job.Exit) []string {
	if e.loop.cfg.Tasks == nil || exit.Unkillable || exit.Err != nil {
		return nil
	}
	return e.loop.cfg.Tasks.Ended(e.process.subject.Incarnation, e.process.stopped.Load())
}

func (e *workerEnd) post(exit job.Exit, ran []string) {
	defer e.posted.Do(e.loop.wg.Done)
	e.loop.post(decide.WorkerEnded{ID: e.process.subject.Incarnation, Exit: exit, Ran: ran})
}
