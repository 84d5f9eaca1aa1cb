package decide

import (
	"cmp"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

// hold says that a person keeps a slot, or a whole host, from taking workers, whatever is on its
// record.
type hold struct {
	Host string
	// Slot is the index of the slot; nil means the whole host, also slots that it gets later.
	Slot *int
	// Until is when the hold ends by itself; zero: with Readmit.
	Until time.Time
	// WhileListed makes the hold end too when the host leaves the list.
	WhileListed bool
}

// holdKey is what is held: a slot's index, or -1 for the host.
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

// compare puts hosts by name, and what is of the whole host before what is of its slots.
func (k holdKey) compare(other holdKey) int {
	return cmp.Or(cmp.Compare(k.host, other.host), cmp.Compare(k.slot, other.slot))
}

func (k holdKey) index() *int {
	if k.slot < 0 {
		return nil
	}
	return new(k.slot)
}

// Hold begins a hold, in place of one of the same slot or host.
func (h *hostTable) Hold(hold hold) {
	h.changes++
	h.holds[keyOf(hold.Host, hold.Slot)] = hold
}

// Held returns the hold that keeps the slot out, that of its host before its own; false where none
// does.
func (h *hostTable) Held(now time.Time, id plan.SlotID) (hold, bool) {
	for _, k := range []holdKey{{id.Host, -1}, {id.Host, id.Index}} {
		if h.isHeld(k, now) {
			return h.holds[k], true
		}
	}
	return hold{}, false
}

// HostHeld returns the hold on the host as a whole; false where there is none.
func (h *hostTable) HostHeld(now time.Time, host string) (hold, bool) {
	k := holdKey{host, -1}
	return h.holds[k], h.isHeld(k, now)
}

// Readmit ends all that keeps the slot out, or where slot is nil the host and all its slots, and
// forgets their failures. It returns what has ended. A host that was out as a whole is the youngest
// from now on. A slot of such a host stays out.
func (h *hostTable) Readmit(now time.Time, host string, slot *int) []exclusion {
	h.changes++
	h.listed = h.orderAt(now) // before the books forget who has been out
	var ended []exclusion
	end := func(k holdKey, r *penalty) {
		if !h.isHeld(k, now) && !h.isOut(r, now) {
			return
		}
		ended = append(ended, exclusion{Host: k.host, Slot: k.index(), Until: now})
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
	slices.SortFunc(ended, func(a, b exclusion) int { return cmp.Compare(index(a), index(b)) })
	return ended
}

// Excluded returns the exclusion for failures that keeps the slot out, that of its host before its
// own; false where none does.
func (h *hostTable) Excluded(now time.Time, id plan.SlotID) (exclusion, bool) {
	if r := h.hosts[id.Host]; h.isOut(r, now) {
		return h.exclusion(id.Host, nil, r), true
	}
	if r := h.slots[id]; h.isOut(r, now) {
		return h.exclusion(id.Host, &id.Index, r), true
	}
	return exclusion{}, false
}

func (h *hostTable) makeYoungest(name string) {
	i := slices.IndexFunc(h.listed, func(host plan.Host) bool { return host.Name == name })
	if i >= 0 {
		host := h.listed[i]
		h.listed = append(slices.Delete(h.listed, i, i+1), host)
	}
}

func (h *hostTable) isHeld(k holdKey, now time.Time) bool {
	hold, ok := h.holds[k]
	return ok && !hold.over(now)
}

func (o hold) over(now time.Time) bool { return !o.Until.IsZero() && !now.Before(o.Until) }

// expireHolds ends the holds whose time is up, and returns those of them that nothing else of the
// same slot or host outlasts.
func (h *hostTable) expireHolds(now time.Time) []exclusion {
	var ended []exclusion
	for k, hold := range h.holds {
		if !hold.over(now) {
			continue
		}
		delete(h.holds, k)
		if r := h.recordAt(k); r == nil || !r.out { // else that tells it
			ended = append(ended, exclusion{Host: k.host, Slot: k.index(), Until: hold.Until})
		}
	}
	return ended
}

func (h *hostTable) recordAt(k holdKey) *penalty {
	if k.slot < 0 {
		return h.hosts[k.host]
	}
	return h.slots[plan.SlotID{Host: k.host, Index: k.slot}]
}

// dropHolds ends the holds that last while their hosts are listed.
func (h *hostTable) dropHolds(listed map[string]plan.Host) {
	for k, hold := range h.holds {
		if _, stays := listed[k.host]; hold.WhileListed && !stays {
			delete(h.holds, k)
		}
	}
}

// outAsWhole tells when the host, which has been out as a whole, may be used again, if that is
// known; it is zero where the host has not been out, or still is with no end in sight.
func (h *hostTable) outAsWhole(name string) (until time.Time) {
	if r := h.hosts[name]; r != nil && r.out && !h.cfg.Forever {
		until = r.until
	} else if r != nil && r.out {
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
