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

// sameRequest is for how long after a SIGTERM others stand for the same request: whoever ends all
// processes of a job at once, as systemd does, has them come here from several sides.
const sameRequest = time.Second

// keptAfter is how long after the driver has heard of a request a commit tells that the worker is
// to stay: mostly it goes with the next one.
const keptAfter = sameRequest / 2

// heed takes SIGTERM for a request to leave at a step boundary, which it passes on to the driver,
// once. Those that come later than sameRequest do what they did before, unless the worker is to
// stay nevertheless, because it alone has the state: then the next one is a request like the first,
// as when the whole job is stopped. Signals that the program has asked for go on to reach it too.
type heed struct {
	worker *Worker
	caught chan os.Signal
	done   chan struct{}
	gone   atomic.Bool     // the worker was sent away: SIGTERM may be on its way still; set before done is closed
	ctx    context.Context // of the report
	cancel context.CancelFunc
	wg     sync.WaitGroup
	first  atomic.Pointer[time.Time] // when the first request came; nil: none
	asked  atomic.Pointer[time.Time] // the latest one
	told   atomic.Pointer[time.Time] // when the driver had heard of that; nil: it has not
	kept   chan struct{}             // one token: the worker is to stay nevertheless
}

// heed begins to. It returns nil where nobody could be told, or the program ignores SIGTERM.
func (w *Worker) heed() *heed {
	if !w.driven || w.life == nil && signal.Ignored(syscall.SIGTERM) {
		return nil
	}
	h := newHeed(w)
	h.start()
	h.wg.Go(h.watch)
	return h
}

func newHeed(w *Worker) *heed {
	h := &heed{worker: w, caught: make(chan os.Signal, 1), done: make(chan struct{}), kept: make(chan struct{}, 1)}
	h.ctx, h.cancel = context.WithCancel(context.Background())
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

// staysAfter is how long a worker that was asked to leave has before it counts as one that stays:
// mostly it goes with the next commit.
const staysAfter = 2 * time.Second

// stays tells whether the worker was asked to leave and has not left for a while. A nil heed was
// not asked.
func (h *heed) stays() bool { return h != nil && passed(&h.first, staysAfter) }

// aloneAfter is how long a driver without a connection has to come back before a worker that was
// asked to leave counts as one that nobody can send away.
const aloneAfter = time.Second

// alone tells whether the worker was asked to leave and has no driver that could send it away. A
// nil heed was not asked.
func (h *heed) alone() bool {
	return h != nil && passed(&h.asked, aloneAfter) && h.told.Load() == nil && !h.worker.meeting.reachable()
}

// committed notes a commit after which the worker stays in its world. A nil heed was not asked.
func (h *heed) committed() {
	if h == nil || !passed(&h.told, keptAfter) {
		return
	}
	h.asked.Store(nil)
	h.told.Store(nil)
	select {
	case h.kept <- struct{}{}:
	default:
	}
}

// passed tells whether it is so long ago.
func passed(since *atomic.Pointer[time.Time], d time.Duration) bool {
	t := since.Load()
	return t != nil && time.Since(*t) >= d
}

// leave is end for a worker that was sent away.
func (h *heed) leave() {
	if h == nil {
		return
	}
	h.gone.Store(true)
	h.end()
}

// start takes signals.
func (h *heed) start() {
	if l := h.worker.life; l != nil {
		l.Notify(h.caught)
	} else {
		signal.Notify(h.caught, syscall.SIGTERM)
	}
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
	for h.request() {
		select {
		case <-h.kept:
			continue
		default:
		}
		h.stop()
		select {
		case <-h.kept:
		case <-h.done:
			return
		}
		h.start()
	}
}

// request waits for a request to leave and passes it on. It returns sameRequest later, or reports
// false when the heed ends.
func (h *heed) request() bool {
	select {
	case <-h.caught:
	case <-h.done:
		return false
	}
	now := time.Now()
	h.first.CompareAndSwap(nil, &now)
	h.asked.Store(&now)
	h.wg.Go(h.tell)
	same := time.NewTimer(sameRequest)
	defer same.Stop()
	for {
		select {
		case <-h.caught:
		case <-same.C:
			return true
		case <-h.done:
			return false
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
	if err == nil {
		now := time.Now()
		h.told.Store(&now)
	} else if h.ctx.Err() == nil {
		w.log.Warnf("this worker was asked to leave, and the driver could not be told: %v", err)
	}
}
