package hosts

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// State is the state of a Table in a journal.
type State struct {
	Listed  []plan.Host `json:"listed,omitempty"` // oldest first
	Records []Record    `json:"records,omitempty"`
	Holds   []Hold      `json:"holds,omitempty"`
}

// Record is the penalty record of a slot, or of a whole host if Slot is nil.
type Record struct {
	Host string `json:"host"`
	Slot *int   `json:"slot,omitempty"`
	// Out: the slot or host is excluded, and Expire has not reported that this has ended. Until is
	// when its last exclusion ends.
	Out   bool      `json:"out,omitempty"`
	Until time.Time `json:"until,omitzero"`
	// Doublings is the number of doublings of CooldownMin for the next exclusion, before decay.
	Doublings int `json:"doublings,omitempty"`
	// Enders are functions whose tasks were running when workers ended there. Apart is the number
	// of ends by functions that had not ended a worker there before, and EndedAt the time of the
	// last end.
	Enders  []string  `json:"enders,omitempty"`
	Apart   int       `json:"apart,omitempty"`
	EndedAt time.Time `json:"ended_at,omitzero"`
}

// State returns the state of h in a deterministic order.
func (h *Table) State() State {
	s := State{Listed: slices.Clone(h.listed)}
	for name, r := range h.hosts {
		s.Records = append(s.Records, Record{name, nil, r.out, r.until, r.doublings, nil, 0, time.Time{}})
	}
	for id, r := range h.slots {
		s.Records = append(s.Records, Record{id.Host, new(id.Index), r.out, r.until, r.doublings, slices.Clone(r.names), r.apart, r.at})
	}
	for _, hold := range h.holds {
		s.Holds = append(s.Holds, hold)
	}
	slices.SortFunc(s.Records, func(a, b Record) int { return keyOf(a.Host, a.Slot).compare(keyOf(b.Host, b.Slot)) })
	slices.SortFunc(s.Holds, func(a, b Hold) int { return keyOf(a.Host, a.Slot).compare(keyOf(b.Host, b.Slot)) })
	return s
}

// maxDoublings exceeds every number of doublings that CooldownMax permits.
const maxDoublings = 64

// Restore returns a table with the given state, which it owns from then on.
func Restore(cfg Cooldowns, s State) (*Table, error) {
	h := New(cfg)
	if err := plan.CheckHosts(s.Listed); err != nil {
		return nil, fmt.Errorf("hosts: the listed hosts: %w", err)
	}
	h.listed = s.Listed
	h.changes = 1 // not 0, so that results cached by Changes are invalid
	for _, r := range s.Records {
		to := &penalty{out: r.Out, until: r.Until, doublings: r.Doublings, enders: enders{r.Enders, r.Apart, r.EndedAt}}
		switch {
		case r.Doublings < 0 || r.Doublings > maxDoublings || r.Apart < 0 || len(r.Enders) > mostEnderNames || r.Slot != nil && *r.Slot < 0:
			return nil, errors.New("hosts: the record of a host is not valid")
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
