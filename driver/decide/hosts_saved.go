package decide

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// hostsState is all that a hostTable remembers, to be written down: restoreHosts makes the same
// table of it.
type hostsState struct {
	Listed  []plan.Host  `json:"listed,omitempty"` // oldest first
	Records []hostRecord `json:"records,omitempty"`
	Holds   []hold       `json:"holds,omitempty"`
}

// hostRecord is what is held against a slot, or where Slot is nil a host, for failures.
type hostRecord struct {
	Host string `json:"host"`
	Slot *int   `json:"slot,omitempty"`
	// Out: it is excluded, and Expire has not told the end of that. Until is when its last
	// exclusion ends.
	Out   bool      `json:"out,omitempty"`
	Until time.Time `json:"until,omitzero"`
	// Doublings of CooldownMin is what the next exclusion has, before decay.
	Doublings int `json:"doublings,omitempty"`
}

// State returns what h remembers, in an order that depends on nothing else.
func (h *hostTable) State() hostsState {
	s := hostsState{Listed: slices.Clone(h.listed)}
	for name, r := range h.hosts {
		s.Records = append(s.Records, hostRecord{name, nil, r.out, r.until, r.doublings})
	}
	for id, r := range h.slots {
		s.Records = append(s.Records, hostRecord{id.Host, new(id.Index), r.out, r.until, r.doublings})
	}
	for _, hold := range h.holds {
		s.Holds = append(s.Holds, hold)
	}
	slices.SortFunc(s.Records, func(a, b hostRecord) int { return keyOf(a.Host, a.Slot).compare(keyOf(b.Host, b.Slot)) })
	slices.SortFunc(s.Holds, func(a, b hold) int { return keyOf(a.Host, a.Slot).compare(keyOf(b.Host, b.Slot)) })
	return s
}

// maxDoublings is more than any delay takes to its greatest.
const maxDoublings = 64

// restoreHosts returns a table that remembers what the state says, or what is wrong with that. It
// owns the state.
func restoreHosts(cfg cooldowns, s hostsState) (*hostTable, error) {
	h := newHosts(cfg)
	if err := plan.CheckHosts(s.Listed); err != nil {
		return nil, fmt.Errorf("discovery: the hosts that were listed: %w", err)
	}
	h.listed = s.Listed
	h.changes = 1 // nobody has seen what is available
	for _, r := range s.Records {
		to := &penalty{out: r.Out, until: r.Until, doublings: r.Doublings}
		switch {
		case r.Doublings < 0 || r.Doublings > maxDoublings || r.Slot != nil && *r.Slot < 0:
			return nil, errors.New("discovery: the record of a host is not valid")
		case r.Slot == nil:
			h.hosts[r.Host] = to
		default:
			h.slots[plan.SlotID{Host: r.Host, Index: *r.Slot}] = to
		}
	}
	for _, hold := range s.Holds {
		h.holds[keyOf(hold.Host, hold.Slot)] = hold
	}
	return h, nil
}
