package decide

import (
	"cmp"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/plan"
)

const (
	defaultCooldownMin = time.Second
	defaultCooldownMax = 600 * time.Second
)

// cooldowns says for how long a failing slot or host stays out.
//
// The first failure costs CooldownMin, each further one double the time before, up to CooldownMax:
// 1, 2, 4, … with nothing random about it. A slot that is back takes one doubling off its record
// for every CooldownMax in which it does not fail.
type cooldowns struct {
	// CooldownMin is the time for which a first failure excludes. 0: 1 s.
	CooldownMin time.Duration
	// CooldownMax is the longest exclusion. 0: 600 s. It is at least CooldownMin.
	CooldownMax time.Duration
	// Forever makes every exclusion last as long as the job.
	Forever bool
}

// hostTable remembers of the hosts what one list does not say: how old they are, and which of them,
// or of their slots, are excluded. It reads no clock and starts nothing: now is passed in, and must
// not go back. It is for one goroutine, and owns nothing that it has returned. newHosts makes one.
//
// Exclusions end by themselves: Available shows at any time what it will show once Expire has told
// who is back.
type hostTable struct {
	cfg    cooldowns
	listed []plan.Host // oldest first
	// The records of slots and hosts that have failed outlive their listing: a host that flaps does
	// not start afresh.
	slots map[plan.SlotID]*penalty
	hosts map[string]*penalty
	holds map[holdKey]hold // by persons

	changes uint64
	next    nextReturn
}

// nextReturn is what NextReturn has found, as long as nothing changes.
type nextReturn struct {
	known   bool
	changes uint64 // when it was found
	at      time.Time
	found   bool
}

// record is what is held against a slot or a host.
type penalty struct {
	out       bool      // excluded, and Expire has not told its end
	until     time.Time // end of the last exclusion
	doublings int       // of CooldownMin, that the next exclusion has, before decay
}

// exclusion says that a slot, or a whole host, takes no worker.
type exclusion struct {
	Host string
	// Slot is the index of the slot; nil means the whole host, and stands for all its slots.
	Slot *int
	// Until is when it may return; zero where Forever.
	Until   time.Time
	Forever bool
}

// newHosts returns a Hosts that knows no host yet.
func newHosts(cfg cooldowns) *hostTable {
	if cfg.CooldownMin <= 0 {
		cfg.CooldownMin = defaultCooldownMin
	}
	if cfg.CooldownMax <= 0 {
		cfg.CooldownMax = defaultCooldownMax
	}
	cfg.CooldownMax = max(cfg.CooldownMax, cfg.CooldownMin)
	return &hostTable{cfg: cfg, slots: map[plan.SlotID]*penalty{}, hosts: map[string]*penalty{}, holds: map[holdKey]hold{}}
}

// Update takes a new list, which has passed plan.CheckHosts, and says how its slots differ from
// those listed before, excluded or not; those of a draining host count as gone. Hosts that stay
// keep their age, draining or not, whatever their place in the list and however their slots change;
// new ones follow in the order of the list. A host that was gone is new.
func (h *hostTable) Update(now time.Time, listed []plan.Host) plan.Change {
	h.changes++
	var change plan.Change
	before := make(map[string]int, len(h.listed))
	for _, host := range h.listed {
		before[host.Name] = usable(host)
	}
	after := make(map[string]plan.Host, len(listed))
	var newcomers []plan.Host
	for _, host := range listed {
		if _, twice := after[host.Name]; twice {
			continue
		}
		after[host.Name] = host
		slots, known := before[host.Name]
		if !known {
			newcomers = append(newcomers, host)
		}
		if usable(host) > slots {
			change |= plan.Added
		}
	}
	order := make([]plan.Host, 0, len(after))
	for _, host := range h.listed {
		now, stays := after[host.Name]
		if stays {
			order = append(order, now)
		}
		if usable(now) < usable(host) {
			change |= plan.Removed
		}
	}
	h.listed = append(order, newcomers...)
	h.forget(now)
	h.dropHolds(after)
	return change
}

// usable is how many of the host's slots take workers, exclusions apart.
func usable(host plan.Host) int {
	if host.Draining {
		return 0
	}
	return host.Slots
}

// Listed returns the hosts of the last list, excluded, draining or neither, the oldest first.
func (h *hostTable) Listed() []plan.Host { return slices.Clone(h.listed) }

// Changes is another number whenever Available may show something else than before, provided that
// Expire has told who is back: where there are many slots and seldom a change, the last answer will
// do.
func (h *hostTable) Changes() uint64 { return h.changes }

