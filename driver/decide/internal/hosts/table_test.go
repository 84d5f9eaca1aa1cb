package hosts

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/plan"
)

type list = []plan.Host

// hostList parses "a:2,b:1".
func hostList(text string) list {
	hosts, err := plan.ParseHostList(text, -1)
	if err != nil {
		panic(err)
	}
	return hosts
}

// at returns a time of the tests' clock, in seconds.
func at(seconds float64) time.Time {
	return time.Unix(1000, 0).Add(time.Duration(seconds * float64(time.Second)))
}

func id(host string, index int) plan.SlotID { return plan.SlotID{Host: host, Index: index} }

func names(hosts list) (names []string) {
	for _, h := range hosts {
		names = append(names, h.Name)
	}
	return names
}

func seconds(n int) time.Duration { return time.Duration(n) * time.Second }

func cooldown(least, most int) Cooldowns {
	return Cooldowns{CooldownMin: seconds(least), CooldownMax: seconds(most)}
}

func TestDRV11OrderStability(t *testing.T) {
	h := New(Cooldowns{})
	h.Update(at(0), hostList("a:1,b:1,c:1"))
	if got := names(h.Listed()); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("got %v", got)
	}
	h.Update(at(1), hostList("d:1,c:1,b:1"))
	if got := names(h.Listed()); !slices.Equal(got, []string{"b", "c", "d"}) {
		t.Errorf("got %v", got)
	}
}

func TestDRV12UpdateResults(t *testing.T) {
	h := New(Cooldowns{})
	first := h.Listed()
	if len(first) != 0 || len(h.Available(at(0))) != 0 {
		t.Errorf("hosts before the first list: %v", first)
	}
	for i, listed := range []list{hostList("a:2"), hostList("a:2,b:2"), hostList("b:2"), hostList("b:1,c:1"), hostList("b:1,c:1")} {
		h.Update(at(float64(i)), listed)
		if got := h.Listed(); !slices.Equal(got, listed) {
			t.Errorf("update %d: hosts %v, want %v", i+1, got, listed)
		}
		if got, want := h.Available(at(float64(i))), slotIDs(listed); !slices.Equal(got, want) {
			t.Errorf("update %d: slots %v, want %v", i+1, got, want)
		}
	}
	if len(first) != 0 {
		t.Errorf("the first snapshot has become %v", first)
	}
}

func TestDRV13Blacklist(t *testing.T) {
	h := New(Cooldowns{Forever: true})
	h.Update(at(0), hostList("a:2,b:2"))
	hosts, slots := h.Listed(), h.Available(at(0))
	got := h.ExcludeHost(at(1), "a")
	if got != (Exclusion{Host: "a", Forever: true}) {
		t.Errorf("got %+v", got)
	}
	if !slices.Equal(names(hosts), []string{"a", "b"}) || len(slots) != 4 {
		t.Errorf("the snapshot has become %v, %v", hosts, slots)
	}
	if got := h.Available(at(1e6)); !slices.Equal(got, []plan.SlotID{id("b", 0), id("b", 1)}) {
		t.Errorf("available: %v", got)
	}
	if next, ok := h.NextReturn(); ok {
		t.Errorf("for ever ends at %v", next)
	}
	if ended := h.Expire(at(1e6)); len(ended) != 0 {
		t.Errorf("for ever has ended: %+v", ended)
	}
}

func TestHostThatLeavesAndReturnsIsYoungest(t *testing.T) {
	h := New(Cooldowns{})
	h.Update(at(0), hostList("a:1,b:1"))
	h.Update(at(1), hostList("b:1"))
	h.Update(at(2), hostList("a:1,b:3,c:1"))
	if got := h.Listed(); !slices.Equal(got, hostList("b:3,a:1,c:1")) {
		t.Errorf("got %v", got)
	}
}

