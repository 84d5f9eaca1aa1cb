package collective

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

const (
	invitationSize = 128         // of the frame that holds one
	reasonBound    = time.Second // longest from the end of the operations in shared memory until the reason is known
)

var (
	errDied    = errors.New("its process has ended")
	errStopped = errors.New("a rank of this host has ended the group, and did not say why")

	errNotWanted = errors.New("shared memory is turned off")
	errNotShared = errors.New("it has no segment to share")
)

const noMemory = "collective: no shared memory with the other ranks of this host, sockets instead"

// toldNoMemory: this process has warned. What keeps one group from shared memory keeps the next.
var toldNoMemory atomic.Bool

// host is the ranks of a group that share memory with this one.
type host struct {
	g      *Group
	member *shm.Member
	ranks  []int // of the group, by member

	use        sync.Mutex // held by the operation under way, and while the memory is given up
	closed     bool
	phases     shm.Times                                  // of the operation under way, where there is a timeline
	reductions [kernel.Types][operation.Ops]shm.Reduction // those that have been used
	cut        [][]byte                                   // see parts
}

// hosts finds which ranks of a group are on which host. names are the hosts of all ranks of the
// generation; a rank whose host is not known is alone. Each list is ascending, the lists are in the
// order of their first ranks.
func hosts(g *Group, names []string) [][]int {
	var all [][]int
	at := map[string]int{}
	for r := range g.size {
		name := ""
		if o := g.original(r); o < len(names) {
			name = names[o]
		}
		i, known := at[name]
		if !known || name == "" {
			at[name] = len(all)
			all = append(all, []int{r})
			continue
		}
		all[i] = append(all[i], r)
	}
	return all
}

// share connects the ranks of each host by shared memory. It is an operation of all ranks, the
// first one of a group. Where not all ranks of a host can, they go on without; every rank learns
// which hosts can.
func (g *Group) share(ctx context.Context) error {
	all := hosts(g, g.family.Hosts)
	if len(all) == g.size || len(all) == 0 {
		return nil
	}
	here := slices.IndexFunc(all, func(ranks []int) bool { return slices.Contains(ranks, g.rank) })
	h := &host{g: g, ranks: all[here]}
	met := make([]uint8, g.size) // by rank: 0, or 1 where it is in the memory of its host, 2 where it shares a core there
	d := operation.Descriptor{Action: operation.Share, Type: kernel.Uint8, Op: operation.Max, Count: uint64(g.size)}
	var refused error
	err := g.run(ctx, d, nil, func(c *levelCall) error {
		if len(h.ranks) > 1 {
			if refused = h.meet(c, !g.family.onlySockets); refused == nil {
				met[g.rank] = 1
				if len(h.ranks) > runtime.NumCPU() {
					met[g.rank] = 2
				}
			} else if g.err() != nil {
				return c.Lost()
			}
		}
		return c.Disseminate(met)
	})
	together := func(ranks []int) bool {
		return len(ranks) > 1 && !slices.ContainsFunc(ranks, func(r int) bool { return met[r] == 0 })
	}
	if h.member != nil && (err != nil || !together(h.ranks)) {
		h.member.Close()
		h.member = nil
	}
	if err != nil {
		return err
	}
	if refused != nil && !errors.Is(refused, errNotWanted) {
		log := g.family.log.WithError(refused)
		if errors.Is(refused, errNotShared) || toldNoMemory.Swap(true) { // its first rank has said why, or an earlier group
			log.Debug(noMemory)
		} else {
			log.Warn(noMemory)
		}
	}
	if h.member != nil {
		g.call.host.Store(h)
		if g.err() != nil {
			h.member.Abort()
		}
		for _, r := range h.ranks {
			if g.call.Boxes[r].HasEnded() {
				h.left(r)
			}
		}
	}
	if len(all) > 1 && !slices.ContainsFunc(all, func(ranks []int) bool { return len(ranks) > 1 && !together(ranks) }) {
		g.call.levels = newHierarchy(all, g.rank)
		g.call.levels.crowded = slices.Contains(met, 2)
	}
	if g.call.levels != nil || h.member != nil && h.whole() {
		g.call.adasum = newAdasumTree(all, here)
	}
	return nil
}