// Available returns the slots that may have a worker: listed, of a host that is not draining, and
// neither excluded nor held at that time; the oldest host first, by index within a host. It is what
// plan.Assign takes.
func (h *hostTable) Available(now time.Time) []plan.SlotID {
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

// ExcludeSlot counts a failure of the slot and returns for how long it is out. Where that leaves a
// listed host of two or more slots without any, the host is out as a whole, until the last of them
// returns; the exclusion is the host's then, and takes the place of its slots'. A failure of what
// is out already counts for nothing, and returns the exclusion that stands.
func (h *hostTable) ExcludeSlot(now time.Time, id plan.SlotID) exclusion {
	h.changes++
	if host := h.hosts[id.Host]; h.isOut(host, now) {
		return h.exclusion(id.Host, nil, host)
	}
	slot := penaltyOf(h.slots, id)
	if !h.isOut(slot, now) {
		h.exclude(slot, now)
		if host := h.excludeEmptied(id.Host, now); host != nil {
			return h.exclusion(id.Host, nil, host)
		}
	}
	return h.exclusion(id.Host, &id.Index, slot)
}

// RestSlot is ExcludeSlot for a slot that has not failed: it is out for as long as it was last, and
// the next failure finds it as if this had not been.
func (h *hostTable) RestSlot(now time.Time, id plan.SlotID) exclusion {
	if r := h.slots[id]; r != nil && !h.isOut(r, now) {
		r.doublings = max(0, r.doublings-1)
	}
	return h.ExcludeSlot(now, id)
}

// ExcludeHost counts a failure of the host and returns for how long it is out as a whole. A failure
// of one that is out already counts for nothing, and returns the exclusion that stands.
func (h *hostTable) ExcludeHost(now time.Time, host string) exclusion {
	h.changes++
	r := penaltyOf(h.hosts, host)
	if !h.isOut(r, now) {
		h.exclude(r, now)
	}
	return h.exclusion(host, nil, r)
}

// Expire returns the exclusions and holds that have ended by now, in the order of their ends, each
// of them once, and those whose slot or host is out for another reason not at all. A host that was
// out as a whole is the youngest from now on. What they were excluded for stays on record, and
// decays. An exclusion of what is listed no more ends like any other.
func (h *hostTable) Expire(now time.Time) []exclusion {
	if next, ok := h.NextReturn(); !ok || now.Before(next) {
		return nil
	}
	h.changes++
	h.listed = h.orderAt(now) // before the books forget who has been out
	ended := h.expireHolds(now)
	for name, r := range h.hosts {
		if r.out && !h.isOut(r, now) {
			r.out = false
			if !h.isHeld(holdKey{name, -1}, now) {
				ended = append(ended, h.exclusion(name, nil, r))
			}
		}
	}
	for id, r := range h.slots {
		if r.out && !h.isOut(r, now) {
			r.out = false
			if !h.isHeld(holdKey{id.Host, id.Index}, now) {
				ended = append(ended, h.exclusion(id.Host, &id.Index, r))
			}
		}
	}
	slices.SortFunc(ended, func(a, b exclusion) int {
		return cmp.Or(a.Until.Compare(b.Until), cmp.Compare(a.Host, b.Host), cmp.Compare(index(a), index(b)))
	})
	return ended
}

// NextReturn returns when Expire will next have something to tell; false: never, as things stand.
func (h *hostTable) NextReturn() (time.Time, bool) {
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
		if r.out && !h.cfg.Forever {
			look(r.until)
		}
	}
	for _, r := range h.slots {
		if r.out && !h.cfg.Forever {
			look(r.until)
		}
	}
	for _, hold := range h.holds {
		if !hold.Until.IsZero() {
			look(hold.Until)
		}
	}
	return n.at, n.found
}

// exclude starts an exclusion of what is not out.
func (h *hostTable) exclude(r *penalty, now time.Time) {
	r.doublings = h.doublings(r, now)
	delay := h.cfg.CooldownMin
	for range r.doublings {
		delay += min(delay, h.cfg.CooldownMax-delay) // cannot overflow
	}
	if delay < h.cfg.CooldownMax {
		r.doublings++ // no more than count, so that a record can decay
	}
	r.out, r.until = true, now.Add(delay)
}

// doublings returns what decay has left of a record.
func (h *hostTable) doublings(r *penalty, now time.Time) int {
	quiet := max(0, now.Sub(r.until))
	return max(0, r.doublings-int(quiet/h.cfg.CooldownMax))
}

// excludeEmptied excludes the host if it has two or more slots and none left, in place of its
// slots, and returns its record then.
func (h *hostTable) excludeEmptied(name string, now time.Time) *penalty {
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
		if slot.until.After(last) {
			last = slot.until
		}
	}
	for index := range h.listed[i].Slots {
		slot := h.slots[plan.SlotID{Host: name, Index: index}]
		slot.out, slot.until = false, last // they decay from their common return
	}
	r := penaltyOf(h.hosts, name)
	r.doublings = h.doublings(r, now)
	r.out, r.until = true, last
	return r
}

func (h *hostTable) isOut(r *penalty, now time.Time) bool {
	return r != nil && r.out && (h.cfg.Forever || now.Before(r.until))
}

// orderAt returns the listed hosts by age at that time: those whose exclusion has ended are the
// youngest, in the order of their returns.
func (h *hostTable) orderAt(now time.Time) []plan.Host {
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

func (h *hostTable) exclusion(host string, slot *int, r *penalty) exclusion {
	e := exclusion{Host: host, Until: r.until, Forever: h.cfg.Forever}
	if e.Forever {
		e.Until = time.Time{}
	}
	if slot != nil {
		e.Slot = new(*slot)
	}
	return e
}

// forget drops records that hold nothing any more, so that hosts that come and go under ever new
// names do not pile up.
func (h *hostTable) forget(now time.Time) {
	for name, r := range h.hosts {
		if !r.out && h.doublings(r, now) == 0 {
			delete(h.hosts, name)
		}
	}
	for id, r := range h.slots {
		if !r.out && h.doublings(r, now) == 0 {
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

// index orders a whole host before its slots.
func index(e exclusion) int {
	if e.Slot == nil {
		return -1
	}
	return *e.Slot
}
