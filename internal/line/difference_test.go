package line

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

// crowd returns a world of n workers, eight on each host.
func crowd(n int) (plan.World, []Member) {
	w, all := plan.World{Generation: 1, Slots: make([]plan.Slot, n)}, make([]Member, n)
	for i := range n {
		w.Slots[i].SlotID = plan.SlotID{Host: fmt.Sprintf("host%05d", i/8), Index: i % 8}
		all[i].Incarnation = fmt.Sprint(i)
		all[i].DataAddrs = []string{
			fmt.Sprintf("10.0.%d.%d:%d", i/8/256, i/8%256, 20000+i*7919%40000), fmt.Sprintf("127.0.0.1:%d", 20000+i*7919%40000),
		}
	}
	return w, all
}

// without returns the world without the ranks that the function selects.
func without(w plan.World, all []Member, out func(rank int) bool) (plan.World, []Member) {
	var left plan.World
	var members []Member
	for r, m := range all {
		if !out(r) {
			left.Slots, members = append(left.Slots, w.Slots[r]), append(members, m)
		}
	}
	return left, members
}

// TestDifference: a difference yields the new members, byte for byte, and is as short as the
// change.
func TestDifference(t *testing.T) {
	w, all := crowd(10_000)
	old := NewMembers(w, all)
	whole := len(old.Append(nil))
	for _, c := range []struct {
		name string
		next func() (plan.World, []Member)
		most int // bytes
	}{
		{"nothing", func() (plan.World, []Member) { return w, all }, 20},
		{"one in a hundred", func() (plan.World, []Member) { return without(w, all, func(r int) bool { return r%100 == 0 }) }, 500},
		{"one in ten", func() (plan.World, []Member) { return without(w, all, func(r int) bool { return r%10 == 3 }) }, 4000},
		{"the first third", func() (plan.World, []Member) { return without(w, all, func(r int) bool { return r < 3333 }) }, 20},
		{"all but the last", func() (plan.World, []Member) { return without(w, all, func(r int) bool { return r < 9999 }) }, 20},
		{"a host is added", func() (plan.World, []Member) {
			grown, more := plan.World{Slots: slices.Clone(w.Slots)}, slices.Clone(all)
			for i := range 8 {
				grown.Slots = append(grown.Slots, plan.Slot{SlotID: plan.SlotID{Host: "new", Index: i}})
				more = append(more, Member{DataAddrs: []string{fmt.Sprintf("10.9.9.9:%d", i+1)}})
			}
			return grown, more
		}, 200},
		{"a worker in its midst is another", func() (plan.World, []Member) {
			more := slices.Clone(all)
			more[5000] = Member{DataAddrs: []string{"10.0.0.1:9"}, Handle: []byte("h")}
			return w, more
		}, 100},
		{"the oldest host is the youngest", func() (plan.World, []Member) {
			turned, more := plan.World{Slots: slices.Clone(w.Slots[8:])}, slices.Clone(all[8:])
			return plan.World{Slots: append(turned.Slots, w.Slots[:8]...)}, append(more, all[:8]...)
		}, 300},
		{"all others", func() (plan.World, []Member) {
			more := make([]Member, len(all))
			for i := range more {
				more[i].DataAddrs = []string{fmt.Sprintf("10.0.0.1:%d", i)}
			}
			return w, more
		}, whole},
	} {
		next := NewMembers(c.next())
		d := Difference(old, next)
		if n := len(d.Append(nil)); n > c.most {
			t.Errorf("%s: %d bytes of %d", c.name, n, whole)
		}
		if got, err := apply(old, d, len(next.Indices)); err != nil || !reflect.DeepEqual(normal(got), normal(next)) {
			t.Errorf("%s: other members, or %v", c.name, err)
		}
	}
}

