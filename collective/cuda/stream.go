package cuda

import (
	"context"
	"errors"
)

// Stream is a queue of work for a device, which does the work in order. Work in different streams
// may run concurrently.
type Stream struct {
	device *Device
	handle uintptr
	owned  bool
}

// NewStream returns a new stream, which [Stream.Close] releases. It is not synchronized with stream
// 0 of other libraries.
func (d *Device) NewStream() (*Stream, error) {
	s := &Stream{device: d, owned: true}
	if err := d.call("cuStreamCreate", func(a *api) result { return a.streamCreate(&s.handle, streamNonBlocking) }); err != nil {
		return nil, err
	}
	return s, nil
}

// WrapStream returns a Stream for a CUstream that belongs to other code; 0 is the default stream.
// The owner must not destroy it while the Stream is used.
func (d *Device) WrapStream(handle uintptr) *Stream { return &Stream{device: d, handle: handle} }

// Handle returns the CUstream.
func (s *Stream) Handle() uintptr { return s.handle }

// Close releases a stream of [Device.NewStream], and does nothing for one of [Device.WrapStream].
// It does not block: the device still completes the work in the stream.
func (s *Stream) Close() error {
	if !s.owned {
		return nil
	}
	return s.device.call("cuStreamDestroy_v2", func(a *api) result { return a.streamDestroy(s.handle) })
}

// Wait makes work that is added to the stream from now on wait for the event. It does not block.
func (s *Stream) Wait(e *Event) error {
	return s.device.call("cuStreamWaitEvent", func(a *api) result { return a.streamWaitEvent(s.handle, e.handle, 0) })
}

// Synchronize blocks until the device has done all work that is in the stream at the time of the
// call, or until ctx ends. It returns the error of that work, or of ctx.
func (s *Stream) Synchronize(ctx context.Context) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	return e.Synchronize(ctx)
}

// Record adds a new event to the stream. [Event.Synchronize] or [Event.Close] releases it.
func (s *Stream) Record() (*Event, error) {
	e := &Event{device: s.device}
	err := s.device.do(func() error {
		a := s.device.api
		if err := a.check("cuEventCreate", a.eventCreate(&e.handle, eventDisableTiming)); err != nil {
			return err
		}
		err := a.check("cuEventRecord", a.eventRecord(e.handle, s.handle))
		if err != nil {
			a.eventDestroy(e.handle)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// Event is a point in a stream: it occurs when all work before it has been done.
type Event struct {
	device *Device
	handle uintptr
}

// Done reports whether the event has occurred.
func (e *Event) Done() (bool, error) { return e.device.occurred(e.handle) }

// Synchronize blocks until the event has occurred, and releases it. If ctx ends first, it returns
// the error of ctx, and the caller still closes the event.
func (e *Event) Synchronize(ctx context.Context) error {
	if err := e.device.await(ctx, e.handle); err != nil {
		return err
	}
	return e.Close()
}

// Close releases the event, whether it has occurred or not. It must not be used afterwards. A nil
// Event is ignored.
func (e *Event) Close() error {
	if e == nil {
		return nil
	}
	return e.device.call("cuEventDestroy_v2", func(a *api) result { return a.eventDestroy(e.handle) })
}

// queue is a stream of a backend, and an event that is recorded in it.
type queue struct{ stream, event uintptr }

// openQueue makes the stream and the event. Like closeQueue, it is called within [Device.do].
func (q *queue) openQueue(a *api) error {
	return errors.Join(a.check("cuStreamCreate", a.streamCreate(&q.stream, streamNonBlocking)),
		a.check("cuEventCreate", a.eventCreate(&q.event, eventDisableTiming)))
}

// closeQueue releases what openQueue has made.
func (q *queue) closeQueue(a *api) error {
	var errs []error
	if q.event != 0 {
		errs = append(errs, a.check("cuEventDestroy_v2", a.eventDestroy(q.event)))
	}
	if q.stream != 0 {
		errs = append(errs, a.check("cuStreamDestroy_v2", a.streamDestroy(q.stream)))
	}
	q.event, q.stream = 0, 0
	return errors.Join(errs...)
}
