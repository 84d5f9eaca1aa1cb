package elastic

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/rendezvous"
)

// sameRequest is for how long after a SIGTERM others stand for the same request: whoever ends all processes of a job at
// once, as systemd does, has them come here from several sides.
const sameRequest = time.Second

// heed takes SIGTERM for a request to leave at a step boundary, which it passes on to the driver, once. Those that come
// later than sameRequest do what they did before. Signals that the program has asked for go on to reach it too.
type heed struct {
	worker *Worker
	caught chan os.Signal
	done   chan struct{}
	gone   atomic.Bool     // the worker was sent away: SIGTERM may be on its way still; set before done is closed
	ctx    context.Context // of the report
	cancel context.CancelFunc
	wg     sync.WaitGroup
	asked  atomic.Pointer[time.Time] // when; nil: not yet
	told   atomic.Bool               // the driver has heard of it
}

// heed begins to. It returns nil where nobody could be told, or the program ignores SIGTERM.
func (w *Worker) heed() *heed {
	if !w.driven || w.life == nil && signal.Ignored(syscall.SIGTERM) {
		return nil
	}
	h := &heed{worker: w, caught: make(chan os.Signal, 1), done: make(chan struct{})}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	if w.life != nil {
		w.life.Notify(h.caught)
	} else {
		signal.Notify(h.caught, syscall.SIGTERM)
	}
	h.wg.Go(h.watch)
	return h
}

// end lets SIGTERM do what it did before. A nil heed has ended.
func (h *heed) end() {
	if h == nil {
		return
	}
	h.cancel()
	close(h.done)
	h.wg.Wait()
}

// staysAfter is how long a worker that was asked to leave has before it counts as one that stays: mostly it goes with the next commit.
const staysAfter = 2 * time.Second

// stays tells whether the worker was asked to leave and has not left for a while. A nil heed was not asked.
func (h *heed) stays() bool { return h.askedFor(staysAfter) }

// aloneAfter is how long a driver without a connection has to come back before a worker that was
// asked to leave counts as one that nobody can send away.
const aloneAfter = time.Second

// alone tells whether the worker was asked to leave and has no driver that could send it away. A
// nil heed was not asked.
func (h *heed) alone() bool {
	return h.askedFor(aloneAfter) && !h.told.Load() && !h.worker.meeting.reachable()
}

func (h *heed) askedFor(d time.Duration) bool {
	if h == nil {
		return false
	}
	asked := h.asked.Load()
	return asked != nil && time.Since(*asked) >= d
}

// leave is end for a worker that was sent away.
func (h *heed) leave() {
	if h == nil {
		return
	}
	h.gone.Store(true)
	h.end()
}

// stop takes no more signals.
func (h *heed) stop() {
	if l := h.worker.life; l != nil {
		l.Stop(h.caught)
	} else {
		signal.Stop(h.caught)
	}
}

func (h *heed) watch() {
	defer func() {
		if h.gone.Load() {
			time.AfterFunc(sameRequest, h.stop)
		} else {
			h.stop()
		}
	}()
	select {
	case <-h.caught:
	case <-h.done:
		return
	}
	now := time.Now()
	h.asked.Store(&now)
	h.wg.Go(h.tell)
	same := time.NewTimer(sameRequest)
	defer same.Stop()
	for {
		select {
		case <-h.caught:
		case <-same.C:
			return
		case <-h.done:
			return
		}
	}
}

// tell passes the request on, unless the driver has sent this worker away itself.
func (h *heed) tell() {
	w := h.worker
	if w.isOver() {
		return
	}
	err := w.meeting.report(h.ctx, rendezvous.Draining, w.Generation(), 0)
	h.told.Store(err == nil)
	if err != nil && h.ctx.Err() == nil {
		w.log.Warnf("this worker was asked to leave, and the driver could not be told: %v", err)
	}
}
