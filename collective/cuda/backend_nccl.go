package cuda

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/collective/cuda/nccl"
	"github.com/hvdrun/hvdrun/internal/kernel"
	"github.com/hvdrun/hvdrun/plan"
)

const sharesSince nccl.Version = 23000 // several ranks on one device

// ncclRecord is what a rank sends to the others about NCCL.
type ncclRecord struct {
	Version nccl.Version
	Shares  bool    // NCCL permits several ranks on one device
	Trouble string  // why this rank cannot use it; empty if it can
	Parent  *parent // a communicator of another generation, or nil
}

// parent identifies a communicator from which a new one may be made.
type parent struct {
	Tag        uint64
	Rank, Size int
	Broken     bool
}

// ncclOffer is what a rank can contribute to a new communicator.
type ncclOffer struct {
	lib    *nccl.Library
	record *ncclRecord
	parent *communicator // nil if there is no parent, or if newNCCLBackend has taken it
}

// offerNCCL returns what this rank can contribute to a communicator of the group: NCCL, and the
// communicator of the same group in an earlier generation, if there is one.
func (d *Device) offerNCCL(g *collective.Group) *ncclOffer {
	o := &ncclOffer{}
	if d.config.Backend != "" && d.config.Backend != BackendNCCL {
		return o
	}
	o.record = &ncclRecord{Shares: d.config.ncclShared}
	var err error
	if o.lib, err = nccl.Load(d.config.NCCL); err != nil {
		o.record.Trouble = strings.TrimPrefix(trouble(err), "nccl: ")
		return o
	}
	o.record.Version = o.lib.Version()
	if o.parent = d.takeParent(g); o.parent != nil {
		c := o.parent
		o.record.Parent = &parent{c.tag, c.rank, c.size, c.broken.Load()}
	}
	return o
}

// withdraw closes an offered parent that was not taken.
func (o *ncclOffer) withdraw() {
	if o.parent != nil {
		o.parent.close()
	}
}

// takeParent takes the communicator that the same group of the previous generation has left, if it
// can be a parent. It closes communicators that were not taken in an earlier generation.
func (d *Device) takeParent(g *collective.Group) *communicator {
	d.mu.Lock()
	var old *communicator
	var useless []*communicator
	d.reusable = slices.DeleteFunc(d.reusable, func(c *communicator) bool {
		switch {
		case c.state.Load() == commEnding: // waiting for it would delay the world
			d.threads.Go(c.close)
			return true
		case c.state.Load() != commReady || c.offered != 0 && c.offered < g.Generation():
			useless = append(useless, c)
			return true
		case old == nil && c.lane == g.Lane():
			old = c
			return true
		}
		c.offered = g.Generation()
		return false
	})
	d.mu.Unlock()
	for _, c := range useless {
		c.close()
	}
	return old
}

// noNCCL returns the reason why ranks cannot use NCCL, or "" if they can.
func noNCCL(all []record) string {
	for rank, r := range all {
		switch {
		case r.NCCL == nil:
			return fmt.Sprintf("rank %d does not want it", rank)
		case r.NCCL.Trouble != "":
			return fmt.Sprintf("rank %d: %s", rank, r.NCCL.Trouble)
		case r.NCCL.Version != all[0].NCCL.Version:
			return fmt.Sprintf("rank %d has version %v, rank 0 %v", rank, r.NCCL.Version, all[0].NCCL.Version)
		}
	}
	for rank, r := range all {
		for other := range rank {
			if all[other].Device != r.Device {
				continue
			}
			if r.NCCL.Version < sharesSince {
				return fmt.Sprintf("ranks %d and %d are on one device, which needs version %v", other, rank, sharesSince)
			}
			for alone, r := range all {
				if !r.NCCL.Shares {
					return fmt.Sprintf("ranks %d and %d are on one device, and rank %d lacks %s=1", other, rank, alone, plan.EnvNCCLShared)
				}
			}
		}
	}
	return ""
}

// How a communicator is made.
const (
	formNew    = iota // without a parent
	formShrunk        // from a parent, without some of its ranks
	formGrown         // from a parent, with further ranks
)

// formation is how the ranks of a group make their communicator. It is the same on all ranks.
type formation struct {
	kind    int
	without []int // ranks of the parent that are gone
	abort   bool  // operations may be in progress in the parent
}

