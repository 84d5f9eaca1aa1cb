package rendezvous

import (
	"math"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire/rendezvouspb"
	"github.com/hvdrun/hvdrun/plan"
)

func encoded(f *testing.F, m proto.Message) []byte {
	f.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		f.Fatal(err)
	}
	return b
}

// FuzzJoin: a join is within its bounds or refused.
func FuzzJoin(f *testing.F) {
	j := Joining{After: 2, Commits: 3, HoldsState: true, DataAddrs: []string{"10.0.0.1:5", "[::1]:5"}, NotifyAddr: "10.0.0.1:6", Cause: "a peer is gone", Lost: []int{0, 7}, Undone: 3, Handle: []byte("h"), Program: "torch 2.14"}
	f.Add(encoded(f, j.toWire()))
	f.Add(encoded(f, &rendezvouspb.JoinRequest{DataAddresses: []string{strings.Repeat("a", maxAddr+1)}}))
	f.Add(encoded(f, &rendezvouspb.JoinRequest{DataAddresses: make([]string, maxAddrs+1)}))
	f.Add(encoded(f, &rendezvouspb.JoinRequest{Lost: make([]uint32, maxLost+1)}))
	f.Add(encoded(f, &rendezvouspb.JoinRequest{Lost: []uint32{1 << 31}}))
	f.Add(encoded(f, &rendezvouspb.JoinRequest{UndoneNanoseconds: 1 << 63}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var req rendezvouspb.JoinRequest
		if proto.Unmarshal(b, &req) != nil || validate(&req) != nil {
			return
		}
		j := joiningFromWire(&req)
		if len(j.DataAddrs) > maxAddrs || len(j.NotifyAddr) > maxAddr || len(j.Cause) > maxCause || len(j.Lost) > maxLost ||
			len(j.Handle) > MaxHandle || len(j.Program) > maxProgram {
			t.Errorf("taken: %+v", j)
		}
		if back := joiningFromWire(j.toWire()); !reflect.DeepEqual(back, j) {
			t.Errorf("%+v became %+v", j, back)
		}
	})
}

// FuzzPlace: an accepted place is in a later world.
func FuzzPlace(f *testing.F) {
	f.Add(encoded(f, &rendezvouspb.World{Generation: 3, Rank: 1, Size: 2, Members: []byte("x"), DataKey: make([]byte, 32)}), uint64(2))
	f.Add(encoded(f, &rendezvouspb.World{Generation: 3, SyncRoot: 1, Size: 1, DataKey: make([]byte, 31)}), uint64(2))
	f.Fuzz(func(t *testing.T, b []byte, after uint64) {
		var m rendezvouspb.World
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		p, err := placeFromWire(&m, after, nil)
		if err != nil {
			return
		}
		if p.Generation <= after || p.Rank < 0 || p.Rank >= p.Size || p.SyncRoot < 0 || p.SyncRoot >= p.Size {
			t.Errorf("taken after %d: %+v", after, p)
		}
	})
}

