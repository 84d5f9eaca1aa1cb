package line

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/plan"
)

// FuzzJoin: a join is either within its bounds and survives another encoding, or refused.
func FuzzJoin(f *testing.F) {
	f.Add(Up("join", Joining{After: 2, Commits: 3, HoldsState: true, DataAddrs: []string{"10.0.0.1:5", "[::1]:5"}, Cause: "a peer is gone",
		Lost: []int{0, 7}, Undone: 3, Handle: "h", Program: "torch 2.14", Trained: new(true), CanWiden: true, Has: 9}))
	f.Add([]byte(`{"do":"join","lost":[-1],"addresses":null}`))
	f.Add([]byte(`{"do":"join","undone":-1}`))
	f.Add(Up("join", Joining{DataAddrs: make([]string, maxAddrs+1)}))
	f.Fuzz(func(t *testing.T, text []byte) {
		var j Joining
		if json.Unmarshal(text, &j) != nil || j.Check() != nil {
			return
		}
		if len(j.DataAddrs) > maxAddrs || len(j.Cause) > maxCause || len(j.Lost) > maxLost || len(j.Handle) > MaxHandle || len(j.Program) > maxProgram {
			t.Errorf("taken: %+v", j)
		}
		var back Joining
		if err := json.Unmarshal(Up("join", j), &back); err != nil || back.Check() != nil {
			t.Fatal(err)
		}
		if len(j.DataAddrs) == 0 {
			j.DataAddrs = nil
		}
		if len(j.Lost) == 0 {
			j.Lost = nil
		}
		if !reflect.DeepEqual(back, j) {
			t.Errorf("%+v became %+v", j, back)
		}
	})
}