// chooseFormation chooses how a communicator is made. A parent can be used if its remaining ranks
// are in the same order and precede all new ranks, and if ranks have either left or joined, but not
// both.
func chooseFormation(all []record, lib *nccl.Library) formation {
	first := all[0].NCCL.Parent
	if first == nil {
		return formation{}
	}
	f, last, survivors := formation{}, -1, 0
	for rank, r := range all {
		p := r.NCCL.Parent
		if p == nil || p.Tag != first.Tag {
			continue
		}
		if survivors != rank || p.Rank <= last || p.Rank >= p.Size || p.Size != first.Size {
			return formation{}
		}
		for gone := last + 1; gone < p.Rank; gone++ {
			f.without = append(f.without, gone)
		}
		last = p.Rank
		survivors++
		f.abort = f.abort || p.Broken
	}
	for gone := last + 1; gone < first.Size; gone++ {
		f.without = append(f.without, gone)
	}
	switch {
	case len(f.without) > 0 && survivors == len(all) && lib.CanShrink():
		f.kind = formShrunk
	case len(f.without) == 0 && survivors < len(all) && !f.abort && lib.CanGrow():
		f.kind = formGrown
	}
	return f
}

// communicatorName is what rank 0 sends to the others about the communicator to be made.
type communicatorName struct {
	ok  bool
	tag uint64
	id  nccl.ID
}

const communicatorNameSize = 1 + 8 + len(nccl.ID{}.Bytes)

func (b *communicatorName) encode() []byte {
	text := make([]byte, 9, communicatorNameSize)
	if b.ok {
		text[0] = 1
	}
	binary.LittleEndian.PutUint64(text[1:], b.tag)
	return append(text, b.id.Bytes[:]...)
}

func decodeCommunicatorName(text []byte) communicatorName {
	b := communicatorName{ok: text[0] == 1, tag: binary.LittleEndian.Uint64(text[1:])}
	copy(b.id.Bytes[:], text[9:])
	return b
}

// ncclBackend is the backend of a group whose ranks have, or are making, a communicator of NCCL.
// Until all ranks have it, and for operations that NCCL does not support, the embedded backend is
// used.
type ncclBackend struct {
	backend // used until NCCL is, and for what NCCL does not support
	device  *Device
	group   *collective.Group
	comm    *communicator

	queue
	active    atomic.Bool   // all ranks have agreed to use NCCL
	abandoned bool          // all ranks have agreed not to use NCCL
	using     sync.Mutex    // held while an operation uses NCCL, and by shut
	done      chan struct{} // closed by shut
}

// newNCCLBackend starts to make a communicator for ranks that have chosen NCCL, and returns a
// backend that until then uses the best of the other backends. It takes the communicator that this
// rank has offered if that is the parent.
func (d *Device) newNCCLBackend(ctx context.Context, g *collective.Group, all []record, has *ncclOffer) (backend, error) {
	others := slices.Clone(all)
	for i := range others {
		others[i].Wish, others[i].NCCL = "", nil
	}
	name, _, err := choose(others)
	if err != nil {
		return nil, err
	}
	meanwhile, err := d.make(ctx, name, "nccl is being prepared", g, all)
	if err != nil {
		return nil, err
	}
	w := &ncclBackend{backend: meanwhile, device: d, group: g, done: make(chan struct{})}
	err = d.do(func() error { return w.openQueue(d.api) })
	f := chooseFormation(all, has.lib)
	var old *communicator
	if p := all[0].NCCL.Parent; f.kind != formNew && has.parent != nil && has.parent.tag == p.Tag {
		old = has.parent
	}
	if err == nil {
		w.comm, err = d.newCommunicator(has.lib, old, g)
	}
	if err == nil {
		if old != nil {
			has.parent = nil
		}
		err = w.nameCommunicator(ctx, f, old)
	}
	if err != nil {
		return nil, errors.Join(err, w.shut())
	}
	return w, nil
}

// nameCommunicator distributes rank 0's name of the communicator, and starts to make the
// communicator.
func (w *ncclBackend) nameCommunicator(ctx context.Context, f formation, old *communicator) error {
	c := w.comm
	text := make([]byte, communicatorNameSize)
	if w.group.Rank() == 0 {
		b := communicatorName{}
		var tag [8]byte
		rand.Read(tag[:])
		b.tag = binary.LittleEndian.Uint64(tag[:])
		limited, stop := context.WithTimeoutCause(ctx, w.device.endLimit, errLimit)
		named := make(chan nccl.ID, 1)
		err := c.thread.do(limited, func() (err error) {
			var id nccl.ID
			switch f.kind {
			case formNew:
				id, err = c.lib.NewID()
			case formGrown:
				id, err = old.comm.GrowID()
			}
			named <- id
			return err
		})
		stop()
		if err == nil {
			b.ok, b.id = true, <-named
		} else {
			c.reason = err
		}
		copy(text, b.encode())
	}
	if err := collective.Broadcast(ctx, w.group, text, 0); err != nil {
		return err
	}
	b := decodeCommunicatorName(text)
	c.tag = b.tag
	w.watch()
	w.device.threads.Go(func() {
		c.thread.do(context.Background(), func() error {
			c.form(func() (*nccl.Comm, error) { return w.begin(f, b, old) })
			return nil
		})
	})
	return nil
}