func TestDrainingHost(t *testing.T) {
	draining := func(hosts list, name string) list {
		for i := range hosts {
			hosts[i].Draining = hosts[i].Name == name
		}
		return hosts
	}
	h := New(Cooldowns{})
	for i, step := range []struct {
		listed    list
		available list
	}{
		{hostList("a:2,b:1"), hostList("a:2,b:1")},
		{draining(hostList("a:2,b:1"), "a"), hostList("b:1")},
		{draining(hostList("a:3,b:1,c:1"), "a"), hostList("b:1,c:1")}, // c's; what a has does not count
		{draining(hostList("a:1,b:2,c:1"), "c"), hostList("a:1,b:2")},
		{hostList("b:2,c:1"), hostList("b:2,c:1")},                    // a is gone, so c is needed
		{draining(hostList("b:2,c:1,d:1"), "d"), hostList("b:2,c:1")}, // a new host that is already leaving
		{hostList("b:2,c:1"), hostList("b:2,c:1")},
	} {
		h.Update(at(float64(i)), step.listed)
		if got := h.Listed(); !slices.Equal(got, step.listed) {
			t.Errorf("update %d: hosts %v, want %v: each keeps its age", i+1, got, step.listed)
		}
		if got, want := h.Available(at(float64(i))), slotIDs(step.available); !slices.Equal(got, want) {
			t.Errorf("update %d: slots %v, want %v", i+1, got, want)
		}
	}
}

