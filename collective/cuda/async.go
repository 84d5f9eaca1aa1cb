package cuda

import (
	"context"
	"sync"

	"github.com/hvdrun/hvdrun/collective"
)

// Handle is an asynchronous operation under way.
type Handle struct {
	done chan struct{}
	err  error
}

// Wait blocks until the operation has ended and returns its error. Until then the slice belongs to the operation; after an error it
// is undefined.
func (h *Handle) Wait() error {
	<-h.done
	return h.err
}

// Done reports whether Wait would return at once.
func (h *Handle) Done() bool {
	select {
	case <-h.done:
		return true
	default:
		return false
	}
}

// queue does the asynchronous operations of a device and a group, in the order in which they came.
type queue struct {
	lane *collective.Group // of the same ranks, so that other operations of the group go on beside it

	mu      sync.Mutex
	jobs    []func()
	running bool
}

// AllReduceAsync is [AllReduce] in the background, beside whatever else the group does. Every rank calls it equally often and in the same
// order for a group; the first call for a group waits until all ranks have come to it. The operation begins when those before it have
// ended and what is in the stream After at the time of the call has been done. Close of the device waits for it.
func AllReduceAsync[T collective.Element](ctx context.Context, g *collective.Group, s *Slice[T], op collective.Op, o Options) *Handle {
	h := &Handle{done: make(chan struct{})}
	if h.err = refuse(g, op); h.err != nil {
		close(h.done)
		return h
	}
	var q *queue
	var ready *Event
	h.err = s.device.together(g, func() (err error) {
		if err = s.device.begin(); err != nil {
			return err
		}
		s.device.mu.Lock()
		closing := s.device.closing
		s.device.mu.Unlock()
		if closing {
			s.device.end()
			return ErrClosed
		}
		if q, err = s.device.queue(ctx, g); err == nil {
			ready, err = o.event()
		}
		if err != nil {
			s.device.end()
		}
		return err
	})
	if h.err != nil {
		close(h.done)
		return h
	}
	q.add(s.device, func() {
		h.err = s.device.together(q.lane, func() error { return allReduce(ctx, q.lane, s, op, ready) })
		ready.Close()
		close(h.done)
		s.device.end()
	})
	return h
}

// queue returns the one of a group, or a new one.
func (d *Device) queue(ctx context.Context, g *collective.Group) (*queue, error) {
	d.mu.Lock()
	q := d.queues[g]
	d.mu.Unlock()
	if q != nil {
		return q, nil
	}
	ranks := make([]int, g.Size())
	for i := range ranks {
		ranks[i] = i
	}
	lane, err := g.Subset(ctx, ranks)
	if err != nil {
		return nil, err
	}
	q = &queue{lane: lane}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues[g] = q
	return q, nil
}

// add puts a job behind the others. While there are any, a goroutine does them.
func (q *queue) add(d *Device, job func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.jobs = append(q.jobs, job)
	if !q.running {
		q.running = true
		d.spawn(q.run)
	}
}

func (q *queue) run() {
	for {
		q.mu.Lock()
		if len(q.jobs) == 0 {
			q.running = false
			q.mu.Unlock()
			return
		}
		job := q.jobs[0]
		q.jobs = q.jobs[1:]
		q.mu.Unlock()
		job()
	}
}