// FuzzBeat: a heartbeat is either within its bounds and survives another encoding, or refused.
func FuzzBeat(f *testing.F) {
	f.Add(Up("pulse", Beat{Generation: 3, Phase: Training, Quiet: 5, Commits: 9, Lanes: []Lane{{ID: 1, Operation: 7, Waiting: true, For: 9, What: "all-reduce"}},
		Counters: &Counters{Commits: 4, CommitTime: 5, CommitBytes: 6, Operations: []Operations{{Kind: "AllReduce", Backend: "memory", SizeClass: 2, Count: 1, Duration: 2, Bytes: 3}}},
		Waits:    []Wait{{1 << 63, 1000}}, Entered: []Entered{{Syncing, 7}}, Figures: []Figure{{Name: "loss", Value: 1}}}))
	f.Add([]byte(`{"phase":1,"figures":[{"name":"a","value":null},{"name":"a","value":2}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		b, err := hearBeat(text)
		if err != nil {
			return
		}
		if len(b.Lanes) > MaxLanes || len(b.Waits) > maxWaits || len(b.Entered) > maxEntered || len(b.Figures) > maxFigures || b.Quiet < 0 || !b.Phase.valid() {
			t.Errorf("taken: %+v", b)
		}
		if b.Counters != nil && (len(b.Counters.Operations) > MaxOperations || b.Counters.CommitTime < 0) {
			t.Errorf("taken: %+v", b.Counters)
		}
		said := Up("pulse", b)
		back, err := hearBeat(said)
		if again := Up("pulse", back); err != nil || string(again) != string(said) {
			t.Errorf("%s became %s, %v", said, again, err)
		}
	})
}

// FuzzReport: the name of a backend and an error are texts that a terminal and a log can show.
func FuzzReport(f *testing.F) {
	f.Add(Up("report", ReportLine{What: "backend", Backend: "ipc+hosts"}))
	f.Add(Up("report", ReportLine{What: "backend", Backend: "\x1b[2J"}))
	f.Add(Up("report", ReportLine{What: "failed", Error: "a\nb"}))
	f.Fuzz(func(t *testing.T, text []byte) {
		var r ReportLine
		if json.Unmarshal(text, &r) != nil || r.Check() != nil {
			return
		}
		bad := func(c rune) bool { return c < ' ' || c == 0x7f }
		switch {
		case r.What == "backend" && (r.Backend == "" || len(r.Backend) > maxBackend || strings.ContainsFunc(r.Backend, bad)),
			r.What == "failed" && (r.Error == "" || len(r.Error) > MaxError || strings.ContainsFunc(r.Error, bad)),
			r.What != "backend" && r.What != "failed" && r.Report() == 0:
			t.Errorf("%+v is taken", r)
		}
	})
}

// FuzzMessage: a line to a worker is read within its bounds, and an accepted place is in a later
// world.
func FuzzMessage(f *testing.F) {
	f.Add(append(Text(Message{Is: "world", Generation: 3, Rank: 1, Size: 2, DataKey: strings.Repeat("00", 32), Tail: 1}), "\nx"...), uint64(2))
	f.Add([]byte(`{"is":"world","tail":-1}`+"\n"), uint64(0))
	f.Add([]byte(`{"is":"updated","seq":3,"change":["added"]}`+"\n"), uint64(0))
	f.Fuzz(func(t *testing.T, text []byte, after uint64) {
		m, tail, err := NewReader(strings.NewReader(string(text)), mostDown).Message()
		if err != nil {
			return
		}
		if len(tail) != m.Tail {
			t.Errorf("%d bytes of %d", len(tail), m.Tail)
		}
		p, err := ReadPlace(&m, tail, after, nil)
		if err == nil && (p.Generation <= after || p.Rank < 0 || p.Rank >= p.Size || p.SyncRoot < 0 || p.SyncRoot >= p.Size) {
			t.Errorf("taken after %d: %+v", after, p)
		}
	})
}

// FuzzMembers: an accepted world has the announced number of members, each in its own slot.
func FuzzMembers(f *testing.F) {
	f.Add((&Members{
		Hosts: []string{"a", "b"}, Counts: []uint32{2, 1}, Indices: []uint32{0, 2, 0},
		AddressCounts: []uint32{1, 0, 2}, AddressStarts: []uint32{0, 1, 0}, AddressPorts: []uint32{0, 65535, 1}, Starts: []string{"a:x", ""},
	}).Append(nil), 3)
	f.Add((&Members{Hosts: []string{""}, Counts: []uint32{1}, Indices: []uint32{1 << 31}}).Append(nil), 1)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		if size < 1 {
			return // this place is not in the world
		}
		p := Place{Generation: 3, Size: size, members: &members{size: size, whole: b}}
		w, err := p.World()
		if err != nil {
			return
		}
		addrs := w.DataAddrs()
		if w.Size() != size || len(addrs) != size {
			t.Errorf("%d taken for %d: %+v", w.Size(), size, w)
		}
		seen := make(map[plan.SlotID]bool)
		for r, s := range w.Slots {
			if seen[s.SlotID] || s.Rank != r || len(addrs[r]) > maxAddrs {
				t.Errorf("taken: %+v", w)
			}
			seen[s.SlotID] = true
			if min(s.Index, s.LocalRank, s.LocalSize, s.CrossRank, s.CrossSize) < 0 {
				t.Errorf("taken: %+v", s)
			}
		}
		if back := again(t, w, addrs); !reflect.DeepEqual(back.World, w.World) || !reflect.DeepEqual(back.DataAddrs(), addrs) {
			t.Errorf("%+v became %+v", w, back)
		}
	})
}

// FuzzDifference: the members that a difference yields have the announced number, each in its own
// slot, and all of them were there before or are added. The difference between the two yields them
// again.
func FuzzDifference(f *testing.F) {
	old := &Members{
		Hosts: []string{"a", "b"}, Counts: []uint32{2, 1}, Indices: []uint32{0, 2, 0},
		AddressCounts: []uint32{1, 0, 2}, AddressStarts: []uint32{0, 1, 0}, AddressPorts: []uint32{0, 65535, 1}, Starts: []string{"a:x", ""},
	}
	added := &Members{
		Hosts: []string{"a"}, Counts: []uint32{1}, Indices: []uint32{1}, AddressCounts: []uint32{1}, AddressStarts: []uint32{0},
		AddressPorts: []uint32{7}, Starts: []string{"c"}, Handles: [][]byte{[]byte("h")},
	}
	for _, d := range []*MembersDifference{
		{LeftOut: []uint32{0, 0}, Taken: []uint32{1, 1}, Followed: []uint32{1, 0}, Added: added},
		{LeftOut: []uint32{1}, Taken: []uint32{2}, Followed: []uint32{0}, Added: &Members{}},
		{LeftOut: []uint32{0}, Taken: []uint32{math.MaxUint32}, Followed: []uint32{0}, Added: &Members{}},
		{LeftOut: []uint32{0}, Taken: []uint32{0}, Followed: []uint32{math.MaxUint32}, Added: &Members{}},
	} {
		f.Add(old.Append(nil), d.Append(nil), 3)
	}
	f.Fuzz(func(t *testing.T, before, said []byte, size int) {
		d := &decoder{rest: before}
		was := d.members()
		if size < 1 || d.end() != nil {
			return
		}
		base := &members{size: len(was.Indices), whole: before}
		made := &members{size: size}
		made.differsFrom(base, said)
		w, err := Place{Generation: 3, Size: size, members: made}.World()
		if err != nil {
			return
		}
		if w.Size() != size || w.Size() > len(was.Indices)+len(said) {
			t.Errorf("%d taken for %d: %+v", w.Size(), size, w)
		}
		seen := make(map[plan.SlotID]bool)
		for _, s := range w.Slots {
			if seen[s.SlotID] {
				t.Errorf("taken: %+v", w)
			}
			seen[s.SlotID] = true
		}
		again, err := apply(base.columns, Difference(base.columns, made.columns), size)
		if err != nil || !reflect.DeepEqual(normal(again), normal(made.columns)) {
			t.Errorf("%v became %v, %v", made.columns, again, err)
		}
	})
}

// again encodes and decodes a world.
func again(t *testing.T, w World, addrs [][]string) World {
	t.Helper()
	all := make([]Member, w.Size())
	for r := range all {
		all[r].DataAddrs = addrs[r]
	}
	place, err := ReadPlace(&Message{
		Generation: w.Generation, Rank: w.Rank, Root: w.SyncRoot, Seq: w.Seq, Size: w.Size(), DataKey: strings.Repeat("00", 32),
	}, NewMembers(w.World, all).Append(nil), w.Generation-1, nil)
	if err != nil {
		t.Fatal(err)
	}
	back, err := place.World()
	if err != nil {
		t.Fatal(err)
	}
	return back
}