// meet makes or opens the host's segment and joins it. The first rank makes it, and the others pass
// on where it is; where the first cannot join, it alone says why.
func (h *host) meet(c *levelCall, wanted bool) (err error) {
	var segment *shm.Segment
	var member *shm.Member
	invitation := make([]byte, invitationSize)
	me := slices.Index(h.ranks, c.Rank)
	parent, children := exchange.Tree(me, len(h.ranks), 0)
	pass := func() error {
		for _, child := range children {
			c.Send(h.ranks[child], 0, invitation)
		}
		return c.Flush()
	}
	if parent < 0 {
		if !wanted {
			err = errNotWanted
		} else if segment, err = shm.Create(len(h.ranks)); err == nil {
			text := segment.Invitation()
			if member, err = segment.Join(me, h.lost); err == nil {
				invitation[0] = byte(len(text))
				copy(invitation[1:], text)
			}
		}
		if failed := pass(); failed != nil && err == nil {
			member.Close()
			return failed
		}
	} else {
		if err = c.Receive(h.ranks[parent], 0, invitation); err != nil {
			return err
		}
		if err = pass(); err != nil {
			return err
		}
		n := int(invitation[0])
		switch {
		case !wanted:
			return errNotWanted
		case n == 0 || n >= invitationSize:
			return fmt.Errorf("rank %d: %w", h.ranks[0], errNotShared)
		}
		segment, err = shm.Open(invitation[1:1+n], len(h.ranks))
	}
	if err != nil {
		return err
	}
	if member == nil {
		if member, err = segment.Join(me, h.lost); err != nil {
			return err
		}
	}
	if h.member = member; !h.whole() || c.Strict {
		// Frames move only while the operation drives the sockets. A rank of another host may wait
		// for those of this one, while the rank that is waited for here waits for that one.
		member.Meanwhile(c.Meanwhile)
	}
	return nil
}

// lost is called by the tripwire when a member has died.
func (h *host) lost(member int) { h.g.fail(frame.Gone(errDied, h.ranks[member])) }

// left notes that a rank has left the group: it calls no more operations.
func (h *host) left(rank int) {
	if i := slices.Index(h.ranks, rank); i >= 0 {
		h.member.Gone(i)
	}
}

// whole reports whether the group has no ranks on other hosts.
func (h *host) whole() bool { return len(h.ranks) == h.g.size }

// close gives the memory up, once the operation under way has ended: the group has failed or is
// being closed.
func (h *host) close() {
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

// within runs body in the memory of the ranks of this host.
func (h *host) within(ctx context.Context, d operation.Descriptor, body func(*shm.Member, shm.Desc) error) error {
	h.use.Lock()
	defer h.use.Unlock()
	if h.closed {
		return h.g.lost()
	}
	if err := body(h.member, sharedCall(d)); err != nil {
		return h.outcome(ctx, d, err)
	}
	return nil
}

// arrive begins an operation that goes on over sockets: the ranks of this host compare their calls
// first.
func (h *host) arrive(ctx context.Context, d operation.Descriptor) error {
	return h.within(ctx, d, func(m *shm.Member, call shm.Desc) error { return m.Barrier(ctx, call) })
}

// inMemory returns the ranks of this host if they are all of the group.
func (g *Group) inMemory() *host {
	if g == nil {
		return nil
	}
	if h := g.call.host.Load(); h != nil && h.whole() {
		return h
	}
	return nil
}

// do runs an operation among the ranks of one host, in their memory alone.
func (h *host) do(ctx context.Context, d operation.Descriptor, invalid error, body func(*shm.Member, shm.Desc) error) error {
	d = d.Judged(invalid)
	if err := h.g.enter(d.Action); err != nil {
		return err
	}
	defer h.g.free()
	if h.g.family.timeline != nil {
		defer h.recordPhases(d, h.watch())
	}
	if invalid != nil {
		if err := h.arrive(ctx, d); err != nil {
			return err
		}
		return d.Refuse(invalid)
	}
	tally := h.g.family.tally
	if tally == nil {
		return h.within(ctx, d, body)
	}
	begun := tally.now()
	err := h.within(ctx, d, body)
	if err == nil {
		tally.note(h.g.noted(d.Action), d.Bytes(), begun, operation.InMemory)
	}
	return err
}

// phaseNames are what the timeline calls the phases.
var phaseNames = [...]string{shm.CopyingIn: "copy-in", shm.Waiting: "wait", shm.Reducing: "reduce", shm.CopyingOut: "copy-out"}

// watch has the member measure its phases, and returns when the operation begins.
func (h *host) watch() time.Time {
	h.use.Lock()
	defer h.use.Unlock()
	h.phases = shm.Times{}
	begins := time.Now() // before the first phase, so that there is room for all of them
	h.member.Watch(&h.phases)
	return begins
}

// recordPhases tells the timeline of an operation that has begun then and ends now, and of its
// phases. Large data goes through the memory in many rounds: the phases are told one behind the
// other, each with the time that it took in all rounds.
func (h *host) recordPhases(d operation.Descriptor, begun time.Time) {
	ends := time.Now()
	h.g.record(d, begun, operation.InMemory)
	h.use.Lock()
	h.member.Watch(nil)
	phases := h.phases
	h.use.Unlock()
	at := begun
	for i, name := range phaseNames {
		took := min(phases[i], ends.Sub(at))
		if took <= 0 {
			continue
		}
		h.g.family.timeline.Span(Span{Name: h.g.noted(d.Action).String(), Phase: name, Lane: h.g.lane, Generation: h.g.generation,
			Start: at, Duration: took, Bytes: d.Bytes()})
		at = at.Add(took)
	}
}

// allReduceShared is AllReduce among the ranks of one host.
func (h *host) allReduceShared(ctx context.Context, d operation.Descriptor, invalid error, data []byte) error {
	return h.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
		return m.AllReduce(ctx, call, data, h.reduction(d.Type, d.Op))
	})
}

