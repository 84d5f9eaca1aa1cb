package transfer

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
)

// A value is sent as its differences from the previous one, so a message about a few changes is
// short.
func TestValues(t *testing.T) {
	before := []*Value{NewValue([]byte("some bytes"), nil), NewValue(make([]byte, snapshot.ChunkSize+1), nil), nil}
	now := []*Value{
		NewValue([]byte("other bytes"), before[0]), NewValue(append(make([]byte, snapshot.ChunkSize), 1), before[1]), NewValue(nil, nil),
	}
	b := AppendValues(nil, now, true)
	if len(b) > 100 {
		t.Errorf("%d bytes for a few that have changed", len(b))
	}
	r := NewReader(b)
	got := r.Values(3, before)
	if err := r.End(); err != nil {
		t.Error(err)
	}
	for i, v := range got {
		if v == nil || !bytes.Equal(v.Bytes(), now[i].Bytes()) {
			t.Errorf("value %d is another", i)
		}
	}
	r = NewReader(b)
	if r.Values(3, nil); r.End() == nil {
		t.Error("differences from nothing are taken")
	}
}

// FuzzMessages: an accepted message is within its bounds, and encodes and decodes to the same
// message again.
func FuzzMessages(f *testing.F) {
	before := []*Value{NewValue([]byte("some bytes"), nil), NewValue(make([]byte, snapshot.ChunkSize+1), nil)}
	now := []*Value{NewValue([]byte("other bytes"), before[0]), NewValue(append(make([]byte, snapshot.ChunkSize), 1), before[1])}
	whole := Manifest{Number: 3, Layout: layout, lengths: []int{3, snapshot.ChunkSize + 1}, sums: []uint32{1, 2, 3}, there: []byte{1, 0, 1}}
	f.Add(whole.append(nil))
	f.Add((&Head{Manifest: Manifest{Layout: layout, lengths: []int{3}}, Carried: [][]byte{nil, {1}}, size: 4}).append(nil))
	f.Add((&Step{Number: 3, Carried: [][]byte{{1, 2}}, Sums: []Sum{{1, 2}}}).append(nil))
	f.Add(AppendValues(nil, now, true))
	f.Add(AppendValues(nil, []*Value{nil, NewValue(nil, nil)}, false))
	f.Fuzz(func(t *testing.T, b []byte) {
		same := func(got, want any, err error) {
			t.Helper()
			if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%+v, %v, want %+v", got, err, want)
			}
		}
		r := NewReader(b)
		if m := r.manifest(); r.End() == nil {
			if len(m.sums) != len(m.there) || len(m.sums) > len(b) || len(m.lengths) > len(b) {
				t.Errorf("%d chunks of %d blobs in %d bytes", len(m.sums), len(m.lengths), len(b))
			}
			again := NewReader(m.append(nil))
			same(again.manifest(), m, again.Err())
		}
		if h, err := parseHead(b); err == nil {
			again, err := parseHead(h.append(nil))
			same(again, h, err)
		}
		if s, err := parseStep(b); err == nil {
			again, err := parseStep(s.append(nil))
			same(again, s, err)
		}
		r = NewReader(b)
		if all := r.Values(2, before); r.End() == nil {
			again := NewReader(AppendValues(nil, all, false))
			for i, v := range again.Values(2, nil) {
				switch {
				case (v == nil) != (all[i] == nil):
					t.Errorf("value %d: %v, want %v", i, v, all[i])
				case v != nil && (v.Len() != len(v.Bytes()) || !bytes.Equal(v.Bytes(), all[i].Bytes()) || !slices.Equal(v.sums, all[i].sums)):
					t.Errorf("value %d of %d bytes is another", i, v.Len())
				}
			}
			if err := again.End(); err != nil {
				t.Error(err)
			}
		}
	})
}
