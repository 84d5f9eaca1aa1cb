package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/collective"
)

// TensorOptions say how a part is saved. The zero value is for slices to which nothing writes while
// their state is committed, saved, restored or synchronised.
type TensorOptions struct {
	// Stream is the one that writes to the slice. Operations on the part are ordered with it: they
	// come after the work that is in the stream, and before what is put there later. A save then
	// returns at once.
	Stream *Stream
	// NoSnapshot takes no memory of the device: a save copies to the host before it returns.
	NoSnapshot bool
}

// Part is a slice on a device as a part of a training state: it is an elastic.Part and an
// elastic.Deferred.
type Part[T collective.Element] struct {
	name    string
	live    *Slice[T]
	options TensorOptions

	image []byte // of the last complete save; nothing writes to it any more
	saved bool
	under *saving // begun after it, and neither complete nor failed; nil: none
	bank  uint64  // memory of the device for snapshots; 0: none
	fresh bool    // the bank holds what image does
}

// saving is a copy to the host in the background.
type saving struct {
	done  chan struct{}
	image []byte
	err   error
	told  atomic.Bool // of err, by Pending
}

// Tensor makes a part whose live value is live. A save takes a snapshot of it on the device, and
// returns; the snapshot is copied to the host in the background, through pinned memory, into a
// buffer of its own where something has changed. Until it is complete the previous save stays
// valid, and the next save, Image and Restore wait for it; a failure is returned by the first of
// these, or by Pending. The snapshot takes as much memory of the device as the slice, which
// [Part.Free] gives back; without that memory the copy to the host is made before the save returns.
// A restore copies back from the snapshot, or else from the host; a sync broadcasts from device to
// device. The slice's length must be the same on every rank. All but Save block until they are
// done.
func Tensor[T collective.Element](name string, live *Slice[T]) *Part[T] {
	return TensorWith(name, live, TensorOptions{})
}

// TensorWith is Tensor with options.
func TensorWith[T collective.Element](name string, live *Slice[T], o TensorOptions) *Part[T] {
	return &Part[T]{name: name, live: live, options: o}
}

var errNothingSaved = errors.New("nothing has been saved yet that could be restored")

func (p *Part[T]) wrong(err error) error {
	if err != nil {
		err = fmt.Errorf("cuda: tensor %q: %w", p.name, err)
	}
	return err
}

// settle waits for a save that is under way, and makes it the last one. It returns the error of a
// failure that was not returned before.
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
		return p.wrong(fmt.Errorf("the last save: %w", u.err))
	}
	return nil
}

// Save keeps a copy of the live value. If it fails, now or in the background, the last one stays.
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

// saveNow copies to the host and waits.
func (p *Part[T]) saveNow() error {
	return p.inTurn(func(ctx context.Context, s *staging) error {
		image, err := p.copyOut(ctx, s, p.live.address)
		if err == nil {
			p.image, p.saved, p.fresh = image, true, false
		}
		return err
	})
}

// snapshot copies the live value to the bank, and begins to copy that to the host.
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
		return errors.Join(err, p.dropBank()) // which waits for what may still write to it
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

// copyOut returns what is at an address of the device, once what is in the streams of s has been
// done. Where it equals the last image, it is that.
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

// after makes the streams of s wait for what is in the part's stream.
func (p *Part[T]) after(s *staging) error {
	e, err := Options{After: p.options.Stream}.event()
	if err != nil {
		return err
	}
	return errors.Join(s.after(e), e.Close())
}

// release lets the live value be changed once the event arrived[0] of s has occurred: it has the
// part's stream wait for it, or waits itself.
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

// upload makes the live value b.
func (p *Part[T]) upload(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	count, ranges := cut(p.live.address, len(b))
	return p.inTurn(func(ctx context.Context, s *staging) error {
		return s.run(ctx, transfer{count: count, up: ranges, step: func(i int, piece []byte) error {
			copy(piece, b[i*pieceSize:])
			return nil
		}})
	})
}

// Restore makes the live value that of the last Save. Where that has failed in the background it is
// that of the one before, and the error says so.
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

// Exposed reports whether other ranks may write to the live value in collectives: they do wherever
// it does not go through this rank's host.
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

// Sync makes the live value of every rank that of root.
func (p *Part[T]) Sync(ctx context.Context, g *collective.Group, root int) error {
	if s := p.options.Stream; s != nil {
		if err := s.Synchronize(ctx); err != nil {
			g.Abort(err)
			return p.wrong(err)
		}
	}
	return Broadcast(ctx, g, p.live, root)
}

// Image returns what the last Save has kept, which must not be written to.
func (p *Part[T]) Image() ([]byte, error) {
	if err := p.settle(); err != nil {
		return nil, err
	}
	if !p.saved {
		return nil, p.wrong(errNothingSaved)
	}
	return p.image, nil
}

// Pending returns a function that blocks until the last Save is complete, and then returns what it
// has kept, or its error.
func (p *Part[T]) Pending() func() ([]byte, error) {
	u := p.under
	if u == nil {
		return p.Image
	}
	return func() ([]byte, error) {
		<-u.done
		if u.err != nil {
			u.told.Store(true)
			return nil, p.wrong(fmt.Errorf("the last save: %w", u.err))
		}
		return u.image, nil
	}
}

// SetImage makes the live value that of an image.
func (p *Part[T]) SetImage(b []byte) error {
	if uint64(len(b)) != p.live.bytes() {
		return p.wrong(fmt.Errorf("%d bytes for one of %d", len(b), p.live.bytes()))
	}
	return p.wrong(p.upload(b))
}

// Free gives back the memory of the device that snapshots take, once the last save is complete, and
// returns the error of that save if it was not returned before. The part can still be used: its
// next Save takes memory again. Close of the device does it as well.
func (p *Part[T]) Free() error {
	return errors.Join(p.settle(), p.dropBank())
}

func (p *Part[T]) dropBank() error {
	bank := p.bank
	p.bank, p.fresh = 0, false
	return p.live.device.giveBank(bank)
}

// takeBank allocates memory of the device, once; Close frees it.
func (d *Device) takeBank(n uint64) (bank uint64, err error) {
	if err := d.call("cuMemAlloc_v2", func(a *api) result { return a.memAlloc(&bank, n) }); err != nil {
		return 0, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.shut {
		return 0, ErrClosed // the memory goes with the context
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
