package nccl

import (
	"fmt"
	"runtime"
)

// Type is an ncclDataType_t.
type Type int32

// The types of elements.
const (
	Int8     Type = 0
	Uint8    Type = 1
	Int32    Type = 2
	Uint32   Type = 3
	Int64    Type = 4
	Uint64   Type = 5
	Float16  Type = 6
	Float32  Type = 7
	Float64  Type = 8
	BFloat16 Type = 9
)

// Op is an ncclRedOp_t.
type Op int32

// The operations that combine elements.
const (
	Sum     Op = 0
	Product Op = 1
	Max     Op = 2
	Min     Op = 3
	Average Op = 4
)

const shrinkAbort = 1

// Comm is a communicator, or one that is being made. It is used on one thread, on which the context
// of its device is current; only [Comm.Abort] and [Comm.Destroy] give back what it holds. Addresses
// are on the device, counts in elements, streams CUstreams.
type Comm struct {
	lib    *Library
	comm   uintptr
	place  *uintptr // where NCCL puts it, and looks for it while it is being made
	pinned runtime.Pinner
	old    *Comm // the one that this is shrunk from, while it is being made; only that is known until then
}

// begin makes a Comm with a place for NCCL to put it. NCCL does so at once, unless it is shrunk
// from an old one.
func (l *Library) begin(call string, old *Comm, f func(place *uintptr) result) (*Comm, error) {
	c := &Comm{lib: l, place: new(uintptr), old: old}
	c.pinned.Pin(c.place)
	r := f(c.place)
	err := l.check(call, r, 0)
	if err == nil && old == nil {
		err = c.placed(call)
	}
	if err != nil {
		c.pinned.Unpin()
		return nil, err
	}
	return c, nil
}

// placed takes the communicator from its place.
func (c *Comm) placed(call string) error {
	if c.comm = *c.place; c.comm == 0 {
		return fmt.Errorf("nccl: %s gave no communicator", call)
	}
	return nil
}

// Init begins to make a communicator; every rank calls it.
func (l *Library) Init(id ID, size, rank int) (*Comm, error) {
	if l.initRankScalable != nil { // the id is passed by pointer: how structures are passed does not matter
		return l.begin("ncclCommInitRankScalable", nil, func(place *uintptr) result {
			return l.initRankScalable(place, int32(size), int32(rank), 1, &id, nonblocking())
		})
	}
	return l.InitByValue(id, size, rank)
}

// InitByValue is [Library.Init] by the function that all versions have, which takes the id by
// value.
func (l *Library) InitByValue(id ID, size, rank int) (*Comm, error) {
	return l.begin("ncclCommInitRankConfig", nil, func(place *uintptr) result {
		return l.initRankConfig(place, int32(size), id, int32(rank), nonblocking())
	})
}

// Join begins to make a communicator that grows out of another, to which this process does not
// belong. The id is of [Comm.GrowID].
func (l *Library) Join(id ID, size, rank int) (*Comm, error) {
	return l.begin("ncclCommGrow", nil, func(place *uintptr) result {
		return l.grow(0, int32(size), &id, int32(rank), place, nonblocking())
	})
}

// Poll returns nil when all that was begun is done, [ErrInProgress] until then, and else what the
// communicator has met. After an error it is only good for [Comm.Abort], and after a revocation for
// [Comm.Shrink].
func (c *Comm) Poll() error {
	if c.old != nil {
		if err := c.old.Poll(); err != nil {
			return err
		}
		if err := c.placed("ncclCommShrink"); err != nil {
			return err
		}
		c.old = nil
	}
	var r result
	if err := c.lib.check("ncclCommGetAsyncError", c.lib.getAsyncError(c.comm, &r), c.comm); err != nil {
		return err
	}
	if r == inProgress {
		return ErrInProgress
	}
	return c.lib.check("ncclCommGetAsyncError", r, c.comm)
}

// AllReduce begins to combine n elements of each rank. Send and recv may be the same.
func (c *Comm) AllReduce(send, recv uint64, n int, t Type, op Op, stream uintptr) error {
	return c.check("ncclAllReduce", c.lib.allReduce(send, recv, uint64(n), t, op, c.comm, stream))
}

// Broadcast begins to copy n elements from rank root's send to every rank's recv, which may be the
// same there.
func (c *Comm) Broadcast(send, recv uint64, n int, t Type, root int, stream uintptr) error {
	return c.check("ncclBroadcast", c.lib.broadcast(send, recv, uint64(n), t, int32(root), c.comm, stream))
}

// AllGather begins to put n elements of each rank, one after the other, into every rank's recv.
func (c *Comm) AllGather(send, recv uint64, n int, t Type, stream uintptr) error {
	return c.check("ncclAllGather", c.lib.allGather(send, recv, uint64(n), t, c.comm, stream))
}

// ReduceScatter begins to combine as many elements as n times the ranks; each rank's recv gets its
// n of the result.
func (c *Comm) ReduceScatter(send, recv uint64, n int, t Type, op Op, stream uintptr) error {
	return c.check("ncclReduceScatter", c.lib.reduceScatter(send, recv, uint64(n), t, op, c.comm, stream))
}

func (c *Comm) check(call string, r result) error { return c.lib.check(call, r, c.comm) }

// Revoke begins to end what is under way; the communicator can then only be shrunk, aborted or
// destroyed.
func (c *Comm) Revoke() error { return c.check("ncclCommRevoke", c.lib.revoke(c.comm, 0)) }

// Shrink begins to make a communicator of the ranks that are not in without; only these call it.
// Unless abort is set nothing may be under way. The old communicator is still to be ended: once the
// new one is made, or else before [Comm.Abort] of the new one.
func (c *Comm) Shrink(without []int, abort bool) (*Comm, error) {
	ranks := make([]int32, len(without))
	for i, r := range without {
		ranks[i] = int32(r)
	}
	flags := int32(0)
	if abort {
		flags = shrinkAbort
	}
	return c.lib.begin("ncclCommShrink", c, func(place *uintptr) result {
		return c.lib.shrink(c.comm, &ranks[0], int32(len(ranks)), place, nonblocking(), flags)
	})
}

// GrowID names what the communicator grows into; one of its ranks calls it, and tells those that
// join.
func (c *Comm) GrowID() (ID, error) {
	id := new(ID)
	err := c.check("ncclCommGetUniqueId", c.lib.growID(c.comm, id))
	return *id, err
}

// Grow begins to make a communicator of this one's ranks, which keep their numbers, and of those
// that join. Nothing may be under way. The id is for the rank that has made it, nil for the others.
// The old communicator is still to be ended.
func (c *Comm) Grow(id *ID, size int) (*Comm, error) {
	return c.lib.begin("ncclCommGrow", nil, func(place *uintptr) result {
		return c.lib.grow(c.comm, int32(size), id, -1, place, nonblocking())
	})
}

// Finalize begins to end the communicator, once all that was begun is done; [Comm.Destroy] follows
// when it has.
func (c *Comm) Finalize() error { return c.check("ncclCommFinalize", c.lib.finalize(c.comm)) }

// Destroy gives a finalized communicator back.
func (c *Comm) Destroy() error {
	defer c.pinned.Unpin()
	return c.lib.check("ncclCommDestroy", c.lib.destroy(c.comm), 0)
}

// Abort ends what is under way and gives the communicator back, in whatever state it is. It waits
// for the device.
func (c *Comm) Abort() error {
	defer c.pinned.Unpin()
	if c.old != nil { // the end of the old one has ended it
		return nil
	}
	return c.lib.check("ncclCommAbort", c.lib.abort(c.comm), 0)
}
