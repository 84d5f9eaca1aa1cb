package collective

import (
	"context"
	"sync"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
	"github.com/hvdrun/hvdrun/collective/internal/sockets"
)

// Local returns the n groups, by rank, of n connected ranks in one process, with generation 0. Use
// each from its own goroutine. Only asynchronous operations start goroutines. If n is below 1,
// Local returns no groups.
func Local(n int) []*Group {
	w := &localWorld{families: make([]*family, max(n, 0)), lanes: map[uint64]*localLane{}}
	for i := range w.families {
		f := newFamily(&sockets.Generation{Peers: sockets.Peers{Size: n}})
		f.connect = func(_ context.Context, l lane) (*Group, error) { return w.connect(l), nil }
		f.startPeers = w.startPeers
		w.families[i] = f
	}
	groups := make([]*Group, len(w.families))
	for i := range groups {
		groups[i] = w.connect(lane{Lane: sockets.Lane{Rank: i, Size: n}})
	}
	return groups
}

// localWorld is the set of ranks of one process.
type localWorld struct {
	families []*family // by rank

	mu    sync.Mutex
	lanes map[uint64]*localLane // lanes that not every rank has connected yet
}

type localLane struct {
	groups []*Group
	absent int
}

// connect returns the group of one rank of a lane. The first rank that connects makes the groups of
// all ranks.
func (w *localWorld) connect(l lane) *Group {
	w.mu.Lock()
	all := w.lanes[l.ID]
	if all == nil {
		all = &localLane{groups: make([]*Group, l.Size), absent: l.Size}
		w.lanes[l.ID] = all
		for i := range all.groups {
			of := l
			of.Rank = i
			all.groups[i] = newGroup(w.families[l.Original(i)], of)
			if l.Size > 1 {
				all.groups[i].call.Path = &localPath{world: all.groups, rank: i}
			}
		}
		for _, g := range all.groups {
			g.family.add(g)
		}
		for _, g := range all.groups {
			g.family.catchUp(g)
		}
	}
	if all.absent--; all.absent == 0 {
		delete(w.lanes, l.ID)
	}
	w.mu.Unlock()
	return all.groups[l.Rank] // the group may have failed: its first operation reports it
}

// startPeers calls start for each rank of a connected lane of g. Ranks that have closed g leave the
// lane.
func (w *localWorld) startPeers(g, lane *Group, start func(peer *Group) error) {
	for i := range lane.size {
		f := w.families[lane.original(i)]
		peer := f.group(g.lane)
		if peer != nil && start(peer) == nil {
			continue
		}
		if l := f.group(lane.lane); l != nil && (peer == nil || peer.err() == nil) {
			l.Close()
		}
	}
}

// localPath moves frames by copying from the sender's memory to the receiver's, on the goroutine of
// whichever comes second.
type localPath struct {
	world []*Group
	rank  int
}

func (p *localPath) Send(to int, o *frame.Outgoing) { p.world[to].call.Boxes[p.rank].Deliver(o) }

func (p *localPath) Flood(n *frame.Notice) {
	for i, g := range p.world {
		if i != p.rank {
			g.failAs(*n)
		}
	}
}

func (p *localPath) Release() {}

// Quiesce cancels the requests of both kinds: requests for frames, and frames that wait at the
// sender. After a leave there are no requests, and frames kept for slower ranks must remain.
func (p *localPath) Quiesce() {
	if p.world[p.rank].err() == nil {
		return
	}
	for i, g := range p.world {
		if i != p.rank {
			p.world[p.rank].call.Boxes[i].Close()
			g.call.Boxes[p.rank].Close()
		}
	}
}

func (p *localPath) Nudge(to int, cycle uint64) { p.world[to].nudged(cycle) }

func (p *localPath) Leave() {
	for i, g := range p.world {
		if i != p.rank {
			g.call.Boxes[p.rank].End(p.world[p.rank].call.Finished.Load())
		}
	}
}