// FuzzMembers: an accepted world has the announced number of members, each in its own slot.
func FuzzMembers(f *testing.F) {
	f.Add(encoded(f, &rendezvouspb.Members{
		Hosts: []string{"a", "b"}, Counts: []uint32{2, 1}, Indices: []uint32{0, 2, 0},
		AddressCounts: []uint32{1, 0, 2}, AddressStarts: []uint32{0, 1, 0}, AddressPorts: []uint32{0, 65535, 1}, Starts: []string{"a:x", ""},
	}), 3)
	f.Add(encoded(f, &rendezvouspb.Members{Hosts: []string{""}, Counts: []uint32{1}, Indices: []uint32{1 << 31}}), 1)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		if size < 1 {
			return // there is no such place
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

// FuzzDifference: members that a difference makes have the announced number, each in its own slot,
// and none that were neither there before nor added. The difference between both makes them again.
func FuzzDifference(f *testing.F) {
	old := &rendezvouspb.Members{
		Hosts: []string{"a", "b"}, Counts: []uint32{2, 1}, Indices: []uint32{0, 2, 0},
		AddressCounts: []uint32{1, 0, 2}, AddressStarts: []uint32{0, 1, 0}, AddressPorts: []uint32{0, 65535, 1}, Starts: []string{"a:x", ""},
	}
	added := &rendezvouspb.Members{
		Hosts: []string{"a"}, Counts: []uint32{1}, Indices: []uint32{1}, AddressCounts: []uint32{1}, AddressStarts: []uint32{0},
		AddressPorts: []uint32{7}, Starts: []string{"c"}, Handles: [][]byte{[]byte("h")},
	}
	for _, d := range []*rendezvouspb.MembersDifference{
		{LeftOut: []uint32{0, 0}, Taken: []uint32{1, 1}, Followed: []uint32{1, 0}, Added: added},
		{LeftOut: []uint32{1}, Taken: []uint32{2}, Followed: []uint32{0}},
		{LeftOut: []uint32{0}, Taken: []uint32{math.MaxUint32}, Followed: []uint32{0}},
		{LeftOut: []uint32{0}, Taken: []uint32{0}, Followed: []uint32{math.MaxUint32}},
	} {
		f.Add(encoded(f, old), encoded(f, d), 3)
	}
	f.Fuzz(func(t *testing.T, before, said []byte, size int) {
		var was rendezvouspb.Members
		if size < 1 || proto.Unmarshal(before, &was) != nil {
			return
		}
		base := &members{size: len(was.GetIndices()), whole: before}
		made := &members{size: size}
		made.differsFrom(base, said)
		w, err := Place{Generation: 3, Size: size, members: made}.World()
		if err != nil {
			return
		}
		if w.Size() != size || w.Size() > len(was.GetIndices())+len(said) {
			t.Errorf("%d taken for %d: %+v", w.Size(), size, w)
		}
		seen := make(map[plan.SlotID]bool)
		for _, s := range w.Slots {
			if seen[s.SlotID] {
				t.Errorf("taken: %+v", w)
			}
			seen[s.SlotID] = true
		}
		again, err := apply(base.columns, difference(base.columns, made.columns), size)
		if err != nil || !proto.Equal(again, made.columns) {
			t.Errorf("%v became %v, %v", made.columns, again, err)
		}
	})
}

// again encodes and decodes a world again.
func again(t *testing.T, w World, addrs [][]string) World {
	t.Helper()
	all := make([]Member, w.Size())
	for r := range all {
		all[r].DataAddrs = addrs[r]
	}
	said, err := proto.Marshal(membersToWire(w.World, all))
	if err != nil {
		t.Fatal(err)
	}
	place, err := placeFromWire(&rendezvouspb.World{
		Generation: w.Generation, Rank: uint32(w.Rank), SyncRoot: uint32(w.SyncRoot), Seq: w.Seq,
		Size: uint32(w.Size()), Members: said, DataKey: make([]byte, 32),
	}, w.Generation-1, nil)
	if err != nil {
		t.Fatal(err)
	}
	back, err := place.World()
	if err != nil {
		t.Fatal(err)
	}
	return back
}

// FuzzBeat: a heartbeat is within its bounds and survives another encoding, or is refused.
func FuzzBeat(f *testing.F) {
	b := Beat{Generation: 3, Phase: Training, Quiet: 5, Commits: 9, Lanes: []Lane{{ID: 1, Operation: 7, Waiting: true, For: 9, What: "all-reduce"}},
		Counters: &Counters{Commits: 4, CommitTime: 5, CommitBytes: 6, Operations: []Operations{{Kind: "AllReduce", Backend: "memory", SizeClass: 2, Count: 1, Duration: 2, Bytes: 3}}},
		Waits:    []Wait{{1 << 63, 1000}}, Entered: []Entered{{Syncing, 7}}}
	f.Add(encoded(f, &rendezvouspb.BeatRequest{Phase: 1, WaitOperations: []uint64{1}}))
	f.Add(encoded(f, &rendezvouspb.BeatRequest{Phase: 1, WaitOperations: make([]uint64, MaxWaits+1), WaitMicroseconds: make([]uint32, MaxWaits+1)}))
	f.Add(encoded(f, &rendezvouspb.BeatRequest{Phase: 1, Entered: []rendezvouspb.Phase{9}, EnteredNanoseconds: []uint64{1}}))
	f.Add(encoded(f, b.toWire()))
	f.Add(encoded(f, &rendezvouspb.BeatRequest{Phase: 1, Counters: &rendezvouspb.Counters{Operations: []*rendezvouspb.Operations{{Kind: "\x1b", Backend: "x"}}}}))
	f.Add(encoded(f, &rendezvouspb.BeatRequest{Phase: 1, Counters: &rendezvouspb.Counters{Operations: make([]*rendezvouspb.Operations, MaxOperations+1)}}))
	f.Add(encoded(f, &rendezvouspb.BeatRequest{Phase: 1, Lanes: make([]*rendezvouspb.Lane, MaxLanes+1)}))
	f.Fuzz(func(t *testing.T, said []byte) {
		var req rendezvouspb.BeatRequest
		if proto.Unmarshal(said, &req) != nil {
			return
		}
		b, err := beatFromWire(&req)
		if err != nil {
			return
		}
		if len(b.Lanes) > MaxLanes || len(b.Waits) > MaxWaits || len(b.Entered) > MaxEntered || b.Quiet < 0 || b.Phase < Joins || b.Phase > Fetches {
			t.Errorf("taken: %+v", b)
		}
		if b.Counters != nil && (len(b.Counters.Operations) > MaxOperations || b.Counters.CommitTime < 0) {
			t.Errorf("taken: %+v", b.Counters)
		}
		if back, err := beatFromWire(b.toWire()); err != nil || !reflect.DeepEqual(back, b) {
			t.Errorf("%+v became %+v, %v", b, back, err)
		}
	})
}

// FuzzReport: the name of a backend is one that a terminal and a log can show.
func FuzzReport(f *testing.F) {
	f.Add(encoded(f, &rendezvouspb.ReportRequest{Report: rendezvouspb.Report_REPORT_BACKEND, Backend: "ipc+hosts"}))
	f.Add(encoded(f, &rendezvouspb.ReportRequest{Report: rendezvouspb.Report_REPORT_BACKEND, Backend: "\x1b[2J"}))
	f.Add(encoded(f, &rendezvouspb.ReportRequest{Report: 99, Generation: 3}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var req rendezvouspb.ReportRequest
		if proto.Unmarshal(b, &req) != nil || checkBackend(req.GetBackend()) != nil {
			return
		}
		name := req.GetBackend()
		if name == "" || len(name) > maxBackend || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
			t.Errorf("%q is taken", name)
		}
	})
}