// TestExclusionDelays: the actual delays are the documented ones.
func TestExclusionDelays(t *testing.T) {
	type failure struct {
		after int // seconds from the last return, or the beginning
		delay int
	}
	for _, c := range []struct {
		name     string
		cfg      Cooldowns
		failures []failure
	}{
		{"defaults", Cooldowns{}, []failure{{0, 1}, {0, 2}, {0, 4}, {0, 8}, {0, 16}, {0, 32}, {0, 64}, {0, 128},
			{0, 256}, {0, 512}, {0, 600}, {0, 600}, {0, 600}}},
		{"10 to 100", cooldown(10, 100), []failure{{0, 10}, {0, 20}, {0, 40}, {0, 80}, {0, 100}, {0, 100}}},
		{"a power of two", cooldown(1, 4), []failure{{0, 1}, {0, 2}, {0, 4}, {0, 4}}},
		{"constant", cooldown(5, 5), []failure{{0, 5}, {0, 5}, {0, 5}}},
		{"no range", Cooldowns{CooldownMin: seconds(5), CooldownMax: seconds(3)}, []failure{{0, 5}, {0, 5}}},
		{"decays by one for each longest time without failure", cooldown(1, 10), []failure{
			{0, 1}, {9, 2}, {9, 4}, // no decay yet
			{10, 4}, {29, 2}, {10, 2}, {20, 1}, {1000, 1}, {0, 2}}},
		{"does not count beyond the longest", cooldown(1, 4), []failure{
			{0, 1}, {0, 2}, {0, 4}, {0, 4}, {0, 4}, {4, 2}, {8, 1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			slot, host := New(c.cfg), New(c.cfg)
			slot.Update(at(0), hostList("a:2"))
			host.Update(at(0), hostList("a:2"))
			now := at(0)
			for i, f := range c.failures {
				now = now.Add(seconds(f.after))
				until := now.Add(seconds(f.delay))
				got := slot.ExcludeSlot(now, id("a", 1))
				if !got.Until.Round(time.Second).Equal(until) || got.Host != "a" || got.Slot == nil || *got.Slot != 1 || got.Forever {
					t.Errorf("failure %d of a slot: %+v, want until +%ds", i+1, got, f.delay)
				}
				if got := host.ExcludeHost(now, "a"); !got.Until.Round(time.Second).Equal(until) || got.Slot != nil {
					t.Errorf("failure %d of a host: %+v, want until +%ds", i+1, got, f.delay)
				}
				// The slot is excluded until the very end, available at the end, and reported once.
				for _, h := range []*Table{slot, host} {
					next, ok := h.NextReturn()
					if !ok || !next.Equal(got.Until) {
						t.Errorf("failure %d: next return %v, %v", i+1, next, ok)
					}
					before := got.Until.Add(-1)
					if slices.Contains(h.Available(before), id("a", 1)) || len(h.Expire(before)) != 0 {
						t.Errorf("failure %d: back too early", i+1)
					}
					if n := len(h.Available(got.Until)); n != 2 {
						t.Errorf("failure %d: %d slots at the end of the Exclusion", i+1, n)
					}
					if n := len(h.Expire(got.Until)) + len(h.Expire(got.Until)); n != 1 {
						t.Errorf("failure %d: its end was told %d times", i+1, n)
					}
					if next, ok := h.NextReturn(); ok {
						t.Errorf("failure %d: next return %v after the only one", i+1, next)
					}
				}
				now = got.Until
			}
		})
	}
}

func TestExclusionDoublingDoesNotOverflow(t *testing.T) {
	h := New(Cooldowns{CooldownMin: 1, CooldownMax: 1<<63 - 1})
	r := &penalty{Doublings: 62, Until: at(0)}
	h.exclude(r, at(0))
	h.exclude(r, at(0))
	if got := r.Until.Sub(at(0)); got != h.cfg.CooldownMax {
		t.Errorf("got %v", got)
	}
}

func TestFailureOfWhatIsOutCountsForNothing(t *testing.T) {
	h := New(cooldown(10, 100))
	h.Update(at(0), hostList("a:3,b:2"))
	first := h.ExcludeSlot(at(0), id("a", 0))
	if again := h.ExcludeSlot(at(5), id("a", 0)); again.Until != first.Until {
		t.Errorf("a slot twice: until %v, then %v", first.Until, again.Until)
	}
	whole := h.ExcludeHost(at(0), "b")
	for _, again := range []Exclusion{h.ExcludeHost(at(5), "b"), h.ExcludeSlot(at(5), id("b", 1))} {
		if again != whole {
			t.Errorf("a host twice: %+v, then %+v", whole, again)
		}
	}
	h.Expire(at(10))
	if got := h.ExcludeSlot(at(10), id("a", 0)); !got.Until.Equal(at(30)) {
		t.Errorf("the second failure costs until %v", got.Until)
	}
	if got := h.ExcludeSlot(at(10), id("b", 1)); !got.Until.Equal(at(20)) || got.Slot == nil {
		t.Errorf("a slot's own first failure: %+v", got)
	}
}

func TestHostOfWhichAllSlotsAreOut(t *testing.T) {
	h := New(cooldown(10, 100))
	h.Update(at(0), hostList("a:2,b:2,c:1"))
	h.ExcludeSlot(at(0), id("a", 1))
	h.Expire(at(10))
	long := h.ExcludeSlot(at(10), id("a", 1)) // second failure: until 30
	if long.Slot == nil || *long.Slot != 1 || !long.Until.Equal(at(30)) {
		t.Fatalf("got %+v", long)
	}
	got := h.ExcludeSlot(at(12), id("a", 0)) // its own exclusion would end at 22
	if got != (Exclusion{Host: "a", Until: at(30)}) {
		t.Errorf("got %+v; want the whole host, until its last slot returns", got)
	}
	if got := h.Available(at(25)); !slices.Equal(got, []plan.SlotID{id("b", 0), id("b", 1), id("c", 0)}) {
		t.Errorf("available meanwhile: %v", got)
	}
	if got := names(h.Listed()); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("listed meanwhile: %v", got)
	}
	want := []plan.SlotID{id("b", 0), id("b", 1), id("c", 0), id("a", 0), id("a", 1)}
	if got := h.Available(at(30)); !slices.Equal(got, want) {
		t.Errorf("available at the return: %v, want %v", got, want)
	}
	if got := h.Expire(at(30)); len(got) != 1 || got[0] != (Exclusion{Host: "a", Until: at(30)}) {
		t.Errorf("ended: %+v", got)
	}
	if got := h.Available(at(31)); !slices.Equal(got, want) {
		t.Errorf("available after the return: %v, want %v", got, want)
	}
	// The slots' own penalties last longer than the host's.
	if got := h.ExcludeSlot(at(30), id("a", 1)); !got.Until.Equal(at(70)) {
		t.Errorf("the third failure of a:1 costs until %v", got.Until)
	}
}

