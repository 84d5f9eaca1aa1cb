package sockets

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/netif"
)

// Peers are the ranks of a generation, and how to reach them.
type Peers struct {
	Number uint64           // of the generation
	Size   int              // how many ranks it has
	Self   int              // this rank
	Key    identity.DataKey // every member has it, and nobody else
	Addrs  [][]string       // by rank: what Addrs of their endpoints returned; the own entry is not used
	Hosts  []string         // by rank; nil, or empty names: not known
}

// Generation is the connections of a generation. [Endpoint.Generation] makes one that has any; the
// others are those of the ranks of one process.
type Generation struct {
	Peers
	groups   Groups
	conns    int                              // connections of the data channel of ranks of different hosts
	hurried  bool                             // a route has just broken: those that do not answer are not waited for
	undriven bool                             // operations do not drive the connections
	mesh     func(distance, size int) bool    // replaces near's rule in tests; nil: the rule holds
	own      func() map[netip.Addr]netif.Card // addresses of this host

	Sent   atomic.Uint64 // bytes that the kernel has taken on data channels
	Killed atomic.Bool   // the worker, a goroutine, has been killed: it sends nothing any more

	mu   sync.Mutex
	lost []lostConn
}

// Generation prepares to connect the ranks of a generation.
func (e *Endpoint) Generation(p Peers, groups Groups) *Generation {
	return &Generation{
		Peers: p, groups: groups, conns: e.cfg.Connections, hurried: e.survived(p.Addrs), mesh: e.mesh,
		undriven: e.cfg.Encrypt || e.cfg.Network.Dial != nil, own: sync.OnceValue(netif.Own),
	}
}

// connsBetween is how many connections the data channel of two ranks has: one where nothing but
// this host's memory lies between them.
func (f *Generation) connsBetween(a, b int) int {
	if f.sameHost(a, b) {
		return 1
	}
	return f.conns
}

// sameHost reports whether two ranks are known to be on one host.
func (f *Generation) sameHost(a, b int) bool {
	return a < len(f.Hosts) && b < len(f.Hosts) && f.Hosts[a] != "" && f.Hosts[a] == f.Hosts[b]
}

// Lane is who is in a group of a generation.
type Lane struct {
	ID         uint64 // tells the group from the others; 0 for that of all ranks
	Rank, Size int
	Members    []int // by rank: the ranks of the generation; nil where these are the same
}

// Original is a rank of the lane in the numbering of the generation.
func (l *Lane) Original(rank int) int {
	if l.Members == nil {
		return rank
	}
	return l.Members[rank]
}
