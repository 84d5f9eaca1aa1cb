package sockets

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/netif"
)

// Peers are the ranks of a generation, with their addresses.
type Peers struct {
	Number uint64           // of the generation
	Size   int              // how many ranks it has
	Self   int              // this rank
	Key    identity.DataKey // only members have the key
	Addrs  [][]string       // by rank, the result of Addrs of each rank's endpoint; this rank's entry is not used
	Hosts  []string         // by rank, the host; nil or an empty name if it is unknown
}

// Generation is the connections of a generation. [Endpoint.Generation] makes one; others are for
// ranks in one process, which have no connections.
type Generation struct {
	Peers
	groups   Groups
	conns    int                              // number of connections of the data channel between ranks of different hosts
	hurried  bool                             // a route has just broken, so dials do not wait for routes that do not answer
	undriven bool                             // operations do not drive the connections
	mesh     func(distance, size int) bool    // set by tests: replaces the rule of near
	own      func() map[netip.Addr]netif.Card // addresses of this host

	Sent   atomic.Uint64 // number of bytes that the kernel has taken on data channels
	Killed atomic.Bool   // the worker, which is a goroutine, has been killed and sends nothing any more

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

// connsBetween returns the number of connections of the data channel between two ranks: one if both
// are on one host.
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

// Lane describes which ranks are in a group of a generation.
type Lane struct {
	ID         uint64 // identifies the group within the generation; 0 for the group of all ranks
	Rank, Size int
	Members    []int // by rank, the ranks in the generation; nil if they are the same
}

// Original returns the number of a rank of the lane in the generation.
func (l *Lane) Original(rank int) int {
	if l.Members == nil {
		return rank
	}
	return l.Members[rank]
}
