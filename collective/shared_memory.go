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

const noMemory = "collective: no shared memory with the other ranks of this host, sockets instead"

// toldNoMemory: this process has warned. What keeps one group from shared memory keeps the next.
var toldNoMemory atomic.Bool

// share connects the ranks of each host by shared memory. It is an operation of all ranks, the
// first one of a group. Where not all ranks of a host can, they go on without; every rank learns
// which hosts can.
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
		if errors.Is(s.Refused, levels.ErrNotShared) || toldNoMemory.Swap(true) { // its first rank has said why, or an earlier group
			log.Debug(noMemory)
		} else {
			log.Warn(noMemory)
		}
	}
	return nil
}

// inMemory returns the ranks of this host if they are all of the group.
func (g *Group) inMemory() *levels.Host {
	if g == nil {
		return nil
	}
	if h := g.call.Here(); h != nil && h.Whole() {
		return h
	}
	return nil
}

// phaseNames are what the timeline calls the phases.
var phaseNames = [...]string{shm.CopyingIn: "copy-in", shm.Waiting: "wait", shm.Reducing: "reduce", shm.CopyingOut: "copy-out"}

// recordPhases tells the timeline of an operation that has begun then and ends now, and of its
// phases. Large data goes through the memory in many rounds: the phases are told one behind the
// other, each with the time that it took in all rounds.
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

// allGatherShared is AllGather among the ranks of one host; make makes the buffers for so many
// elements.
func (g *Group) allGatherShared(ctx context.Context, h *levels.Host, d operation.Descriptor, invalid error, own []byte, make func(rank, elements int) []byte) error {
	return g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
		return m.AllGather(ctx, call, own, h.Place(d, make))
	})
}

// allToAllShared is AllToAll among the ranks of one host.
func (g *Group) allToAllShared(ctx context.Context, h *levels.Host, d operation.Descriptor, invalid error, parts [][]byte, make func(rank, elements int) []byte) error {
	return g.do(ctx, d, invalid, func(m *shm.Member, call shm.Desc) error {
		return m.AllToAll(ctx, call, parts, h.Place(d, make))
	})
}