var errUnnamed = errors.New("cuda: rank 0 could not name a communicator")

// begin makes NCCL begin a new communicator. It runs on the communicator's thread.
func (w *ncclBackend) begin(f formation, b communicatorName, old *communicator) (*nccl.Comm, error) {
	c := w.comm
	switch {
	case !b.ok && c.reason != nil:
		return nil, c.reason
	case !b.ok:
		return nil, errUnnamed
	case f.kind == formShrunk:
		return old.comm.Shrink(f.without, f.abort)
	case f.kind == formGrown && old == nil:
		return c.lib.Join(b.id, c.size, c.rank)
	case f.kind == formGrown && c.rank == 0:
		return old.comm.Grow(&b.id, c.size)
	case f.kind == formGrown:
		return old.comm.Grow(nil, c.size)
	}
	return c.lib.Init(b.id, c.size, c.rank)
}

// watch forbids new operations in the communicator once the group has failed.
func (w *ncclBackend) watch() {
	w.device.threads.Go(func() {
		select {
		case <-w.group.Failed():
			w.comm.cancel(collective.ErrAborted)
		case <-w.done:
		}
	})
}

func (w *ncclBackend) name() string {
	if w.active.Load() {
		return BackendNCCL
	}
	return w.backend.name()
}

// agree is called with the highest of all ranks' states, which all ranks learn at the same
// operation. If that is commReady, all of them use NCCL from this operation on; if it is
// commFailed, none ever does.
func (w *ncclBackend) agree(ctx context.Context, worst int64) error {
	switch {
	case worst == commReady && !w.active.Load():
		w.active.Store(true)
		w.group.TellBackend(BackendNCCL, "all ranks are ready for it")
	case worst == commFailed && !w.abandoned:
		w.abandoned = true
		reason := ""
		if w.comm.state.Load() == commFailed {
			reason = trouble(w.comm.reason)
		}
		w.comm.cancel(errUnused)
		w.device.threads.Go(w.comm.close)
		reasons, err := collective.AllGather(ctx, w.group, []byte(reason))
		if err != nil {
			return err
		}
		for rank, r := range reasons {
			if len(r) > 0 {
				why := fmt.Sprintf("not nccl: rank %d: %s", rank, r[:min(len(r), maxTrouble)])
				w.group.TellBackend(w.backend.name(), why)
				break
			}
		}
	}
	return nil
}

// pending returns this rank's state of NCCL in a group. The ranks exchange it when they agree on an
// operation.
func (d *Device) pending(g *collective.Group) int64 {
	if w := d.ncclBackendOf(g); w != nil {
		return w.comm.state.Load()
	}
	return commForming
}

// agreeOnNCCL passes the highest of all ranks' states to the group's backend, if that uses NCCL.
func (d *Device) agreeOnNCCL(ctx context.Context, g *collective.Group, worst int64) error {
	if w := d.ncclBackendOf(g); w != nil {
		return w.agree(ctx, worst)
	}
	return nil
}

func (d *Device) ncclBackendOf(g *collective.Group) *ncclBackend {
	d.mu.Lock()
	defer d.mu.Unlock()
	w, _ := d.backends[g].(*ncclBackend)
	return w
}

// ncclTypes are the types that all supported versions of NCCL have.
var ncclTypes = map[kernel.Type]nccl.Type{kernel.Int8: nccl.Int8, kernel.Uint8: nccl.Uint8, kernel.Int32: nccl.Int32,
	kernel.Uint32: nccl.Uint32, kernel.Int64: nccl.Int64, kernel.Uint64: nccl.Uint64, kernel.Float16: nccl.Float16,
	kernel.Float32: nccl.Float32, kernel.Float64: nccl.Float64, kernel.BFloat16: nccl.BFloat16}

var ncclOps = map[collective.Op]nccl.Op{collective.Sum: nccl.Sum, collective.Product: nccl.Product, collective.Max: nccl.Max,
	collective.Min: nccl.Min, collective.Average: nccl.Average}

// ncclWords returns NCCL's type and operation, and whether NCCL can be used for them.
func (w *ncclBackend) ncclWords(t kernel.Type, op collective.Op) (nccl.Type, nccl.Op, bool) {
	typ, typed := ncclTypes[t]
	what, able := ncclOps[op]
	whole := t != kernel.Float16 && t != kernel.BFloat16 && t != kernel.Float32 && t != kernel.Float64
	switch {
	case op == collective.Average && whole: // NCCL does not specify how integers are rounded
		able = false
	case (op == collective.Min || op == collective.Max) && !whole: // NCCL prefers a number to a NaN
		able = false
	}
	return typ, what, typed && able && w.active.Load()
}

