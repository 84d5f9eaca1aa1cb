package levels

import (
	"fmt"
	"runtime"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/shm"
)

// HostsOf returns the ranks of each host, given the name of each rank's host; a rank whose host has
// no name is alone. Each list is ascending, and the lists are in the order of their first ranks.
func HostsOf(ranks int, name func(rank int) string) [][]int {
	var all [][]int
	at := map[string]int{}
	for r := range ranks {
		name := name(r)
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

// Sharing determines which ranks of a group share memory.
type Sharing struct {
	c       *Call
	hosts   [][]int
	here    int
	host    *Host
	met     []uint8 // by rank: 0 if it shares no memory, 1 if it does, 2 if it also shares a core
	Refused error   // set by Meet: the reason why this rank shares no memory, or nil
}

// NewSharing returns the Sharing of a call's group, whose ranks are on these hosts.
func NewSharing(c *Call, hosts [][]int) *Sharing {
	here := slices.IndexFunc(hosts, func(ranks []int) bool { return slices.Contains(ranks, c.Rank) })
	return &Sharing{c: c, hosts: hosts, here: here, host: &Host{c: c, Ranks: hosts[here]}, met: make([]uint8, c.Size)}
}

// Meet is an operation of all ranks, in which the ranks of a host connect by shared memory, if all
// of them want to.
func (s *Sharing) Meet(wanted bool) error {
	if len(s.host.Ranks) > 1 {
		if s.Refused = s.host.meet(wanted); s.Refused == nil {
			s.met[s.c.Rank] = 1
			if len(s.host.Ranks) > runtime.NumCPU() {
				s.met[s.c.Rank] = 2
			}
		} else if _, failed := s.c.Group.Failure(); failed {
			return s.c.Lost()
		}
	}
	return s.c.Disseminate(s.met)
}

// together reports whether some ranks share memory.
func (s *Sharing) together(ranks []int) bool {
	return len(ranks) > 1 && !slices.ContainsFunc(ranks, func(r int) bool { return s.met[r] == 0 })
}

// Settle makes the operations of the group use the shared memory of this host's ranks. It is called
// when the operation of Meet has ended with err, which it returns.
func (s *Sharing) Settle(err error) error {
	c, h := s.c, s.host
	if h.member != nil && (err != nil || !s.together(h.Ranks)) {
		h.member.Close()
		h.member = nil
	}
	if err != nil {
		return err
	}
	if h.member != nil {
		c.host.Store(h)
		if _, failed := c.Group.Failure(); failed {
			h.Abort()
		}
		for _, r := range h.Ranks {
			if c.Boxes[r].HasEnded() {
				h.Left(r)
			}
		}
	}
	if len(s.hosts) > 1 && !slices.ContainsFunc(s.hosts, func(ranks []int) bool { return len(ranks) > 1 && !s.together(ranks) }) {
		c.levels = newHierarchy(s.hosts, c.Rank)
		c.levels.crowded = slices.Contains(s.met, 2)
	}
	if c.levels != nil || h.member != nil && h.Whole() {
		c.adasum = newAdasumTree(s.hosts, s.here)
	}
	return nil
}

// meet makes or opens the host's segment and joins it. The first rank makes it and sends the
// invitation to the others. If the first rank cannot join, it alone reports why.
func (h *Host) meet(wanted bool) (err error) {
	c := h.c
	var segment *shm.Segment
	var member *shm.Member
	invitation := make([]byte, invitationSize)
	me := slices.Index(h.Ranks, c.Rank)
	parent, children := exchange.Tree(me, len(h.Ranks), 0)
	pass := func() error {
		for _, child := range children {
			c.Send(h.Ranks[child], 0, invitation)
		}
		return c.Flush()
	}
	if parent < 0 {
		if !wanted {
			err = ErrNotWanted
		} else if segment, err = shm.Create(len(h.Ranks)); err == nil {
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
		if err = c.Receive(h.Ranks[parent], 0, invitation); err != nil {
			return err
		}
		if err = pass(); err != nil {
			return err
		}
		n := int(invitation[0])
		switch {
		case !wanted:
			return ErrNotWanted
		case n == 0 || n >= invitationSize:
			return fmt.Errorf("rank %d: %w", h.Ranks[0], ErrNotShared)
		}
		segment, err = shm.Open(invitation[1:1+n], len(h.Ranks))
	}
	if err != nil {
		return err
	}
	if member == nil {
		if member, err = segment.Join(me, h.lost); err != nil {
			return err
		}
	}
	if h.member = member; !h.Whole() || c.Strict {
		// While this rank waits for a second one in memory, that may wait for a rank of another
		// host, which waits for frames of this rank.
		member.Meanwhile(c.Meanwhile)
	}
	if h.Whole() {
		member.Met(c.Met)
	}
	return nil
}
