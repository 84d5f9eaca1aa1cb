package levels

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Host is the ranks of a group that share memory with this one.
type Host struct {
	c      *Call
	member *shm.Member
	Ranks  []int // ranks of the group, by member

	use        sync.Mutex // held by the operation in progress, and while the memory is released
	closed     bool
	phases     shm.Times                                  // of the operation in progress, if there is a timeline
	reductions [kernel.Types][operation.Ops]shm.Reduction // filled when first used
	cut        [][]byte                                   // the result of Cuts
}

// lost ends the group because a member has died. The tripwire calls it.
func (h *Host) lost(member int) { h.c.Group.Fail(frame.Gone(errDied, h.Ranks[member])) }

// Left records that a rank has left the group and calls no more operations.
func (h *Host) Left(rank int) {
	if i := slices.Index(h.Ranks, rank); i >= 0 {
		h.member.Gone(i)
	}
}

// Whole reports whether the group has no ranks on other hosts.
func (h *Host) Whole() bool { return len(h.Ranks) == h.c.Size }

// Close releases the memory, once the operation in progress has ended. The group has failed or is
// being closed. A nil Host is ignored.
func (h *Host) Close() {
	if h == nil {
		return
	}
	h.use.Lock()
	defer h.use.Unlock()
	if !h.closed {
		h.closed = true
		h.member.Close()
	}
}

// Abort ends the operation in progress, and later ones.
func (h *Host) Abort() { h.member.Abort() }

// Failure returns an error if the memory cannot be used any more because another rank has given up
// an operation.
func (h *Host) Failure() error {
	if !h.member.Aborted() {
		return nil
	}
	return h.outcome(context.Background(), operation.Descriptor{}, shm.ErrAborted)
}

// Within runs body in the memory of the ranks of this host.
func (h *Host) Within(ctx context.Context, d operation.Descriptor, body func(*shm.Member, shm.Desc) error) error {
	h.use.Lock()
	defer h.use.Unlock()
	if h.closed {
		return h.c.Lost()
	}
	if err := body(h.member, sharedCall(d)); err != nil {
		return h.outcome(ctx, d, err)
	}
	return nil
}

// Arrive begins an operation that continues over sockets: the ranks of this host compare their
// calls first.
func (h *Host) Arrive(ctx context.Context, d operation.Descriptor) error {
	return h.Within(ctx, d, func(m *shm.Member, call shm.Desc) error { return m.Barrier(ctx, call) })
}

// mostGathered bounds the number of bytes that one rank may announce by the machine's memory, which
// must contain all of them.
var mostGathered = sync.OnceValue(func() int {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 1 << 40
	}
	return int(min(uint64(info.Totalram+info.Totalswap)*uint64(info.Unit), math.MaxInt))
})

// Place returns the function that makes the buffers for the data of the other ranks of the host.
// make returns the buffer for a number of elements of a rank.
func (h *Host) Place(d operation.Descriptor, make func(rank, elements int) []byte) func([]int) ([][]byte, error) {
	return func(lengths []int) ([][]byte, error) {
		size := d.Type.Size()
		var all [][]byte
		for rank, n := range lengths {
			if n%size != 0 || n > mostGathered() {
				return nil, fmt.Errorf("rank %d: %w", rank, exchange.ErrTooLarge)
			}
			var b []byte
			if rank != h.c.Rank {
				b = make(rank, n/size)
			}
			all = append(all, b)
		}
		return all, nil
	}
}

// parts cuts data, which consists of units of size bytes, into one part for each rank. The result
// is valid until the next call.
func (h *Host) parts(data []byte, size int) [][]byte {
	return h.Cuts(len(h.Ranks), func(i int) []byte { return kernel.Part(data, size, len(h.Ranks), i) })
}

