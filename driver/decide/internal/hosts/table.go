// Package hosts keeps, beside the list of hosts that discovery returns, what that list does not
// contain: which hosts are older, and which hosts and slots take no workers because they failed or
// because an operator holds them. It is pure: callers pass the time.
package hosts

import (
	"cmp"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	defaultCooldownMin = time.Second
	defaultCooldownMax = 600 * time.Second
)

// Cooldowns sets for how long a failing slot or host is excluded.
//
// The first failure excludes for CooldownMin, each further one for twice the previous time, up to
// CooldownMax: 1, 2, 4, … without randomness. A slot that has returned loses one doubling for every
// CooldownMax without a failure.
type Cooldowns struct {
	// CooldownMin is the time of the first exclusion. 0: 1 s.
	CooldownMin time.Duration
	// CooldownMax is the longest exclusion. 0: 600 s. It is at least CooldownMin.
	CooldownMax time.Duration
	// Forever makes every exclusion last as long as the job.
	Forever bool
}

// Table keeps the age of hosts, and which hosts and slots are excluded or held. Callers pass now,
// which must not go back. A Table is not safe for concurrent use. New makes one.
//
// Exclusions end by themselves: Available already returns a slot whose exclusion has ended before
// Expire has reported it.
type Table struct {
	cfg    Cooldowns
	listed []plan.Host // oldest first
	// Penalties outlive the listing of their hosts, so that a flapping host does not start afresh.
	slots map[plan.SlotID]*penalty
	hosts map[string]*penalty
	holds map[holdKey]Hold // by operators

	changes uint64
	next    nextReturn
}

// nextReturn caches the result of NextReturn until the next change.
type nextReturn struct {
	known   bool
	changes uint64 // Table.changes of this result
	at      time.Time
	found   bool
}

// penalty is the failure record of a slot or host.
type penalty struct {
	// Out: the slot or host is excluded, and Expire has not reported that this has ended. Until is
	// when its last exclusion ends.
	Out   bool      `json:"out,omitempty"`
	Until time.Time `json:"until,omitzero"`
	// Doublings is the number of doublings of CooldownMin for the next exclusion, before decay.
	Doublings int `json:"doublings,omitempty"`
	enders
}

// enders are the functions whose tasks were running in a slot when workers ended there.
type enders struct {
	Names []string  `json:"enders,omitempty"`
	Apart int       `json:"apart,omitempty"`   // number of ends that have no function in common with earlier ones
	At    time.Time `json:"ended_at,omitzero"` // time of the last end
}

// MostEnders is the number of different functions whose tasks end workers in a slot before the slot
// is blamed.
const MostEnders = 3

// mostEnderNames bounds the names of functions kept for a slot.
const mostEnderNames = 16

// Exclusion is a slot or a whole host that takes no workers.
type Exclusion struct {
	Host string
	// Slot is the index of the slot; nil: the whole host.
	Slot *int
	// Until is when the exclusion ends; zero if Forever.
	Until   time.Time
	Forever bool
}

// New returns an empty table.
func New(cfg Cooldowns) *Table {
	if cfg.CooldownMin <= 0 {
		cfg.CooldownMin = defaultCooldownMin
	}
	if cfg.CooldownMax <= 0 {
		cfg.CooldownMax = defaultCooldownMax
	}
	cfg.CooldownMax = max(cfg.CooldownMax, cfg.CooldownMin)
	return &Table{cfg: cfg, slots: map[plan.SlotID]*penalty{}, hosts: map[string]*penalty{}, holds: map[holdKey]Hold{}}
}

// Update replaces the list of hosts, which must have passed plan.CheckHosts. Hosts that stay keep
// their age, whatever their position in the list and however their slots change; new hosts follow
// in list order. A host that was removed and returns is new.
func (h *Table) Update(now time.Time, listed []plan.Host) {
	h.changes++
	rest := make(map[string]plan.Host, len(listed)) // hosts that are not in order yet
	for _, host := range listed {
		rest[host.Name] = host
	}
	h.dropHolds(rest)
	order := make([]plan.Host, 0, len(listed))
	add := func(name string) {
		if host, is := rest[name]; is {
			order = append(order, host)
			delete(rest, name)
		}
	}
	for _, host := range h.listed {
		add(host.Name)
	}
	for _, host := range listed {
		add(host.Name)
	}
	h.listed = order
	h.forget(now)
}

// usable returns how many of the host's slots can take workers, exclusions aside.
func usable(host plan.Host) int {
	if host.Draining {
		return 0
	}
	return host.Slots
}

// Listed returns all hosts of the last list, oldest first.
func (h *Table) Listed() []plan.Host { return slices.Clone(h.listed) }

// Changes returns a counter that changes whenever the result of Available may change, provided that
// Expire is called. Callers cache Available by it.
func (h *Table) Changes() uint64 { return h.changes }

