package hosts

import (
	"cmp"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// Hold keeps workers out of a slot or a whole host at an operator's command, whatever its penalty.
type Hold struct {
	Host string
	// Slot is the index of the slot; nil: the whole host, including slots added later.
	Slot *int
	// Until is when the hold ends; zero: at Readmit.
	Until time.Time
	// WhileListed ends the hold also when the host is no longer listed.
	WhileListed bool
}

// holdKey identifies a slot by host and index, or a whole host by index -1.
type holdKey struct {
	host string
	slot int
}

func keyOf(host string, slot *int) holdKey {
	if slot == nil {
		return holdKey{host, -1}
	}
	return holdKey{host, *slot}
}

// compare orders by host name, a whole host before its slots.
func (k holdKey) compare(other holdKey) int {
	return cmp.Or(cmp.Compare(k.host, other.host), cmp.Compare(k.slot, other.slot))
}

func (k holdKey) index() *int {
	if k.slot < 0 {
		return nil
	}
	return new(k.slot)
}

// Hold adds a hold, replacing one of the same slot or host.
func (h *Table) Hold(hold Hold) {
	h.changes++
	h.holds[keyOf(hold.Host, hold.Slot)] = hold
}

// Held returns the hold on the slot's host, or else on the slot; false if neither is held.
func (h *Table) Held(now time.Time, id plan.SlotID) (Hold, bool) {
	for _, k := range []holdKey{{id.Host, -1}, {id.Host, id.Index}} {
		if h.isHeld(k, now) {
			return h.holds[k], true
		}
	}
	return Hold{}, false
}

// HostHeld returns the hold on the whole host; false if it is not held.
func (h *Table) HostHeld(now time.Time, host string) (Hold, bool) {
	k := holdKey{host, -1}
	return h.holds[k], h.isHeld(k, now)
}

// Readmit ends the exclusion and hold of the slot, or if slot is nil those of the host and all its
// slots, and deletes their penalties. It returns what has ended. A host that was out as a whole
// becomes the youngest. A slot of a host that is out as a whole stays out.
func (h *Table) Readmit(now time.Time, host string, slot *int) []Exclusion {
	h.changes++
	h.listed = h.orderAt(now) // must precede the changes below: it depends on who was out
	var ended []Exclusion
	end := func(k holdKey, r *penalty) {
		if !h.isHeld(k, now) && !h.isOut(r, now) {
			return
		}
		ended = append(ended, Exclusion{Host: k.host, Slot: k.index(), Until: now})
		if k.slot < 0 {
			h.makeYoungest(k.host)
		}
	}
	whole := keyOf(host, slot)
	if slot == nil {
		end(whole, h.hosts[host])
		delete(h.hosts, host)
	}
	for id, r := range h.slots {
		if k := (holdKey{id.Host, id.Index}); id.Host == host && (slot == nil || k == whole) {
			end(k, r)
			delete(h.slots, id)
			delete(h.holds, k)
		}
	}
	for k := range h.holds {
		if k.host == host && (slot == nil || k == whole) {
			if k.slot >= 0 || slot != nil {
				end(k, nil)
			}
			delete(h.holds, k)
		}
	}
	slices.SortFunc(ended, func(a, b Exclusion) int { return cmp.Compare(index(a), index(b)) })
	return ended
}

// Excluded returns the Exclusion of the slot's host, or else of the slot; false if neither is out.
func (h *Table) Excluded(now time.Time, id plan.SlotID) (Exclusion, bool) {
	if r := h.hosts[id.Host]; h.isOut(r, now) {
		return h.exclusion(id.Host, nil, r), true
	}
	if r := h.slots[id]; h.isOut(r, now) {
		return h.exclusion(id.Host, &id.Index, r), true
	}
	return Exclusion{}, false
}

func (h *Table) makeYoungest(name string) {
	i := slices.IndexFunc(h.listed, func(host plan.Host) bool { return host.Name == name })
	if i >= 0 {
		host := h.listed[i]
		h.listed = append(slices.Delete(h.listed, i, i+1), host)
	}
}

func (h *Table) isHeld(k holdKey, now time.Time) bool {
	hold, ok := h.holds[k]
	return ok && !hold.over(now)
}

func (o Hold) over(now time.Time) bool { return !o.Until.IsZero() && !now.Before(o.Until) }

// expireHolds deletes the holds that have ended and returns those whose slot or host has no
// exclusion.
func (h *Table) expireHolds(now time.Time) []Exclusion {
	var ended []Exclusion
	for k, hold := range h.holds {
		if !hold.over(now) {
			continue
		}
		delete(h.holds, k)
		if r := h.recordAt(k); r == nil || !r.Out { // otherwise the exclusion's end is reported
			ended = append(ended, Exclusion{Host: k.host, Slot: k.index(), Until: hold.Until})
		}
	}
	return ended
}

func (h *Table) recordAt(k holdKey) *penalty {
	if k.slot < 0 {
		return h.hosts[k.host]
	}
	return h.slots[plan.SlotID{Host: k.host, Index: k.slot}]
}

// dropHolds deletes the holds that have WhileListed set and whose hosts are not listed.
func (h *Table) dropHolds(listed map[string]plan.Host) {
	for k, hold := range h.holds {
		if _, stays := listed[k.host]; hold.WhileListed && !stays {
			delete(h.holds, k)
		}
	}
}

// outAsWhole returns when the exclusion or hold of the whole host ends; zero if it is not out, or
// it has no end.
func (h *Table) outAsWhole(name string) (until time.Time) {
	if r := h.hosts[name]; r != nil && r.Out && !h.cfg.Forever {
		until = r.Until
	} else if r != nil && r.Out {
		return time.Time{}
	}
	if hold, ok := h.holds[holdKey{name, -1}]; ok {
		if hold.Until.IsZero() {
			return time.Time{}
		}
		if hold.Until.After(until) {
			until = hold.Until
		}
	}
	return until
}