func TestSlotsOfAHostThatWasOutDecayFromItsReturn(t *testing.T) {
	h := New(cooldown(10, 100))
	h.Update(at(0), hostList("a:2"))
	h.ExcludeSlot(at(0), id("a", 0))
	h.ExcludeSlot(at(5), id("a", 1)) // the host is out until 15
	h.Expire(at(15))
	if got := h.ExcludeSlot(at(114), id("a", 0)); !got.Until.Equal(at(134)) {
		t.Errorf("99 s after the return, a failure costs until %v", got.Until)
	}
	if got := h.ExcludeHost(at(114), "a"); !got.Until.Equal(at(124)) {
		t.Errorf("the host's own first failure costs until %v", got.Until)
	}
}

func TestHostOfOneSlotKeepsItsAge(t *testing.T) {
	h := New(cooldown(10, 100))
	h.Update(at(0), hostList("a:1,b:1"))
	if got := h.ExcludeSlot(at(0), id("a", 0)); got.Slot == nil {
		t.Errorf("the whole host is out: %+v", got)
	}
	h.Expire(at(10))
	if got := h.Available(at(10)); !slices.Equal(got, []plan.SlotID{id("a", 0), id("b", 0)}) {
		t.Errorf("got %v", got)
	}
}

func TestHostsReturnInTheOrderOfTheirEnds(t *testing.T) {
	h := New(cooldown(10, 100))
	h.Update(at(0), hostList("a:1,b:1,c:1,d:1"))
	h.ExcludeHost(at(2), "a")
	h.ExcludeHost(at(1), "c")
	h.ExcludeHost(at(1), "b")
	want := []plan.SlotID{id("d", 0), id("b", 0), id("c", 0), id("a", 0)}
	if got := h.Available(at(20)); !slices.Equal(got, want) {
		t.Errorf("available: %v, want %v", got, want)
	}
	var told []string
	for _, e := range h.Expire(at(20)) {
		told = append(told, e.Host)
	}
	if !slices.Equal(told, []string{"b", "c", "a"}) {
		t.Errorf("told: %v", told)
	}
}

func TestExclusionOutlivesTheListing(t *testing.T) {
	h := New(cooldown(10, 100))
	h.Update(at(0), hostList("a:1,b:1"))
	h.ExcludeHost(at(0), "a")
	h.Update(at(1), hostList("b:1"))
	h.Update(at(2), hostList("a:1,b:1"))
	if got := h.Available(at(3)); !slices.Equal(got, []plan.SlotID{id("b", 0)}) {
		t.Errorf("a host that flaps is back at once: %v", got)
	}
	h.Update(at(4), hostList("b:1"))
	if got := h.Expire(at(10)); len(got) != 1 {
		t.Errorf("the end of an exclusion of what is gone: %+v", got)
	}
	if got := h.ExcludeHost(at(10), "a"); !got.Until.Equal(at(30)) {
		t.Errorf("its second failure costs until %v", got.Until)
	}
}

func TestRecordsAreForgottenOnceTheyHaveDecayed(t *testing.T) {
	h := New(cooldown(1, 10))
	for i := range 100 {
		name := fmt.Sprint("h", i)
		h.Update(at(float64(20*i)), list{{Name: name, Slots: 2}})
		h.ExcludeSlot(at(float64(20*i)), id(name, 0))
		h.ExcludeHost(at(float64(20*i)), name)
		h.Expire(at(float64(20*i + 1)))
	}
	if len(h.slots) > 2 || len(h.hosts) > 2 {
		t.Errorf("%d slots and %d hosts are on record", len(h.slots), len(h.hosts))
	}
}

func TestSnapshotsAreCopies(t *testing.T) {
	given := hostList("a:2")
	h := New(Cooldowns{})
	h.Update(at(0), given)
	given[0].Name = "x"
	h.Listed()[0].Name = "y"
	h.Available(at(0))[0].Host = "z"
	*h.ExcludeSlot(at(0), id("a", 1)).Slot = 7
	if got := h.Listed(); !slices.Equal(got, hostList("a:2")) {
		t.Errorf("listed: %v", got)
	}
	if got := h.Available(at(0)); !slices.Equal(got, []plan.SlotID{id("a", 0)}) {
		t.Errorf("available: %v", got)
	}
}

