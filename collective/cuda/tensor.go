package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/collective"
)

// TensorOptions are the options of a [Part]. The zero value is for slices that no stream writes to
// while their state is committed, saved, restored or synchronised.
type TensorOptions struct {
	// Stream is the stream that writes to the slice. Operations on the part are ordered with it:
	// they run after the work that is in the stream, and before work that is added later. A save
	// then returns at once.
	Stream *Stream
	// NoSnapshot avoids the device memory for snapshots: a save copies to the host before it
	// returns.
	NoSnapshot bool
}

// Part is a slice on a device as a part of a training state: it is an elastic.Part and an
// elastic.Deferred.
type Part[T collective.Element] struct {
	name    string
	live    *Slice[T]
	options TensorOptions

	image []byte // of the last complete save; immutable
	saved bool
	under *saving // a later save whose end settle has not seen yet, or nil
	bank  uint64  // device memory for snapshots, or 0
	fresh bool    // the bank has the same content as image
}

// saving is a copy to the host in the background.
type saving struct {
	done  chan struct{}
	image []byte
	err   error
	told  atomic.Bool // Pending has returned err
}

// Tensor returns a part whose live value is the slice live. A save takes a snapshot on the device
// and returns. The snapshot is copied to the host in the background, through pinned memory, into a
// new buffer if the content has changed. Until the copy is complete, the previous save remains
// valid, and the next save, Image and Restore wait. If the copy fails, the first of these, or
// Pending, returns the error. The snapshot needs as much device memory as the slice, which
// [Part.Free] releases; without that memory, the save copies to the host before it returns. A
// restore copies back from the snapshot or, without one, from the host; a sync broadcasts from
// device to device. The slice's length must be the same on every rank. All methods but Save block
// until they are done.
func Tensor[T collective.Element](name string, live *Slice[T]) *Part[T] {
	return TensorWith(name, live, TensorOptions{})
}

// TensorWith is like Tensor, with options.
func TensorWith[T collective.Element](name string, live *Slice[T], o TensorOptions) *Part[T] {
	return &Part[T]{name: name, live: live, options: o}
}

var errNothingSaved = errors.New("nothing has been saved yet")

func (p *Part[T]) wrong(err error) error {
	if err != nil {
		err = fmt.Errorf("cuda: tensor %q: %w", p.name, err)
	}
	return err
}

// settle waits for the save in progress, if there is one, which becomes the last save. If it
// failed, and its error was not returned before, settle returns that.
func (p *Part[T]) settle() error {
	u := p.under
	if u == nil {
		return nil
	}
	<-u.done
	p.under = nil
	if u.err == nil {
		p.image, p.saved, p.fresh = u.image, true, true
	} else if !u.told.Load() {
		return p.wrong(fmt.Errorf("the last save failed: %w", u.err))
	}
	return nil
}

// Save saves a copy of the live value. If it fails, now or in the background, the previous copy
// remains.
func (p *Part[T]) Save() error {
	if err := p.settle(); err != nil {
		return err
	}
	d := p.live.device
	if p.live.n == 0 {
		p.image, p.saved = nil, true
		return nil
	}
	if !p.options.NoSnapshot && p.bank == 0 {
		var err error
		if p.bank, err = d.takeBank(p.live.bytes()); err != nil && !errors.Is(err, ErrOutOfMemory) {
			return p.wrong(err)
		}
	}
	if p.options.NoSnapshot || p.bank == 0 {
		return p.wrong(p.saveNow())
	}
	p.fresh = false
	u := &saving{done: make(chan struct{})}
	if err := p.snapshot(u); err != nil {
		return p.wrong(err)
	}
	p.under = u
	return nil
}

// saveNow saves the live value without a snapshot. It blocks until the value is on the host.
func (p *Part[T]) saveNow() error {
	return p.inTurn(func(ctx context.Context, s *staging) error {
		image, err := p.copyOut(ctx, s, p.live.address)
		if err == nil {
			p.image, p.saved, p.fresh = image, true, false
		}
		return err
	})
}

// snapshot copies the live value to the bank, and starts to copy the bank to the host.
func (p *Part[T]) snapshot(u *saving) error {
	d := p.live.device
	if err := d.begin(); err != nil {
		return err
	}
	defer d.end()
	s, err := d.staging()
	if err != nil {
		return err
	}
	if err = p.after(s); err == nil {
		err = d.do(func() error {
			if err := d.api.check("cuMemcpyDtoDAsync_v2", d.api.memcpyDtoDAsync(p.bank, p.live.address, p.live.bytes(), s.down)); err != nil {
				return err
			}
			return s.record(s.arrived[0], s.down)
		})
		if err == nil {
			err = p.release(s)
		}
	}
	if err != nil {
		d.spawn(s.retire)
		return errors.Join(err, p.dropBank()) // dropBank waits for work that may still write to it
	}
	d.spawn(func() {
		defer close(u.done)
		if u.image, u.err = p.copyOut(context.Background(), s, p.bank); u.err != nil {
			s.retire()
			return
		}
		d.keep(s)
	})
	return nil
}

