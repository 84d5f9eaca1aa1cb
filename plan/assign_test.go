package plan_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/plan"
)

func slot(host string, index, rank, local, localSize, cross, crossSize int) plan.Slot {
	return plan.Slot{SlotID: plan.SlotID{Host: host, Index: index},
		Rank: rank, LocalRank: local, LocalSize: localSize, CrossRank: cross, CrossSize: crossSize}
}

func TestAssign(t *testing.T) {
	for _, c := range []struct {
		name string
		ids  []plan.SlotID
		want []plan.Slot
	}{
		{"ASG-01", slotIDs(hosts{{Name: "w0", Slots: 2}, {Name: "w1", Slots: 2}}), []plan.Slot{
			slot("w0", 0, 0, 0, 2, 0, 2), slot("w0", 1, 1, 1, 2, 0, 2),
			slot("w1", 0, 2, 0, 2, 1, 2), slot("w1", 1, 3, 1, 2, 1, 2)}},
		{"ASG-02", slotIDs(hosts{{Name: "w0", Slots: 2}}), []plan.Slot{
			slot("w0", 0, 0, 0, 2, 0, 1), slot("w0", 1, 1, 1, 2, 0, 1)}},
		{"ASG-03", slotIDs(hosts{{Name: "w0", Slots: 1}, {Name: "w1", Slots: 2}}), []plan.Slot{
			slot("w0", 0, 0, 0, 1, 0, 2), slot("w1", 0, 1, 0, 2, 1, 2), slot("w1", 1, 2, 1, 2, 0, 1)}},
		{"one slot each", slotIDs(hosts{{Name: "w0", Slots: 1}, {Name: "w1", Slots: 1}}), []plan.Slot{
			slot("w0", 0, 0, 0, 1, 0, 2), slot("w1", 0, 1, 0, 1, 1, 2)}},
		{"an excluded slot leaves a hole", []plan.SlotID{{"w0", 1}, {"w1", 0}, {"w1", 2}}, []plan.Slot{
			slot("w0", 1, 0, 0, 1, 0, 2), slot("w1", 0, 1, 0, 2, 1, 2), slot("w1", 2, 2, 1, 2, 0, 1)}},
		{"a host without slots", slotIDs(hosts{{Name: "w0", Slots: 0}, {Name: "w1", Slots: 1}}), []plan.Slot{
			slot("w1", 0, 0, 0, 1, 0, 1)}},
		{"nobody", nil, []plan.Slot{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := plan.Assign(c.ids)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("got  %v, %v\nwant %v", got, err, c.want)
			}
		})
	}
}

func TestAssignRefuses(t *testing.T) {
	two := slotIDs(hosts{{Name: "a", Slots: 2}})
	if _, err := plan.Assign(append(two, two[0])); err == nil || !strings.Contains(err.Error(), "a:0") {
		t.Errorf("a slot twice: got %v", err)
	}
}

// literalAssign computes ranks literally from their definitions, counting for every slot.
func literalAssign(ids []plan.SlotID) []plan.Slot {
	localRank := func(i int) (n int) {
		for j := range i {
			if ids[j].Host == ids[i].Host {
				n++
			}
		}
		return n
	}
	var out []plan.Slot
	for i, id := range ids {
		s := plan.Slot{SlotID: id, Rank: i, LocalRank: localRank(i)}
		for j, other := range ids {
			if other.Host == id.Host {
				s.LocalSize++
			}
			if localRank(j) == s.LocalRank {
				s.CrossSize++
				if j < i {
					s.CrossRank++
				}
			}
		}
		out = append(out, s)
	}
	return out
}

// someSlots returns random hosts in order, each with some of its slots excluded.
func someSlots(t *rapid.T) []plan.SlotID {
	var ids []plan.SlotID
	for h := range rapid.IntRange(0, 6).Draw(t, "hosts") {
		for i := range rapid.IntRange(0, 5).Draw(t, "slots") {
			if rapid.IntRange(0, 3).Draw(t, "luck") > 0 {
				ids = append(ids, plan.SlotID{Host: fmt.Sprint("h", h), Index: i})
			}
		}
	}
	return ids
}

func TestAssignAgainstTheDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := someSlots(t)
		if rapid.Bool().Draw(t, "mixed") {
			ids = rapid.Permutation(ids).Draw(t, "ids")
		}
		want := literalAssign(ids)
		before := slices.Clone(ids)
		got, err := plan.Assign(ids)
		if !slices.Equal(ids, before) {
			t.Fatalf("Assign changed its argument %v to %v", before, ids)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("got  %v, %v\nwant %v", got, err, want)
		}
	})
}

// TestWorldGroup: a world's hosts are numbered by their lowest rank.
func TestWorldGroup(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots, err := plan.Assign(someSlots(t))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, s := range slots {
			if !slices.Contains(names, s.Host) {
				names = append(names, s.Host)
			}
		}
		w := plan.World{Generation: 1, Slots: slots}
		for i, name := range append(slices.Clone(names), "stranger") {
			if i == len(names) {
				i = -1
			}
			if rank, size := w.Group(name); rank != i || size != len(names) {
				t.Fatalf("Group(%s) = %d, %d; want %d, %d in %v", name, rank, size, i, len(names), slots)
			}
		}
	})
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
