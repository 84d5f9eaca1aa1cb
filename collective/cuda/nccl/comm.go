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
// of its device is current. Only [Comm.Abort] and [Comm.Destroy] release what it holds. Addresses
// are on the device, counts are in elements, and streams are CUstreams.
type Comm struct {
	lib    *Library
	comm   uintptr
	place  *uintptr // where NCCL stores the communicator, also while it is being made
	pinned runtime.Pinner
	old    *Comm // the communicator from which this one is being shrunk; nil once it is made. Until then only old can be polled
}

// begin calls f, which starts to make a communicator, and returns the Comm. NCCL stores the
// communicator in its place: at once, or later if it is shrunk from an old one.
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

// placed reads the communicator from its place.
func (c *Comm) placed(call string) error {
	if c.comm = *c.place; c.comm == 0 {
		return fmt.Errorf("nccl: %s made no communicator", call)
	}
	return nil
}

// Init starts to make a communicator of size ranks. Every rank calls it with the same id, which one
// of them has made by [Library.NewID].
func (l *Library) Init(id ID, size, rank int) (*Comm, error) {
	if l.initRankScalable != nil { // passes the id by pointer, which is independent of how structures are passed
		return l.begin("ncclCommInitRankScalable", nil, func(place *uintptr) result {
			return l.initRankScalable(place, int32(size), int32(rank), 1, &id, nonblocking())
		})
	}
	return l.InitByValue(id, size, rank)
}

// InitByValue is like [Library.Init]. It calls the function that all versions have, to which the id
// is passed by value.
func (l *Library) InitByValue(id ID, size, rank int) (*Comm, error) {
	return l.begin("ncclCommInitRankConfig", nil, func(place *uintptr) result {
		return l.initRankConfig(place, int32(size), id, int32(rank), nonblocking())
	})
}

// Join starts to make a communicator that grows from one to which this process does not belong. The
// id is from [Comm.GrowID].
func (l *Library) Join(id ID, size, rank int) (*Comm, error) {
	return l.begin("ncclCommGrow", nil, func(place *uintptr) result {
		return l.grow(0, int32(size), &id, int32(rank), place, nonblocking())
	})
}

// Poll returns nil when all calls begun are done, [ErrInProgress] before that, or the error of the
// communicator. After an error the communicator can only be aborted ([Comm.Abort]) or, after a
// revocation, also be shrunk ([Comm.Shrink]).
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

// AllReduce starts to combine n elements of each rank. send and recv may be the same.
func (c *Comm) AllReduce(send, recv uint64, n int, t Type, op Op, stream uintptr) error {
	return c.check("ncclAllReduce", c.lib.allReduce(send, recv, uint64(n), t, op, c.comm, stream))
}

// Broadcast starts to copy n elements from rank root's send to every rank's recv. On root the two
// may be the same.
func (c *Comm) Broadcast(send, recv uint64, n int, t Type, root int, stream uintptr) error {
	return c.check("ncclBroadcast", c.lib.broadcast(send, recv, uint64(n), t, int32(root), c.comm, stream))
}

// AllGather starts to copy n elements of each rank, one rank after another, into every rank's recv.
func (c *Comm) AllGather(send, recv uint64, n int, t Type, stream uintptr) error {
	return c.check("ncclAllGather", c.lib.allGather(send, recv, uint64(n), t, c.comm, stream))
}

// ReduceScatter starts to combine n elements for each rank; each rank's recv gets its n elements of
// the result.
func (c *Comm) ReduceScatter(send, recv uint64, n int, t Type, op Op, stream uintptr) error {
	return c.check("ncclReduceScatter", c.lib.reduceScatter(send, recv, uint64(n), t, op, c.comm, stream))
}

func (c *Comm) check(call string, r result) error { return c.lib.check(call, r, c.comm) }

// Revoke starts to end the operations in progress. The communicator can then only be shrunk,
// aborted or destroyed.
func (c *Comm) Revoke() error { return c.check("ncclCommRevoke", c.lib.revoke(c.comm, 0)) }

// Shrink starts to make a communicator of the ranks that are not in without; only these call it.
// Unless abort is set, no operation may be in progress. The caller must still end the old
// communicator: after the new one is made, or before [Comm.Abort] of the new one.
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

// GrowID returns the id of the communicator that this one grows into. One of its ranks calls it and
// sends the id to the processes that join.
func (c *Comm) GrowID() (ID, error) {
	id := new(ID)
	err := c.check("ncclCommGetUniqueId", c.lib.growID(c.comm, id))
	return *id, err
}

// Grow starts to make a communicator of this one's ranks, which keep their numbers, and of the
// processes that join. No operation may be in progress. The rank that called GrowID passes the id,
// the others pass nil. The caller must still end the old communicator.
func (c *Comm) Grow(id *ID, size int) (*Comm, error) {
	return c.lib.begin("ncclCommGrow", nil, func(place *uintptr) result {
		return c.lib.grow(c.comm, int32(size), id, -1, place, nonblocking())
	})
}

// Finalize starts to end the communicator, once all calls begun are done. When Poll reports that it
// is done, [Comm.Destroy] follows.
func (c *Comm) Finalize() error { return c.check("ncclCommFinalize", c.lib.finalize(c.comm)) }

// Destroy releases a finalized communicator.
func (c *Comm) Destroy() error {
	defer c.pinned.Unpin()
	return c.lib.check("ncclCommDestroy", c.lib.destroy(c.comm), 0)
}

// Abort ends the operations in progress and releases the communicator, whatever its state. It waits
// for the device.
func (c *Comm) Abort() error {
	defer c.pinned.Unpin()
	if c.old != nil { // it has ended with the old one
		return nil
	}
	return c.lib.check("ncclCommAbort", c.lib.abort(c.comm), 0)
}