// allGatherShared is AllGather among the ranks of one host; make makes the buffers for so many
// elements.
func (h *host) allGatherShared(ctx context.Context, d operation.Descriptor, invalid error, own []byte, make func(rank, elements int) []byte) error {
	return h.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
		return m.AllGather(ctx, call, own, h.place(d, make))
	})
}

// allToAllShared is AllToAll among the ranks of one host.
func (h *host) allToAllShared(ctx context.Context, d operation.Descriptor, invalid error, parts [][]byte, make func(rank, elements int) []byte) error {
	return h.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
		return m.AllToAll(ctx, call, parts, h.place(d, make))
	})
}

// mostGathered bounds how many bytes one rank may announce: all of it is in this machine's memory.
var mostGathered = sync.OnceValue(func() int {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 1 << 40
	}
	return int(min(uint64(info.Totalram+info.Totalswap)*uint64(info.Unit), math.MaxInt))
})

func (h *host) place(d operation.Descriptor, make func(rank, elements int) []byte) func([]int) ([][]byte, error) {
	return func(lengths []int) ([][]byte, error) {
		size := d.Type.Size()
		var all [][]byte
		for rank, n := range lengths {
			if n%size != 0 || n > mostGathered() {
				return nil, fmt.Errorf("rank %d: %w", rank, exchange.ErrTooLarge)
			}
			var b []byte
			if rank != h.g.rank {
				b = make(rank, n/size)
			}
			all = append(all, b)
		}
		return all, nil
	}
}

// parts cuts data, of units of size bytes, into one part for each rank. The result is valid
// until the next call.
func (h *host) parts(data []byte, size int) [][]byte {
	h.cut = slices.Grow(h.cut[:0], len(h.ranks))[:len(h.ranks)]
	for i := range h.cut {
		h.cut[i] = kernel.Part(data, size, len(h.ranks), i)
	}
	return h.cut
}

// reduction returns how data of a type is reduced. Where other hosts have a part in it, nothing is
// to be done with the result yet.
func (h *host) reduction(t kernel.Type, op operation.Op) *shm.Reduction {
	r := &h.reductions[t][op]
	if r.Combine == nil {
		*r = shm.Reduction{Size: t.Size(), Combine: kernel.Combine(t, operation.Kernels[op])}
		if op == operation.Average && h.whole() {
			divide := kernel.Divide(t)
			r.Finish = func(b []byte) { divide(b, h.g.call.Contributing()) }
		}
		if (operation.Descriptor{Type: t, Op: op}).Means() {
			r.Mean = func(dst []byte, operands [][]byte) {
				by := kernel.Fold(len(operands))
				if h.whole() {
					by = h.g.call.Contributing()
				}
				kernel.Mean(t, dst, operands, nil, by)
			}
		}
	}
	return r
}

// sharedCall is the call as package shm compares it.
func sharedCall(d operation.Descriptor) shm.Desc {
	switch d.Action {
	case operation.AllGather, operation.AllToAll, operation.BroadcastBytes:
		d.Count = 0 // lengths may differ
	}
	call := d.Call()
	return shm.Desc{call.What, call.Count}
}

// outcome turns an error of an operation in shared memory into one of the group, which it ends.
func (h *host) outcome(ctx context.Context, d operation.Descriptor, err error) error {
	var mismatch *shm.MismatchError
	var left *shm.LeftError
	switch {
	case errors.As(err, &mismatch):
		other := frame.Call{What: mismatch.Desc[0], Count: mismatch.Desc[1]}
		h.g.fail(frame.Mismatched(h.g.rank, d.Call(), h.ranks[mismatch.Member], other))
	case errors.As(err, &left):
		h.g.fail(frame.Gone(frame.ErrLeft, h.ranks[left.Member]))
	case errors.Is(err, shm.ErrAborted):
		if i, is := h.member.Dead(); is {
			h.lost(i)
			break
		}
		// The control channels tell which rank did that.
		timer := time.NewTimer(reasonBound)
		defer timer.Stop()
		select {
		case <-h.g.call.Failed:
		case <-timer.C:
			h.g.fail(frame.Gone(errStopped))
		}
	case ctx.Err() != nil:
		h.g.fail(frame.Gone(ctx.Err(), h.g.rank))
		<-h.g.call.Failed
		return fmt.Errorf("collective: %s: %w", d.Action.String(), ctx.Err())
	default:
		h.g.fail(frame.Gone(err, h.g.rank))
	}
	return h.g.lost()
}
