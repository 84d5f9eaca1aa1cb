package line

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

func TestAnswersThatMakeNoSense(t *testing.T) {
	good := func(change func(*Message)) *Message {
		w := &Message{Generation: 3, Rank: 1, Size: 2, DataKey: strings.Repeat("00", 32)}
		change(w)
		return w
	}
	if p, err := ReadPlace(good(func(*Message) {}), nil, 2, nil); err != nil || p.Rank != 1 {
		t.Fatalf("%+v, %v", p, err)
	}
	for name, w := range map[string]*Message{
		"nothing":          {},
		"old":              good(func(w *Message) { w.Generation = 2 }),
		"key":              good(func(w *Message) { w.DataKey = w.DataKey[1:] }),
		"rank":             good(func(w *Message) { w.Rank = 2 }),
		"negative rank":    good(func(w *Message) { w.Rank = -1 }),
		"root":             good(func(w *Message) { w.Root = 2 }),
		"too many members": good(func(w *Message) { w.Size = maxMembers + 1 }),
		"from nothing":     good(func(w *Message) { w.Base = 7 }),
	} {
		if _, err := ReadPlace(w, nil, 2, nil); err == nil || !strings.HasPrefix(err.Error(), "line: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMembersThatMakeNoSense(t *testing.T) {
	good := func(change func(*Members)) *Members {
		m := &Members{
			Hosts: []string{"a"}, Counts: []uint32{2}, Indices: []uint32{0, 1}, AddressCounts: []uint32{1, 1},
			AddressStarts: []uint32{0, 0}, AddressPorts: []uint32{7, 0}, Starts: []string{"x"},
		}
		change(m)
		return m
	}
	read := func(m *Members) (World, error) {
		return Place{Generation: 3, Size: 2, members: &members{size: 2, whole: m.Append(nil)}}.World()
	}
	if w, err := read(good(func(*Members) {})); err != nil ||
		!reflect.DeepEqual(w.DataAddrs(), [][]string{{"x:7"}, {"x"}}) || w.Slots[1].LocalRank != 1 {
		t.Fatalf("%+v, %v", w, err)
	}
	for name, m := range map[string]*Members{
		"nobody":             {},
		"three":              good(func(m *Members) { m.Indices, m.Counts[0] = []uint32{0, 1, 2}, 3 }),
		"huge slot":          good(func(m *Members) { m.Indices[0] = 1 << 31 }),
		"a slot twice":       good(func(m *Members) { m.Indices[1] = 0 }),
		"no counts":          good(func(m *Members) { m.Counts = nil }),
		"few slots":          good(func(m *Members) { m.Counts[0] = 1 }),
		"many slots":         good(func(m *Members) { m.Counts[0] = math.MaxUint32 }),
		"few address counts": good(func(m *Members) { m.AddressCounts = m.AddressCounts[:1] }),
		"few addresses":      good(func(m *Members) { m.AddressCounts[0] = 2 }),
		"many addresses":     good(func(m *Members) { m.AddressCounts[0] = 0 }),
		"few ports":          good(func(m *Members) { m.AddressPorts = m.AddressPorts[:1] }),
		"no such start":      good(func(m *Members) { m.AddressStarts[1] = 1 }),
		"huge port":          good(func(m *Members) { m.AddressPorts[0] = 1 << 16 }),
		"too many addresses": good(func(m *Members) {
			m.AddressStarts, m.AddressPorts = make([]uint32, maxAddresses+1), make([]uint32, maxAddresses+1)
		}),
		"long addresses": good(func(m *Members) { m.Starts[0] = strings.Repeat("x", maxText/2) }),
		"a rank of too many addresses": good(func(m *Members) {
			m.AddressStarts, m.AddressPorts = make([]uint32, maxAddrs+2), make([]uint32, maxAddrs+2)
			m.AddressCounts[0] = maxAddrs + 1
		}),
	} {
		if _, err := read(m); err == nil || !strings.HasPrefix(err.Error(), "line: ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := (Place{Generation: 3, Size: 2, members: &members{size: 2, whole: []byte{0xff}}}).World(); err == nil {
		t.Error("a malformed message was taken")
	}
}

// TestWorldArrives: all kinds of slots and addresses survive encoding.
func TestWorldArrives(t *testing.T) {
	ids := []plan.SlotID{{Host: "b", Index: 3}, {Host: "b", Index: 1}, {Host: "a"}, {Host: "b", Index: 2}, {Host: "", Index: 7}}
	slots, err := plan.Assign(ids)
	if err != nil {
		t.Fatal(err)
	}
	addrs := [][]string{
		{"10.0.0.1:5", "[::1]:5", ""}, nil, {":", ":0", ":1", "a:01", "a:65535", "a:65536", "a:+1", "a:1_0", "a: 1"}, {"", ""}, {"a", "a:1:2", "é:9"},
	}
	w := again(t, World{World: plan.World{Generation: 5, Slots: slots}, Rank: 4, SyncRoot: 2, Seq: 9}, addrs)
	if !reflect.DeepEqual(w.DataAddrs(), addrs) || !slices.Equal(w.Slots, slots) || w.Rank != 4 || w.SyncRoot != 2 || w.Seq != 9 {
		t.Errorf("%+v arrived, with %q", w, w.DataAddrs())
	}
}

// BenchmarkWorld measures how long it takes to decode a world of a thousand members with their
// addresses.
func BenchmarkWorld(b *testing.B) {
	const n = 1000
	ids, all := make([]plan.SlotID, n), make([]Member, n)
	for i := range n {
		ids[i] = plan.SlotID{Host: fmt.Sprintf("host%04d", i/8), Index: i % 8}
		all[i].DataAddrs = []string{fmt.Sprintf("10.0.%d.%d:%d", i/8/256, i/8%256, 40000+i%8), fmt.Sprintf("127.0.0.1:%d", 40000+i%8)}
	}
	slots, err := plan.Assign(ids)
	if err != nil {
		b.Fatal(err)
	}
	text := NewMembers(plan.World{Generation: 1, Slots: slots}, all).Append(nil)
	b.ReportAllocs()
	for b.Loop() {
		w, err := Place{Generation: 1, Size: n, members: &members{size: n, whole: text}}.World()
		if err != nil {
			b.Fatal(err)
		}
		w.DataAddrs()
	}
	b.ReportMetric(float64(len(text)), "bytes")
}