// Available returns the slots that may have a worker now: listed, of a host that is not draining,
// and neither excluded nor held; the oldest host first, by index within a host.
func (h *Table) Available(now time.Time) []plan.SlotID {
	most := 0
	for _, host := range h.listed {
		most += usable(host)
	}
	ids := make([]plan.SlotID, 0, most)
	for _, host := range h.orderAt(now) {
		if h.isOut(h.hosts[host.Name], now) || h.isHeld(holdKey{host.Name, -1}, now) {
			continue
		}
		for i := range usable(host) {
			id := plan.SlotID{Host: host.Name, Index: i}
			if !h.isOut(h.slots[id], now) && !h.isHeld(holdKey{host.Name, i}, now) {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// ExcludeSlot counts a failure of the slot and returns its exclusion. If that leaves a listed host
// of two or more slots without any, the host is excluded as a whole instead, until the last of its
// slots would return. A failure of a slot that is already excluded changes nothing.
func (h *Table) ExcludeSlot(now time.Time, id plan.SlotID) Exclusion {
	return h.excludeSlot(now, id, func(r *penalty) { h.exclude(r, now) })
}

func (h *Table) excludeSlot(now time.Time, id plan.SlotID, exclude func(*penalty)) Exclusion {
	h.changes++
	if host := h.hosts[id.Host]; h.isOut(host, now) {
		return h.exclusion(id.Host, nil, host)
	}
	slot := penaltyOf(h.slots, id)
	if !h.isOut(slot, now) {
		exclude(slot)
		if host := h.excludeEmptied(id.Host, now); host != nil {
			return h.exclusion(id.Host, nil, host)
		}
	}
	return h.exclusion(id.Host, &id.Index, slot)
}

// RestSlot excludes a slot that has not failed, for as long as its previous exclusion. It does not
// change how long the slot is excluded after its next failure.
func (h *Table) RestSlot(now time.Time, id plan.SlotID) Exclusion {
	if r := h.slots[id]; r != nil && !h.isOut(r, now) {
		r.Doublings = max(0, r.Doublings-1)
	}
	return h.ExcludeSlot(now, id)
}

// EndedBy records that a worker that was running tasks of the functions has ended in the slot. It
// reports whether that counts as a failure of the slot, because several different functions have
// ended workers there. It forgets ends that are older than CooldownMax.
func (h *Table) EndedBy(now time.Time, id plan.SlotID, functions []string) bool {
	h.changes++
	r := penaltyOf(h.slots, id)
	if now.Sub(r.At) > h.cfg.CooldownMax {
		r.enders = enders{}
	}
	r.At = now
	known := slices.ContainsFunc(functions, func(f string) bool { return slices.Contains(r.Names, f) })
	if !known && r.Apart < MostEnders {
		r.Apart++
		r.Names = append(r.Names, functions[:min(len(functions), mostEnderNames-len(r.Names))]...)
	}
	return r.Apart >= MostEnders
}

// PauseSlot excludes, for the duration long, a slot that has not failed. It does not change how
// long the slot is excluded after its next failure.
func (h *Table) PauseSlot(now time.Time, id plan.SlotID, long time.Duration) Exclusion {
	return h.excludeSlot(now, id, func(r *penalty) {
		r.Doublings = h.doublings(r, now)
		r.Out, r.Until = true, now.Add(long)
	})
}

// ExcludeHost counts a failure of the host and returns its exclusion. A failure of a host that is
// already excluded changes nothing.
func (h *Table) ExcludeHost(now time.Time, host string) Exclusion {
	h.changes++
	r := penaltyOf(h.hosts, host)
	if !h.isOut(r, now) {
		h.exclude(r, now)
	}
	return h.exclusion(host, nil, r)
}

// Expire returns the exclusions and holds that have ended, ordered by their ends, each once. It
// omits those whose slot or host is out for another reason. A host that was out as a whole becomes
// the youngest. Penalties remain and decay. Exclusions of hosts that are not listed end in the same
// way.
func (h *Table) Expire(now time.Time) []Exclusion {
	if next, ok := h.NextReturn(); !ok || now.Before(next) {
		return nil
	}
	h.changes++
	h.listed = h.orderAt(now) // must precede the changes below: it depends on who was out
	ended := h.expireHolds(now)
	for name, r := range h.hosts {
		if r.Out && !h.isOut(r, now) {
			r.Out = false
			if !h.isHeld(holdKey{name, -1}, now) {
				ended = append(ended, h.exclusion(name, nil, r))
			}
		}
	}
	for id, r := range h.slots {
		if r.Out && !h.isOut(r, now) {
			r.Out = false
			if !h.isHeld(holdKey{id.Host, id.Index}, now) {
				ended = append(ended, h.exclusion(id.Host, &id.Index, r))
			}
		}
	}
	slices.SortFunc(ended, func(a, b Exclusion) int {
		return cmp.Or(a.Until.Compare(b.Until), cmp.Compare(a.Host, b.Host), cmp.Compare(index(a), index(b)))
	})
	return ended
}

// NextReturn returns when the next exclusion or hold ends; false: none will end.
func (h *Table) NextReturn() (time.Time, bool) {
	n := &h.next
	if n.known && n.changes == h.changes {
		return n.at, n.found
	}
	*n = nextReturn{known: true, changes: h.changes}
	look := func(until time.Time) {
		if !n.found || until.Before(n.at) {
			n.at, n.found = until, true
		}
	}
	for _, r := range h.hosts {
		if r.Out && !h.cfg.Forever {
			look(r.Until)
		}
	}
	for _, r := range h.slots {
		if r.Out && !h.cfg.Forever {
			look(r.Until)
		}
	}
	for _, hold := range h.holds {
		if !hold.Until.IsZero() {
			look(hold.Until)
		}
	}
	return n.at, n.found
}

// exclude starts an exclusion of a slot or host that is not excluded.
func (h *Table) exclude(r *penalty, now time.Time) {
	r.Doublings = h.doublings(r, now)
	delay := retry.Backoff{First: h.cfg.CooldownMin, Most: h.cfg.CooldownMax}.After(r.Doublings + 1)
	if delay < h.cfg.CooldownMax {
		r.Doublings++ // not beyond CooldownMax, or the record would decay too slowly
	}
	r.Out, r.Until = true, now.Add(delay)
}

// doublings returns the doublings of a penalty after decay.
func (h *Table) doublings(r *penalty, now time.Time) int {
	quiet := max(0, now.Sub(r.Until))
	return max(0, r.Doublings-int(quiet/h.cfg.CooldownMax))
}

// excludeEmptied excludes the host as a whole if it has two or more slots and all are excluded. It
// returns the host's penalty then, otherwise nil.
func (h *Table) excludeEmptied(name string, now time.Time) *penalty {
	i := slices.IndexFunc(h.listed, func(host plan.Host) bool { return host.Name == name })
	if i < 0 || h.listed[i].Slots < 2 {
		return nil
	}
	var last time.Time
	for index := range h.listed[i].Slots {
		slot := h.slots[plan.SlotID{Host: name, Index: index}]
		if !h.isOut(slot, now) {
			return nil
		}
		if slot.Until.After(last) {
			last = slot.Until
		}
	}
	for index := range h.listed[i].Slots {
		slot := h.slots[plan.SlotID{Host: name, Index: index}]
		slot.Out, slot.Until = false, last // slots decay from the return of their host
	}
	r := penaltyOf(h.hosts, name)
	r.Doublings = h.doublings(r, now)
	r.Out, r.Until = true, last
	return r
}

func (h *Table) isOut(r *penalty, now time.Time) bool {
	return r != nil && r.Out && (h.cfg.Forever || now.Before(r.Until))
}

// orderAt returns the listed hosts by age: hosts whose exclusion has ended are the youngest, in the
// order of their returns.
func (h *Table) orderAt(now time.Time) []plan.Host {
	order := make([]plan.Host, 0, len(h.listed))
	var returned []plan.Host
	for _, host := range h.listed {
		if until := h.outAsWhole(host.Name); !until.IsZero() && !now.Before(until) {
			returned = append(returned, host)
		} else {
			order = append(order, host)
		}
	}
	slices.SortStableFunc(returned, func(a, b plan.Host) int {
		return h.outAsWhole(a.Name).Compare(h.outAsWhole(b.Name))
	})
	return append(order, returned...)
}

func (h *Table) exclusion(host string, slot *int, r *penalty) Exclusion {
	e := Exclusion{Host: host, Until: r.Until, Forever: h.cfg.Forever}
	if e.Forever {
		e.Until = time.Time{}
	}
	if slot != nil {
		e.Slot = new(*slot)
	}
	return e
}

// forget deletes penalties that no longer have an effect, so that they do not accumulate when hosts
// come and go under new names.
func (h *Table) forget(now time.Time) {
	for name, r := range h.hosts {
		if !r.Out && h.doublings(r, now) == 0 {
			delete(h.hosts, name)
		}
	}
	for id, r := range h.slots {
		if !r.Out && h.doublings(r, now) == 0 && now.Sub(r.At) > h.cfg.CooldownMax {
			delete(h.slots, id)
		}
	}
}

func penaltyOf[K comparable](records map[K]*penalty, key K) *penalty {
	r := records[key]
	if r == nil {
		r = &penalty{}
		records[key] = r
	}
	return r
}

// index returns the slot's index, or -1 for a whole host.
func index(e Exclusion) int {
	if e.Slot == nil {
		return -1
	}
	return *e.Slot
}