// TestDifferencesOfRandomWorlds: for any two worlds, the difference yields the second from the
// first.
func TestDifferencesOfRandomWorlds(t *testing.T) {
	dice := rand.New(rand.NewPCG(1, 2))
	random := func() *Members {
		var w plan.World
		var all []Member
		for _, host := range dice.Perm(4) {
			for _, index := range dice.Perm(3) {
				if dice.IntN(3) == 0 {
					continue
				}
				w.Slots = append(w.Slots, plan.Slot{SlotID: plan.SlotID{Host: fmt.Sprint(host), Index: index}})
				m := Member{}
				for range dice.IntN(3) {
					m.DataAddrs = append(m.DataAddrs, fmt.Sprintf("10.0.0.%d:%d", dice.IntN(2), 1+dice.IntN(2)))
				}
				if dice.IntN(8) == 0 {
					m.Handle = []byte{byte(dice.IntN(2))}
				}
				all = append(all, m)
			}
		}
		return NewMembers(w, all)
	}
	for range 2000 {
		old, next := random(), random()
		got, err := apply(old, Difference(old, next), len(next.Indices))
		if err != nil || !reflect.DeepEqual(normal(got), normal(next)) {
			t.Fatalf("from %v: %v instead of %v, %v", old, got, next, err)
		}
	}
}

func TestDifferencesThatMakeNoSense(t *testing.T) {
	old := NewMembers(crowd(3))
	added := NewMembers(crowd(1))
	added.Hosts[0] = "new"
	good := func(change func(*MembersDifference)) *MembersDifference {
		d := &MembersDifference{LeftOut: []uint32{1}, Taken: []uint32{2}, Followed: []uint32{1}, Added: normal(added)}
		change(d)
		return d
	}
	if m, err := apply(old, good(func(*MembersDifference) {}), 3); err != nil || !slices.Equal(m.Indices, []uint32{1, 2, 0}) {
		t.Fatalf("%v, %v", m, err)
	}
	for name, d := range map[string]*MembersDifference{
		"nothing":        {Added: &Members{}},
		"few parts":      good(func(d *MembersDifference) { d.LeftOut = nil }),
		"many parts":     good(func(d *MembersDifference) { d.Followed = append(d.Followed, 0) }),
		"too many taken": good(func(d *MembersDifference) { d.LeftOut[0] = 2 }),
		"huge":           good(func(d *MembersDifference) { d.LeftOut[0], d.Taken[0] = 1<<32-1, 1<<32-1 }),
		"few":            good(func(d *MembersDifference) { d.Taken[0] = 1 }),
		"few added":      good(func(d *MembersDifference) { d.Followed[0], d.Taken[0], d.LeftOut[0] = 0, 3, 0 }),
		"none added":     good(func(d *MembersDifference) { d.Added = &Members{} }),
		"false hosts":    good(func(d *MembersDifference) { d.Added.Counts[0] = 2 }),
		"false starts":   good(func(d *MembersDifference) { d.Added.AddressStarts[0] = 9 }),
	} {
		if m, err := apply(old, d, 3); err == nil {
			t.Errorf("%s: %v", name, m)
		}
	}
}

// normal returns members in the form in which they are decoded.
func normal(m *Members) *Members { return (&decoder{rest: m.Append(nil)}).members() }

// BenchmarkDifference measures the work of the driver, once per world, for a world of ten thousand
// workers in which one in a hundred has died, and the work of a worker that connects to the others.
func BenchmarkDifference(b *testing.B) {
	w, all := crowd(10_000)
	old := NewMembers(w, all)
	next := NewMembers(without(w, all, func(r int) bool { return r%100 == 0 }))
	d := Difference(old, next)
	b.Run("make", func(b *testing.B) {
		for b.Loop() {
			Difference(old, next)
		}
		b.ReportMetric(float64(len(d.Append(nil))), "bytes")
		b.ReportMetric(float64(len(next.Append(nil))), "wholebytes")
	})
	b.Run("apply", func(b *testing.B) {
		for b.Loop() {
			if _, err := apply(old, d, len(next.Indices)); err != nil {
				b.Fatal(err)
			}
		}
	})
}