// copyOut returns a copy of the device memory at an address, after the work in the streams of s. If
// the content equals the last image, it returns that image.
func (p *Part[T]) copyOut(ctx context.Context, s *staging, address uint64) ([]byte, error) {
	n := int(p.live.bytes())
	last, fresh := p.image, []byte(nil)
	if len(last) != n || !p.saved {
		last, fresh = nil, make([]byte, n)
	}
	count, ranges := cut(address, n)
	err := s.run(ctx, transfer{count: count, down: ranges, step: func(i int, piece []byte) error {
		at, b := i*pieceSize, piece[:ranges(i)[0].n]
		if fresh == nil && !bytes.Equal(last[at:at+len(b)], b) {
			fresh = make([]byte, n)
			copy(fresh, last[:at])
		}
		if fresh != nil {
			copy(fresh[at:], b)
		}
		return nil
	}})
	if fresh == nil {
		fresh = last
	}
	return fresh, err
}

// after makes the streams of s wait for the work in the part's stream.
func (p *Part[T]) after(s *staging) error {
	e, err := Options{After: p.options.Stream}.event()
	if err != nil {
		return err
	}
	return errors.Join(s.after(e), e.Close())
}

// release allows the live value to be changed once the event arrived[0] of s has occurred: it makes
// the part's stream wait for the event or, without a stream, waits itself.
func (p *Part[T]) release(s *staging) error {
	d := p.live.device
	if stream := p.options.Stream; stream != nil {
		return d.call("cuStreamWaitEvent", func(a *api) result { return a.streamWaitEvent(stream.handle, s.arrived[0], 0) })
	}
	return d.await(context.Background(), s.arrived[0])
}

// inTurn calls f with a staging whose streams wait for the part's.
func (p *Part[T]) inTurn(f func(ctx context.Context, s *staging) error) error {
	ctx := context.Background()
	return p.live.device.with(ctx, func(s *staging) error {
		if err := p.after(s); err != nil {
			return err
		}
		return f(ctx, s)
	})
}

// upload sets the live value to b.
func (p *Part[T]) upload(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	return p.inTurn(func(ctx context.Context, s *staging) error { return s.upload(ctx, p.live.address, b) })
}

// Restore sets the live value to that of the last Save. If that Save failed in the background,
// Restore uses the previous Save and returns an error that says so.
func (p *Part[T]) Restore() error {
	failure := p.settle()
	if !p.saved {
		return errors.Join(failure, p.wrong(errNothingSaved))
	}
	if !p.fresh {
		return errors.Join(failure, p.wrong(p.upload(p.image)))
	}
	return errors.Join(failure, p.wrong(p.inTurn(func(ctx context.Context, s *staging) error {
		d := p.live.device
		if err := d.call("cuMemcpyDtoDAsync_v2", func(a *api) result {
			return a.memcpyDtoDAsync(p.live.address, p.bank, p.live.bytes(), s.up)
		}); err != nil {
			return err
		}
		return s.settle(ctx)
	})))
}

// Exposed reports whether other ranks may write to the live value in collectives, as they do unless
// it is copied through this rank's host.
func (p *Part[T]) Exposed() bool {
	d := p.live.device
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range d.backends {
		if b.name() != BackendStaging {
			return true
		}
	}
	return false
}

// Sync sets the live value of every rank to that of root.
func (p *Part[T]) Sync(ctx context.Context, g *collective.Group, root int) error {
	if s := p.options.Stream; s != nil {
		if err := s.Synchronize(ctx); err != nil {
			g.Abort(err)
			return p.wrong(err)
		}
	}
	return Broadcast(ctx, g, p.live, root)
}

// Image returns the value of the last Save. The caller must not modify it.
func (p *Part[T]) Image() ([]byte, error) {
	if err := p.settle(); err != nil {
		return nil, err
	}
	if !p.saved {
		return nil, p.wrong(errNothingSaved)
	}
	return p.image, nil
}

// Pending returns a function that blocks until the last Save is complete, and then returns its
// value or its error.
func (p *Part[T]) Pending() func() ([]byte, error) {
	u := p.under
	if u == nil {
		return p.Image
	}
	return func() ([]byte, error) {
		<-u.done
		if u.err != nil {
			u.told.Store(true)
			return nil, p.wrong(fmt.Errorf("the last save failed: %w", u.err))
		}
		return u.image, nil
	}
}

// SetImage sets the live value to an image.
func (p *Part[T]) SetImage(b []byte) error {
	if uint64(len(b)) != p.live.bytes() {
		return p.wrong(fmt.Errorf("the image has %d bytes, and the tensor %d", len(b), p.live.bytes()))
	}
	return p.wrong(p.upload(b))
}

// Free releases the device memory for snapshots, once the last save is complete. It returns the
// error of that save if it was not returned before. The part can still be used: its next Save
// allocates memory again. Close of the device also releases the memory.
func (p *Part[T]) Free() error {
	return errors.Join(p.settle(), p.dropBank())
}

func (p *Part[T]) dropBank() error {
	bank := p.bank
	p.bank, p.fresh = 0, false
	return p.live.device.giveBank(bank)
}

// takeBank allocates device memory for snapshots. giveBank, or Close of the device, frees it.
func (d *Device) takeBank(n uint64) (bank uint64, err error) {
	if err := d.call("cuMemAlloc_v2", func(a *api) result { return a.memAlloc(&bank, n) }); err != nil {
		return 0, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.shut {
		return 0, ErrClosed // the memory is freed with the context
	}
	d.banks[bank] = true
	return bank, nil
}

func (d *Device) giveBank(bank uint64) error {
	d.mu.Lock()
	there := d.banks[bank]
	delete(d.banks, bank)
	d.mu.Unlock()
	if !there {
		return nil
	}
	return d.call("cuMemFree_v2", func(a *api) result { return a.memFree(bank) })
}
