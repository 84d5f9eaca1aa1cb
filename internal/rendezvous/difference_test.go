package rendezvous

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/plan"
)

// crowd returns a world of so many workers, eight on each host.
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

// without returns the world without the ranks for which out is true.
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

// TestDifference: a difference makes the new members, byte for byte, and is as short as the change.
func TestDifference(t *testing.T) {
	w, all := crowd(10_000)
	old := membersToWire(w, all)
	whole := proto.Size(old)
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
		next := membersToWire(c.next())
		d := difference(old, next)
		if n := proto.Size(d); n > c.most {
			t.Errorf("%s: %d bytes of %d", c.name, n, whole)
		}
		if got, err := apply(old, d, len(next.GetIndices())); err != nil || !proto.Equal(got, next) {
			t.Errorf("%s: other members, or %v", c.name, err)
		}
	}
}

// TestDifferencesOfRandomWorlds: whatever the worlds, a difference makes the second of the first.
func TestDifferencesOfRandomWorlds(t *testing.T) {
	dice := rand.New(rand.NewPCG(1, 2))
	random := func() *rendezvouspb.Members {
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
		return membersToWire(w, all)
	}
	for range 2000 {
		old, next := random(), random()
		got, err := apply(old, difference(old, next), len(next.GetIndices()))
		if err != nil || !proto.Equal(got, next) {
			t.Fatalf("from %v: %v instead of %v, %v", old, got, next, err)
		}
	}
}

func TestDifferencesThatMakeNoSense(t *testing.T) {
	old := membersToWire(crowd(3))
	added := membersToWire(crowd(1))
	added.Hosts[0] = "new"
	good := func(change func(*rendezvouspb.MembersDifference)) *rendezvouspb.MembersDifference {
		d := &rendezvouspb.MembersDifference{LeftOut: []uint32{1}, Taken: []uint32{2}, Followed: []uint32{1}, Added: proto.CloneOf(added)}
		change(d)
		return d
	}
	if m, err := apply(old, good(func(*rendezvouspb.MembersDifference) {}), 3); err != nil || !slices.Equal(m.GetIndices(), []uint32{1, 2, 0}) {
		t.Fatalf("%v, %v", m, err)
	}
	for name, d := range map[string]*rendezvouspb.MembersDifference{
		"nothing":        {},
		"few parts":      good(func(d *rendezvouspb.MembersDifference) { d.LeftOut = nil }),
		"many parts":     good(func(d *rendezvouspb.MembersDifference) { d.Followed = append(d.Followed, 0) }),
		"too many taken": good(func(d *rendezvouspb.MembersDifference) { d.LeftOut[0] = 2 }),
		"huge":           good(func(d *rendezvouspb.MembersDifference) { d.LeftOut[0], d.Taken[0] = 1<<32-1, 1<<32-1 }),
		"few":            good(func(d *rendezvouspb.MembersDifference) { d.Taken[0] = 1 }),
		"few added":      good(func(d *rendezvouspb.MembersDifference) { d.Followed[0], d.Taken[0], d.LeftOut[0] = 0, 3, 0 }),
		"none added":     good(func(d *rendezvouspb.MembersDifference) { d.Added = nil }),
		"false hosts":    good(func(d *rendezvouspb.MembersDifference) { d.Added.Counts[0] = 2 }),
		"false starts":   good(func(d *rendezvouspb.MembersDifference) { d.Added.AddressStarts[0] = 9 }),
	} {
		if m, err := apply(old, d, 3); err == nil {
			t.Errorf("%s: %v", name, m)
		}
	}
}

// TestWorldsDiffer: a worker that has the members of the world before gets the next ones as a
// difference, one that has others or none gets all, and each has the same members.
func TestWorldsDiffer(t *testing.T) {
	j := newJob(t)
	many := make([]string, 40)
	for i := range many {
		many[i] = fmt.Sprintf("w%02d", i)
	}
	stays, skips, old := j.client("w00"), j.client("w01"), j.client("w02")
	place := func(c *Client, after uint64) Place {
		t.Helper()
		p, err := c.Join(t.Context(), Joining{After: after})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	j.publish(1, 0, 0, many...)
	place(stays, 0)
	place(skips, 0)
	for generation := uint64(2); generation < 2+2*mostDifferences; generation++ {
		many = slices.Delete(many, 5, 6)
		j.publish(generation, 0, 0, many...)
		p := place(stays, generation-1)
		if p.members.base == nil && p.members.columns == nil {
			t.Errorf("generation %d: all members again", generation)
		}
		if p.members.depth >= mostDifferences {
			t.Errorf("generation %d: %d differences", generation, p.members.depth)
		}
		if generation%5 > 0 {
			continue
		}
		seen := place(skips, generation-1)
		if seen.members.base != nil {
			t.Errorf("generation %d: a difference from another world", generation)
		}
		old.has.Store(nil) // as a worker of an older version, which does not say what it has
		var worlds [3]World
		for i, p := range []Place{p, seen, place(old, generation-1)} {
			w, err := p.World()
			if err != nil {
				t.Fatal(err)
			}
			worlds[i] = w
		}
		for _, w := range worlds[1:] {
			if !reflect.DeepEqual(w.Slots, worlds[0].Slots) || !reflect.DeepEqual(w.DataAddrs(), worlds[0].DataAddrs()) {
				t.Errorf("generation %d: other members", generation)
			}
		}
	}
}

// BenchmarkDifference measures what the driver does once for a world of ten thousand workers of
// which one in a hundred has died, and what a worker that connects to the others does.
func BenchmarkDifference(b *testing.B) {
	w, all := crowd(10_000)
	old := membersToWire(w, all)
	next := membersToWire(without(w, all, func(r int) bool { return r%100 == 0 }))
	d := difference(old, next)
	b.Run("make", func(b *testing.B) {
		for b.Loop() {
			difference(old, next)
		}
		b.ReportMetric(float64(proto.Size(d)), "bytes")
		b.ReportMetric(float64(proto.Size(next)), "wholebytes")
	})
	b.Run("apply", func(b *testing.B) {
		for b.Loop() {
			if _, err := apply(old, d, len(next.GetIndices())); err != nil {
				b.Fatal(err)
			}
		}
	})
}