func (w *ncclBackend) allReduce(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, ready *Event) error {
	typ, what, able := w.ncclWords(t, op)
	if !able {
		return w.backend.allReduce(ctx, t, op, address, n, ready)
	}
	return w.run(ctx, ready, func(c *nccl.Comm) error { return c.AllReduce(address, address, n, typ, what, w.stream) })
}

func (w *ncclBackend) broadcast(ctx context.Context, address uint64, n, root int) error {
	if !w.active.Load() {
		return w.backend.broadcast(ctx, address, n, root)
	}
	return w.run(ctx, nil, func(c *nccl.Comm) error { return c.Broadcast(address, address, n, nccl.Uint8, root, w.stream) })
}

// allGather is a broadcast from each rank, since sizes may differ and the copies are not
// contiguous.
func (w *ncclBackend) allGather(ctx context.Context, own uint64, into []uint64, sizes []int) error {
	if !w.active.Load() {
		return w.backend.allGather(ctx, own, into, sizes)
	}
	return w.run(ctx, nil, func(c *nccl.Comm) error {
		return w.comm.lib.Group(func() error {
			for root, n := range sizes {
				from := into[root]
				if root == w.group.Rank() {
					from = own
				}
				if n == 0 {
					continue
				}
				if err := c.Broadcast(from, into[root], n, nccl.Uint8, root, w.stream); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// reduceScatter uses NCCL if the parts have equal lengths.
func (w *ncclBackend) reduceScatter(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, into uint64) error {
	typ, what, able := w.ncclWords(t, op)
	if size := w.group.Size(); !able || n%size != 0 {
		return w.backend.reduceScatter(ctx, t, op, address, n, into)
	}
	return w.run(ctx, nil, func(c *nccl.Comm) error {
		return c.ReduceScatter(address, into, n/w.group.Size(), typ, what, w.stream)
	})
}

// run performs an operation by NCCL. When it returns, the device no longer uses the memory of the
// operation, even if the group has failed; the exception is an NCCL that hangs.
func (w *ncclBackend) run(ctx context.Context, ready *Event, begin func(*nccl.Comm) error) error {
	w.using.Lock()
	defer w.using.Unlock()
	c := w.comm
	both, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(c.ctx, func() { cancel(context.Cause(c.ctx)) })
	defer stop()
	var err error
	recorded := false
	if ready != nil {
		err = w.device.call("cuStreamWaitEvent", func(a *api) result { return a.streamWaitEvent(w.stream, ready.handle, 0) })
	}
	if err == nil {
		recorded, err = c.perform(both, w.stream, w.event, begin)
	}
	if err == nil {
		return nil
	}
	event := uintptr(0)
	if recorded {
		event = w.event
	}
	if left := c.cancelAll(err, event); left != nil {
		err = fmt.Errorf("%w (and %w)", err, left)
	}
	return w.blame(ctx, err)
}

// blame returns the error of an operation that NCCL failed with err: the group's error if the group
// fails within grace, since NCCL may notice a failure first.
func (w *ncclBackend) blame(ctx context.Context, err error) error {
	var met *nccl.Error
	if errors.As(err, &met) {
		limited, stop := context.WithTimeout(ctx, grace)
		defer stop()
		select {
		case <-w.group.Failed():
		case <-limited.Done():
		}
	}
	select {
	case <-w.group.Failed():
		if lost := collective.Barrier(context.Background(), w.group); lost != nil {
			return lost
		}
	default:
	}
	return err
}

// shut leaves the communicator for the next generation if it can be a parent, and otherwise closes
// it, unless agree has.
func (w *ncclBackend) shut() error {
	w.using.Lock()
	defer w.using.Unlock()
	select {
	case <-w.done:
		return nil
	default:
		close(w.done)
	}
	if c := w.comm; c != nil && !w.abandoned {
		c.cancel(errUnused)
		if s := c.state.Load(); s == commReady || s == commEnding {
			w.device.mu.Lock()
			w.device.reusable = append(w.device.reusable, c)
			w.device.mu.Unlock()
		} else {
			c.close()
		}
	}
	return errors.Join(w.backend.shut(), w.device.do(func() error { return w.closeQueue(w.device.api) }))
}

// endNCCL closes the reusable communicators, and blocks until NCCL is idle.
func (d *Device) endNCCL() {
	d.mu.Lock()
	left := d.reusable
	d.reusable = nil
	d.mu.Unlock()
	for _, c := range left {
		d.threads.Go(c.close)
	}
	d.threads.Wait()
}
