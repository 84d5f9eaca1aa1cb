// Package levels runs collective operations among ranks, some of which share the memory of their
// host. An operation runs in that memory, or on two levels: in the memory of each host, and by
// frames between the hosts. A [Call] has the operations of a group, and a [Host] is the shared
// memory.
package levels

import (
	"slices"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// hierarchy is the ranks of a group by host, if the ranks of each host share memory. Operations of
// such a group have two levels: the data of the ranks of a host is combined or gathered in their
// memory, and is sent to each other host once, split among the ranks of the host. Open MPI's HAN
// and NVIDIA's 2-D all-reduce have the same structure.
//
// A wait on one level never blocks the other: a rank that waits for others in memory moves its
// frames meanwhile (Call.Meanwhile), and all ranks perform the steps of both levels in the same
// order.
type hierarchy struct {
	hosts       [][]int       // each ascending, in the order of their first ranks
	here, place int           // this rank's host, and its place there
	leaders     exchange.Team // the first ranks of all hosts, by host; this one may not be among them
	crowded     bool          // ranks of a host share cores, so that waves do not overlap there
	column      exchange.Team // the ranks with this rank's place on their hosts; empty if the hosts have unequal numbers of ranks
	weights     []int         // as in Team
}

func newHierarchy(hosts [][]int, rank int) *hierarchy {
	h := &hierarchy{hosts: hosts}
	h.here, h.place = h.find(rank)
	equal := true
	for _, ranks := range hosts {
		equal = equal && len(ranks) == len(hosts[0])
		h.weights = append(h.weights, kernel.Fold(len(ranks)))
	}
	h.leaders = h.team(func(host int) int { return hosts[host][0] })
	if equal {
		h.column = h.team(func(host int) int { return hosts[host][h.place] })
	}
	return h
}

// team returns the team of one rank of each host, by host.
func (h *hierarchy) team(rank func(host int) int) exchange.Team {
	t := exchange.Team{Size: len(h.hosts), Me: h.here, Weights: h.weights}
	for host := range h.hosts {
		t.Ranks = append(t.Ranks, rank(host))
	}
	return t
}

// ranks returns the ranks of this host.
func (h *hierarchy) ranks() []int { return h.hosts[h.here] }

// leads reports whether this rank is the first of its host.
func (h *hierarchy) leads() bool { return h.place == 0 }

// find returns a rank's host and its place there.
func (h *hierarchy) find(rank int) (host, place int) {
	for host, ranks := range h.hosts {
		if place := slices.Index(ranks, rank); place >= 0 {
			return host, place
		}
	}
	return -1, -1
}

// counterpart returns the rank of another host with which a rank at this place exchanges the data
// of the two hosts.
func (h *hierarchy) counterpart(host, place int) int {
	return h.hosts[host][place%len(h.hosts[host])]
}

// shares returns the ranks of another host whose counterpart is the rank of this host at this
// place.
func (h *hierarchy) shares(host, place int) (ranks []int) {
	for i := place; i < len(h.hosts[host]); i += len(h.ranks()) {
		ranks = append(ranks, h.hosts[host][i])
	}
	return ranks
}

// share returns element turn of shares, or −1 if there are fewer.
func (h *hierarchy) share(host, place, turn int) int {
	if at := place + turn*len(h.ranks()); at < len(h.hosts[host]) {
		return h.hosts[host][at]
	}
	return -1
}

// turns returns the largest number of ranks of another host that have the same counterpart on this
// host.
func (h *hierarchy) turns(host int) int {
	return (len(h.hosts[host]) + len(h.ranks()) - 1) / len(h.ranks())
}

// others returns the other hosts. Each host's list begins with a different host.
func (h *hierarchy) others() (hosts []int) {
	for d := 1; d < len(h.hosts); d++ {
		hosts = append(hosts, (h.here+d)%len(h.hosts))
	}
	return hosts
}

// Call is an operation of a group whose ranks may share memory.
type Call struct {
	exchange.Call
	levels    *hierarchy           // the ranks by host; nil if some ranks of a host share no memory, or there is only one host
	host      atomic.Pointer[Host] // the ranks that share memory with this one; nil if no rank does
	adasum    *adasumTree          // nil if ranks of a host share no memory
	crossings [2][]crossing        // those of the two latest waves
	folding   folder               // of a ReduceTree
	shares    hostShares           // of waves
}

// Here returns the ranks that share memory with this one, or nil if no rank does.
func (c *Call) Here() *Host { return c.host.Load() }

// TwoLevels reports whether operations have two levels.
func (c *Call) TwoLevels() bool { return c.levels != nil }

// crossing is a part of a tensor that has one owner on each host. The owners exchange it between
// the hosts.
type crossing struct {
	exchange.Team
	data   []byte
	result []byte // memory for the result: data, or memory of the same length
	unit   int    // size of a unit in bytes: data is cut only between units
	first  int    // index of its first unit in the whole tensor
	cuts   []int  // as in hostShares

	step          uint32
	sent, sentEnd int // numbers of the first send of this rank's data, and of the first send after that data
	received      int // number of the first receive of the others' data for this rank
}

// piece returns the part of the crossing's data that the owner at a place combines.
func (x *crossing) piece(place int) []byte { return x.part(x.data, place) }

// resultOf returns the memory for the result of that piece.
func (x *crossing) resultOf(place int) []byte { return x.part(x.result, place) }

func (x *crossing) part(data []byte, place int) []byte {
	if x.cuts == nil {
		return kernel.Part(data, x.unit, x.Size, place)
	}
	count, all := (len(data)+x.unit-1)/x.unit, x.cuts[x.Size]
	at := func(place int) int { return min(count*x.cuts[place]/all*x.unit, len(data)) }
	return data[at(place):at(place+1)]
}

// longest returns the length of the longest piece.
func (x *crossing) longest() (n int) {
	for place := range x.Size {
		n = max(n, len(x.piece(place)))
	}
	return n
}

// cross appends the parts of data that this rank owns: its share among the ranks of its host, cut
// wherever the owner on another host changes. data consists of units of unit bytes; the last may be
// shorter. If no ranks share memory, the only part is all of data, which all ranks own.
func (c *Call) cross(to []crossing, data []byte, unit int) []crossing {
	h := c.levels
	if h == nil {
		return append(to, crossing{Team: exchange.Team{Me: c.Rank, Size: c.Size}, data: data, result: data, unit: unit})
	}
	count := (len(data) + unit - 1) / unit
	lo, hi := kernel.Split(count, len(h.ranks()), h.place)
	between := func(t exchange.Team, lo, hi int) crossing {
		part := data[min(lo*unit, len(data)):min(hi*unit, len(data))]
		return crossing{Team: t, data: part, result: part, unit: unit, first: lo}
	}
	if h.column.Size > 0 {
		return append(to, between(h.column, lo, hi))
	}
	cuts := []int{lo, hi}
	for _, ranks := range h.hosts {
		for i := range ranks {
			if at, _ := kernel.Split(count, len(ranks), i); lo < at && at < hi {
				cuts = append(cuts, at)
			}
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	for i, from := range cuts[:len(cuts)-1] {
		t := h.team(func(host int) int { return h.owner(host, count, from) })
		to = append(to, between(t, from, cuts[i+1]))
	}
	return to
}

// owner returns the rank of a host that owns a unit, among count units.
func (h *hierarchy) owner(host, count, unit int) int {
	ranks := h.hosts[host]
	for i := range ranks {
		if _, hi := kernel.Split(count, len(ranks), i); unit < hi {
			return ranks[i]
		}
	}
	return ranks[len(ranks)-1]
}

// inMemory runs body in the memory of this host's ranks. It does nothing if this rank is alone on
// its host.
func (c *Call) inMemory(body func(*shm.Member, shm.Desc) error) error {
	h := c.host.Load()
	if h == nil {
		return nil
	}
	return h.Within(c.Ctx, c.Desc, body)
}

// spread gives each rank's part of data, which consists of units of size bytes, to all ranks of
// this host.
func (c *Call) spread(data []byte, size int) error {
	return c.inMemory(func(m *shm.Member, call shm.Desc) error {
		return m.Gather(c.Ctx, call, data, size, m.Members())
	})
}

// waves returns the number of waves into which n bytes are cut. They pass through the levels one
// after another.
func (c *Call) waves(n int) int {
	t := &operation.Thresholds
	size := min(t.Wave, max(t.LeastOfWave*c.Size, n/t.FewWaves))
	if c.levels.crowded {
		size = t.CrowdedWave
	}
	if s := c.Forced.Segment; s > 0 { // set by a test
		size = 64 * s
	}
	return max(1, (n+size-1)/size)
}

// wave returns wave i of data.
func wave(data []byte, size, waves, i int) []byte {
	return kernel.Part(data, size, waves, i)
}