// Reduction returns the reduction of data of a type. If other hosts take part, it does not finish
// the result, for instance by a division.
func (h *Host) Reduction(t kernel.Type, op operation.Op) *shm.Reduction {
	r := &h.reductions[t][op]
	if r.Combine == nil {
		*r = shm.Reduction{Size: t.Size(), Combine: kernel.Combine(t, operation.Kernels[op])}
		if op == operation.Average && h.Whole() {
			divide := kernel.Divide(t)
			r.Finish = func(b []byte) { divide(b, h.c.Contributing()) }
		}
		if (operation.Descriptor{Type: t, Op: op}).Means() {
			r.Mean = func(dst []byte, operands [][]byte) {
				by := kernel.Fold(len(operands))
				if h.Whole() {
					by = h.c.Contributing()
				}
				kernel.Mean(t, dst, operands, nil, by)
			}
		}
	}
	return r
}

// sharedCall returns the call as compared by package shm.
func sharedCall(d operation.Descriptor) shm.Desc {
	switch d.Action {
	case operation.AllGather, operation.AllToAll, operation.BroadcastBytes:
		d.Count = 0 // lengths may differ
	}
	call := d.Call()
	return shm.Desc{call.What, call.Count}
}

// outcome converts an error of an operation in shared memory into an error of the group, and ends
// the group.
func (h *Host) outcome(ctx context.Context, d operation.Descriptor, err error) error {
	var mismatch *shm.MismatchError
	var left *shm.LeftError
	switch {
	case errors.As(err, &mismatch):
		other := frame.Call{What: mismatch.Desc[0], Count: mismatch.Desc[1]}
		h.c.Group.Fail(frame.Mismatched(h.c.Rank, d.Call(), h.Ranks[mismatch.Member], other))
	case errors.As(err, &left):
		h.c.Group.Fail(frame.Gone(frame.ErrLeft, h.Ranks[left.Member]))
	case errors.Is(err, shm.ErrAborted):
		if i, is := h.member.Dead(); is {
			h.lost(i)
			break
		}
		// A control channel reports the rank and its reason.
		timer := time.NewTimer(reasonBound)
		defer timer.Stop()
		select {
		case <-h.c.Failed:
		case <-timer.C:
			h.c.Group.Fail(frame.Gone(errStopped))
		}
	case ctx.Err() != nil:
		h.c.Group.Fail(frame.Gone(ctx.Err(), h.c.Rank))
		<-h.c.Failed
		return d.Action.Wrap(ctx.Err())
	default:
		h.c.Group.Fail(frame.Gone(err, h.c.Rank))
	}
	return h.c.Lost()
}

const (
	invitationSize = 128         // size of the frame that contains an invitation
	reasonBound    = time.Second // longest time from the abort in shared memory until the reason is known
)

var (
	errDied    = errors.New("its process has ended")
	errStopped = errors.New("a rank of this host has ended the group without a reason")

	// ErrNotWanted reports that shared memory is disabled on a rank.
	ErrNotWanted = errors.New("shared memory is turned off")
	// ErrNotShared reports that the first rank of the host, which logs the reason, shares no
	// memory.
	ErrNotShared = errors.New("it has no segment to share")
)

// Watch makes the member measure its phases, and returns the time at which the operation begins.
func (h *Host) Watch() time.Time {
	h.use.Lock()
	defer h.use.Unlock()
	h.phases = shm.Times{}
	begins := time.Now() // before the first phase, so that it covers all of them
	h.member.Watch(&h.phases)
	return begins
}

// Watched ends Watch, and returns the duration of each phase.
func (h *Host) Watched() shm.Times {
	h.use.Lock()
	defer h.use.Unlock()
	h.member.Watch(nil)
	return h.phases
}

// Waited returns the result of [shm.Member.Waited].
func (h *Host) Waited() time.Duration { return h.member.Waited() }

// Posts reports whether a message of n bytes can be posted without waiting for its receiver.
func (h *Host) Posts(n int) bool {
	h.use.Lock()
	defer h.use.Unlock()
	return !h.closed && h.member.Posts(n)
}

// Awaits reports whether a member already waits for a message.
func (h *Host) Awaits(member int) bool {
	h.use.Lock()
	defer h.use.Unlock()
	return !h.closed && h.member.Awaits(member)
}

// Cuts returns the parts of n ranks. The result is valid until the next call.
func (h *Host) Cuts(n int, part func(rank int) []byte) [][]byte {
	h.cut = slices.Grow(h.cut[:0], n)[:n]
	for i := range h.cut {
		h.cut[i] = part(i)
	}
	return h.cut
}
