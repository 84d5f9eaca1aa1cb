package cuda

import "context"

// Stream is a queue of work of a device, done in order. Work in different streams is done at the
// same time.
type Stream struct {
	device *Device
	handle uintptr
	owned  bool
}

// NewStream makes a stream, which [Stream.Close] gives back. It does not wait for the stream 0 of
// other libraries, nor they for it.
func (d *Device) NewStream() (*Stream, error) {
	s := &Stream{device: d, owned: true}
	if err := d.call("cuStreamCreate", func(a *api) result { return a.streamCreate(&s.handle, streamNonBlocking) }); err != nil {
		return nil, err
	}
	return s, nil
}

// WrapStream makes a Stream of a CUstream that belongs to other code, 0 being the default stream.
// Its owner keeps it as long as the Stream is used.
func (d *Device) WrapStream(handle uintptr) *Stream { return &Stream{device: d, handle: handle} }

// Handle is the CUstream.
func (s *Stream) Handle() uintptr { return s.handle }

// Close gives a stream of [Device.NewStream] back; what is in it is still done.
func (s *Stream) Close() error {
	if !s.owned {
		return nil
	}
	return s.device.call("cuStreamDestroy_v2", func(a *api) result { return a.streamDestroy(s.handle) })
}

// Wait delays what is put into the stream from now on until the event has occurred. It does not
// block.
func (s *Stream) Wait(e *Event) error {
	return s.device.call("cuStreamWaitEvent", func(a *api) result { return a.streamWaitEvent(s.handle, e.handle, 0) })
}

// Synchronize blocks until all that is in the stream now has been done, or ctx has ended. An error
// of that work is returned here, or by any later call.
func (s *Stream) Synchronize(ctx context.Context) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	return e.Synchronize(ctx)
}

// Record puts a new event into the stream. [Event.Synchronize] gives it back, or else
// [Event.Close].
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

// Synchronize blocks until the event has occurred, or ctx has ended. In the first case it is given
// back.
func (e *Event) Synchronize(ctx context.Context) error {
	if err := e.device.await(ctx, e.handle); err != nil {
		return err
	}
	return e.Close()
}

// Close gives the event back, whether it has occurred or not. It must not be used afterwards. It
// does nothing for a nil event.
func (e *Event) Close() error {
	if e == nil {
		return nil
	}
	return e.device.call("cuEventDestroy_v2", func(a *api) result { return a.eventDestroy(e.handle) })
}