// model is a Table implemented directly from its documentation: it keeps the history and
// derives everything else.
type model struct {
	cfg    Cooldowns
	hosts  list                      // age order
	ends   map[plan.SlotID]time.Time // of exclusions; index -1 is the whole host
	counts map[plan.SlotID]int
	back   map[plan.SlotID]time.Time // ends of past exclusions
}

func (m *model) out(id plan.SlotID) bool { _, out := m.ends[id]; return out }

// staying returns the slots of the hosts that are not draining.
func staying(hosts list) []plan.SlotID {
	return slotIDs(slices.DeleteFunc(slices.Clone(hosts), func(h plan.Host) bool { return h.Draining }))
}

func (m *model) available() []plan.SlotID {
	ids := []plan.SlotID{}
	for _, s := range staying(m.hosts) {
		if !m.out(s) && !m.out(id(s.Host, -1)) {
			ids = append(ids, s)
		}
	}
	return ids
}

// decayed returns the doublings that remain since the last return.
func (m *model) decayed(now time.Time, s plan.SlotID) int {
	count := m.counts[s]
	for t := m.back[s].Add(m.cfg.CooldownMax); count > 0 && !t.After(now); t = t.Add(m.cfg.CooldownMax) {
		count--
	}
	return count
}

func (m *model) exclude(now time.Time, slot plan.SlotID) {
	if m.out(slot) || m.out(id(slot.Host, -1)) {
		return
	}
	count := m.decayed(now, slot)
	delay := m.cfg.CooldownMin << count
	if m.counts[slot] = count + 1; delay >= m.cfg.CooldownMax {
		delay, m.counts[slot] = m.cfg.CooldownMax, count
	}
	m.ends[slot] = now.Add(delay)
	if slot.Index < 0 {
		return
	}
	var last time.Time
	var siblings []plan.SlotID
	for _, s := range slotIDs(m.hosts) {
		if s.Host == slot.Host {
			if !m.out(s) {
				return
			}
			siblings = append(siblings, s)
			if m.ends[s].After(last) {
				last = m.ends[s]
			}
		}
	}
	if len(siblings) < 2 {
		return
	}
	for _, s := range siblings {
		delete(m.ends, s)
		m.back[s] = last
	}
	host := id(slot.Host, -1)
	m.counts[host] = m.decayed(now, host)
	m.ends[host] = last
}

// advance ends the exclusions in order.
func (m *model) advance(now time.Time) (ended int) {
	for {
		var next *plan.SlotID
		for _, s := range slices.SortedFunc(maps.Keys(m.ends), func(a, b plan.SlotID) int {
			age := func(s plan.SlotID) int { return slices.Index(names(m.hosts), s.Host) }
			return age(a) - age(b)
		}) {
			if end := m.ends[s]; !end.After(now) && (next == nil || end.Before(m.ends[*next])) {
				next = &s
			}
		}
		if next == nil {
			return ended
		}
		m.back[*next] = m.ends[*next]
		delete(m.ends, *next)
		ended++
		if i := slices.IndexFunc(m.hosts, func(h plan.Host) bool { return h.Name == next.Host }); next.Index < 0 && i >= 0 {
			h := m.hosts[i]
			m.hosts = append(slices.Delete(m.hosts, i, i+1), h)
		}
	}
}

func (m *model) update(listed list) {
	var order list
	for _, h := range m.hosts {
		for _, l := range listed {
			if l.Name == h.Name {
				order = append(order, l)
			}
		}
	}
	for _, l := range listed {
		if !slices.Contains(names(m.hosts), l.Name) {
			order = append(order, l)
		}
	}
	m.hosts = order
}

// trial applies the same operations to a Table and its model.
type trial struct {
	h   *Table
	m   *model
	now time.Time
	// seen and changes are the results of Available and Changes at the last change.
	seen    []plan.SlotID
	changes uint64
}

func TestHostsAgainstTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := cooldown(rapid.IntRange(1, 3).Draw(t, "min"), rapid.IntRange(3, 9).Draw(t, "max"))
		x := &trial{h: New(cfg), m: &model{cfg: cfg, ends: map[plan.SlotID]time.Time{},
			counts: map[plan.SlotID]int{}, back: map[plan.SlotID]time.Time{}}, now: at(0)}
		t.Repeat(map[string]func(*rapid.T){
			"time passes": x.pass, "update": x.update, "slot fails": x.slotFails, "host fails": x.hostFails, "": x.check})
	})
}

var someName = rapid.SampledFrom([]string{"a", "b", "c", "d"})

func (x *trial) pass(t *rapid.T) {
	x.now = x.now.Add(time.Duration(rapid.IntRange(0, 20).Draw(t, "half seconds")) * time.Second / 2)
	want := x.m.advance(x.now)
	available := x.h.Available(x.now)
	if got := len(x.h.Expire(x.now)); got != want {
		t.Fatalf("%d exclusions have ended, want %d", got, want)
	}
	if after := x.h.Available(x.now); !slices.Equal(available, after) {
		t.Fatalf("Expire changed what is available from %v to %v", available, after)
	}
}

func (x *trial) update(t *rapid.T) {
	var listed list
	for _, name := range rapid.SliceOfNDistinct(someName, 0, 4, rapid.ID).Draw(t, "hosts") {
		listed = append(listed, plan.Host{Name: name, Slots: rapid.IntRange(0, 3).Draw(t, "slots"),
			Draining: rapid.IntRange(0, 3).Draw(t, "draining") == 0})
	}
	x.m.update(listed)
	x.h.Update(x.now, listed)
}

func (x *trial) slotFails(t *rapid.T) {
	slot := id(someName.Draw(t, "host"), rapid.IntRange(0, 2).Draw(t, "slot"))
	x.m.exclude(x.now, slot)
	end, host := x.m.ends[slot], id(slot.Host, -1)
	if x.m.out(host) {
		end = x.m.ends[host]
	}
	if got := x.h.ExcludeSlot(x.now, slot); (got.Slot == nil) != x.m.out(host) || !got.Until.Equal(end) {
		t.Fatalf("%v: got %+v, want until %v", slot, got, end)
	}
}

func (x *trial) hostFails(t *rapid.T) {
	host := id(someName.Draw(t, "host"), -1)
	x.m.exclude(x.now, host)
	if got := x.h.ExcludeHost(x.now, host.Host); got.Slot != nil || !got.Until.Equal(x.m.ends[host]) {
		t.Fatalf("%v: got %+v, want until %v", host, got, x.m.ends[host])
	}
}

func (x *trial) check(t *rapid.T) {
	if got := x.h.Listed(); !slices.Equal(got, x.m.hosts) {
		t.Fatalf("listed %v, want %v", got, x.m.hosts)
	}
	available := x.h.Available(x.now)
	if want := x.m.available(); !slices.Equal(available, want) {
		t.Fatalf("available %v, want %v", available, want)
	}
	if at := x.h.Changes(); at != x.changes {
		x.seen, x.changes = available, at
	} else if !slices.Equal(available, x.seen) {
		t.Fatalf("available %v after %v, and nothing has changed", available, x.seen)
	}
	all := slotIDs(x.h.Listed())
	for i, s := range available {
		if !slices.Contains(all, s) || slices.Contains(available[:i], s) {
			t.Fatalf("%v of %v is not listed, or there twice", s, available)
		}
	}
	next, ok := x.h.NextReturn()
	if ok != (len(x.m.ends) > 0) {
		t.Fatalf("next return %v, with %d exclusions", ok, len(x.m.ends))
	}
	for _, end := range x.m.ends {
		if end.Before(next) {
			t.Fatalf("next return at %v, but one ends at %v", next, end)
		}
	}
}

// slotIDs returns all slots of the hosts, by host and index.
func slotIDs(all []plan.Host) (ids []plan.SlotID) {
	for _, h := range all {
		for i := range h.Slots {
			ids = append(ids, plan.SlotID{Host: h.Name, Index: i})
		}
	}
	return ids
}
