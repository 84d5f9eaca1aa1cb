package elastic

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/wake"
)

// sameRequest is the time after a SIGTERM in which further ones count as the same request: systemd
// and others signal all processes of a job at once, and hvdrun forwards the signal too.
const sameRequest = time.Second

// keptAfter is the time after the driver's acknowledgement of a request from which on a commit
// shows that the worker stays. Normally it leaves at the next commit.
const keptAfter = sameRequest / 2

// termHandler treats SIGTERM as a request to leave at a step boundary, and reports it to the driver
// once. A SIGTERM later than sameRequest has its previous effect. If the worker stays nevertheless,
// because no other has the state, the next SIGTERM is a request again, so that the whole job can be
// stopped. Signals still reach the program's own channels.
type termHandler struct {
	worker       *Worker
	caught       chan os.Signal
	done         chan struct{}
	dismissed    atomic.Bool     // the worker was dismissed and SIGTERM can still arrive; set before done is closed
	ctx          context.Context // of reports
	cancel       context.CancelFunc
	wg           sync.WaitGroup
	first        atomic.Pointer[time.Time] // time of the first request; nil: none
	latest       atomic.Pointer[time.Time] // time of the latest request
	acknowledged atomic.Pointer[time.Time] // time when the driver acknowledged it; nil: not yet
	stay         wake.Flag                 // the worker stays
}

// handleTerm starts handling SIGTERM. It returns nil without a driver to report to, and if the
// process ignores SIGTERM.
func (w *Worker) handleTerm() *termHandler {
	if !w.driven || w.fake == nil && signal.Ignored(syscall.SIGTERM) {
		return nil
	}
	h := newTermHandler(w)
	h.start()
	h.wg.Go(h.watch)
	return h
}

func newTermHandler(w *Worker) *termHandler {
	h := &termHandler{worker: w, caught: make(chan os.Signal, 1), done: make(chan struct{}), stay: wake.New()}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// end restores the previous effect of SIGTERM. h may be nil.
func (h *termHandler) end() {
	if h == nil {
		return
	}
	h.cancel()
	close(h.done)
	h.wg.Wait()
}

// staysAfter is the time after a request from which on the worker counts as staying. Normally it
// leaves at the next commit.
const staysAfter = 2 * time.Second

// stays reports whether the worker was asked to leave but has not left for staysAfter. h may be
// nil.
func (h *termHandler) stays() bool { return h != nil && passed(&h.first, staysAfter) }

// aloneAfter is the time that a disconnected driver has to reconnect before a worker that was asked
// to leave counts as having no driver.
const aloneAfter = time.Second

// alone reports whether the worker was asked to leave and the driver is unreachable. h may be nil.
func (h *termHandler) alone(ctx context.Context) bool {
	return h != nil && passed(&h.latest, aloneAfter) && h.acknowledged.Load() == nil && !h.worker.meeting.Connected(ctx)
}

// committed records a commit after which the worker stays in its world. h may be nil.
func (h *termHandler) committed() {
	if h == nil || !passed(&h.acknowledged, keptAfter) {
		return
	}
	h.latest.Store(nil)
	h.acknowledged.Store(nil)
	h.stay.Set()
}

// passed reports whether the time in since, if there is one, is at least d ago.
func passed(since *atomic.Pointer[time.Time], d time.Duration) bool {
	t := since.Load()
	return t != nil && time.Since(*t) >= d
}

// leave is like end, for a dismissed worker. h may be nil.
func (h *termHandler) leave() {
	if h == nil {
		return
	}
	h.dismissed.Store(true)
	h.end()
}

func (h *termHandler) start() {
	if l := h.worker.fake; l != nil {
		l.Notify(h.caught)
	} else {
		signal.Notify(h.caught, syscall.SIGTERM)
	}
}

func (h *termHandler) stop() {
	if l := h.worker.fake; l != nil {
		l.Stop(h.caught)
	} else {
		signal.Stop(h.caught)
	}
}

func (h *termHandler) watch() {
	defer func() {
		if h.dismissed.Load() {
			time.AfterFunc(sameRequest, h.stop)
		} else {
			h.stop()
		}
	}()
	for h.request() {
		select {
		case <-h.stay:
			continue
		default:
		}
		h.stop()
		select {
		case <-h.stay:
		case <-h.done:
			return
		}
		h.start()
	}
}

// request waits for a request to leave and reports it. It returns true after sameRequest, or false
// when the handler ends.
func (h *termHandler) request() bool {
	select {
	case <-h.caught:
	case <-h.done:
		return false
	}
	now := time.Now()
	h.first.CompareAndSwap(nil, &now)
	h.latest.Store(&now)
	h.wg.Go(h.report)
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

// report reports the request to the driver, unless the driver has already dismissed this worker.
func (h *termHandler) report() {
	w := h.worker
	if w.use.over.Load() {
		return
	}
	err := w.meeting.Report(h.ctx, line.Draining, w.Generation(), 0)
	for err == nil && !w.meeting.Connected(h.ctx) { // the launcher keeps it for the next driver
		err = retry.Pause(h.ctx, aloneAfter/10)
	}
	if err == nil {
		now := time.Now()
		h.acknowledged.Store(&now)
	} else if h.ctx.Err() == nil {
		w.log.Warnf("this worker was asked to leave, but reporting it to the driver failed: %v", err)
	}
}
