package collective

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/levels"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

const noMemory = "collective: this rank shares no memory with the other ranks of its host, and uses sockets instead"

// toldNoMemory is set once this process has logged why it has no shared memory. The reason is
// mostly the same for later groups.
var toldNoMemory atomic.Bool

// share connects the ranks of each host by shared memory. It is an operation of all ranks, and the
// first one of a group. If some ranks of a host cannot share memory, the host uses none. Every rank
// learns which hosts share memory.
func (g *Group) share(ctx context.Context) error {
	hosts := levels.HostsOf(g.size, func(rank int) string {
		if o := g.original(rank); o < len(g.family.Hosts) {
			return g.family.Hosts[o]
		}
		return ""
	})
	if len(hosts) == g.size || len(hosts) == 0 {
		return nil
	}
	s := levels.NewSharing(&g.call, hosts)
	d := operation.Descriptor{Action: operation.Share, Type: kernel.Uint8, Op: operation.Max, Count: uint64(g.size)}
	if err := s.Settle(g.run(ctx, d, nil, func(*levels.Call) error { return s.Meet(!g.family.onlySockets) })); err != nil {
		return err
	}
	if s.Refused != nil && !errors.Is(s.Refused, levels.ErrNotWanted) {
		log := g.family.log.WithError(s.Refused)
		if errors.Is(s.Refused, levels.ErrNotShared) || toldNoMemory.Swap(true) { // the host's first rank, or an earlier group, has logged why
			log.Debug(noMemory)
		} else {
			log.Warn(noMemory)
		}
	}
	return nil
}

// inMemory returns the host of this rank if all ranks of the group share its memory, and otherwise
// nil.
func (g *Group) inMemory() *levels.Host {
	if g == nil {
		return nil
	}
	if h := g.call.Here(); h != nil && h.Whole() {
		return h
	}
	return nil
}

// phaseNames are the names of the phases in the timeline.
var phaseNames = [...]string{shm.CopyingIn: "copy-in", shm.Waiting: "wait", shm.Reducing: "reduce", shm.CopyingOut: "copy-out"}

// recordPhases adds an operation that began at begun and ends now to the timeline, with its phases.
// Large data is moved through the memory in many rounds: the phases are recorded one after another,
// each with its time in all rounds.
func (g *Group) recordPhases(h *levels.Host, d operation.Descriptor, begun time.Time) {
	ends := time.Now()
	g.record(d, begun, operation.InMemory)
	phases := h.Watched()
	at := begun
	for i, name := range phaseNames {
		took := min(phases[i], ends.Sub(at))
		if took <= 0 {
			continue
		}
		g.family.timeline.Span(Span{Name: g.noted(d.Action).String(), Phase: name, Lane: g.lane, Generation: g.generation,
			Start: at, Duration: took, Bytes: d.Bytes()})
		at = at.Add(took)
	}
}

// allGatherShared performs AllGather in shared memory. make returns the buffer for the elements of
// a rank.
func (g *Group) allGatherShared(ctx context.Context, h *levels.Host, d operation.Descriptor, invalid error, own []byte, make func(rank, elements int) []byte) error {
	return g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
		return m.AllGather(ctx, call, own, h.Place(d, make))
	})
}
