package hosts

import (
	"errors"
	"fmt"
	"slices"

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
	penalty
}

// State returns the state of h in a deterministic order.
func (h *Table) State() State {
	s := State{Listed: slices.Clone(h.listed)}
	for name, r := range h.hosts {
		s.Records = append(s.Records, Record{name, nil, *r})
	}
	for id, r := range h.slots {
		kept := Record{id.Host, new(id.Index), *r}
		kept.Names = slices.Clone(r.Names)
		s.Records = append(s.Records, kept)
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
		switch {
		case r.Doublings < 0 || r.Doublings > maxDoublings || r.Apart < 0 || len(r.Names) > mostEnderNames || r.Slot != nil && *r.Slot < 0:
			return nil, errors.New("hosts: the record of a host is not valid")
		case r.Slot == nil:
			h.hosts[r.Host] = &r.penalty
		default:
			h.slots[plan.SlotID{Host: r.Host, Index: *r.Slot}] = &r.penalty
		}
	}
	for _, hold := range s.Holds {
		h.holds[keyOf(hold.Host, hold.Slot)] = hold
	}
	return h, nil
}
