package cuda

import "context"

// Stream is a queue of work of a device, which is done in order. Work in different streams may run
// concurrently.
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

// Close releases a stream of [Device.NewStream]. Work in it is still completed.
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

// Synchronize blocks until all work that is now in the stream has been done, or ctx has ended. It
// returns an error of that work, unless another call has returned it.
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
func (e *Event) Done() (bool, error) {
	err := e.device.call("cuEventQuery", func(a *api) result { return a.eventQuery(e.handle) })
	if isCode(err, notReady) {
		return false, nil
	}
	return err == nil, err
}

// Synchronize blocks until the event has occurred, or ctx has ended. It releases the event if it
// has occurred.
func (e *Event) Synchronize(ctx context.Context) error {
	if err := e.device.await(ctx, e.handle); err != nil {
		return err
	}
	return e.Close()
}

// Close releases the event, whether it has occurred or not. It must not be used afterwards. Close
// does nothing for a nil event.
func (e *Event) Close() error {
	if e == nil {
		return nil
	}
	return e.device.call("cuEventDestroy_v2", func(a *api) result { return a.eventDestroy(e.handle) })
}
