package gossip

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

func (m Meta) equal(o Meta) bool {
	return m.Name == o.Name && m.Slots == o.Slots && m.Start.Equal(o.Start) && m.LaunchAddr == o.LaunchAddr &&
		m.Draining == o.Draining && slices.Equal(m.BadSlots, o.BadSlots) && m.Incarnation == o.Incarnation
}

func TestMetaRoundTrip(t *testing.T) {
	for _, m := range []Meta{
		{Name: "a", Start: time.Unix(0, 1)},
		{Name: "10.0.0.1", Slots: 8, Start: time.Unix(1800000000, 123456789), LaunchAddr: ":7947", Draining: true,
			BadSlots: []int{0, 3, 7}, Incarnation: "0123456789abcdef"},
		{Name: strings.Repeat("n", 253), Slots: 1024, Start: time.Unix(-1, 0), LaunchAddr: strings.Repeat("l", 150) + ":1",
			BadSlots: []int{1023}, Incarnation: strings.Repeat("i", maxIncarnation)},
	} {
		b, err := m.encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeMeta(b)
		if err != nil || !got.equal(m) {
			t.Errorf("%+v became %+v, %v", m, got, err)
		}
	}
}

func TestMetaRefuses(t *testing.T) {
	start := time.Unix(1, 0)
	for what, m := range map[string]Meta{
		"no name":          {Start: start},
		"a name of none":   {Name: "a b", Start: start},
		"negative slots":   {Name: "a", Slots: -1, Start: start},
		"no start":         {Name: "a"},
		"bad slot":         {Name: "a", Slots: 2, Start: start, BadSlots: []int{2}},
		"bad slots twice":  {Name: "a", Slots: 2, Start: start, BadSlots: []int{1, 1}},
		"no port":          {Name: "a", Start: start, LaunchAddr: "a"},
		"long incarnation": {Name: "a", Start: start, Incarnation: strings.Repeat("i", maxIncarnation+1)},
		"too much":         {Name: strings.Repeat("n", 253), Start: start, LaunchAddr: strings.Repeat("l", 253) + ":1"},
	} {
		if b, err := m.encode(); err == nil {
			t.Errorf("%s: encoded as %q", what, b)
		}
	}
	good, err := Meta{Name: "a", Slots: 1, Start: start}.encode()
	if err != nil {
		t.Fatal(err)
	}
	for n := range good {
		if m, err := decodeMeta(good[:n]); err == nil {
			t.Errorf("the first %d bytes became %+v", n, m)
		}
	}
	if m, err := decodeMeta(append(bytes.Clone(good), 0)); err == nil {
		t.Errorf("with a byte too many it became %+v", m)
	}
	newer := bytes.Clone(good)
	newer[0] = MetaVersion + 1
	_, err = decodeMeta(newer)
	if v, ok := errors.AsType[*versionError](err); !ok || v.Version != MetaVersion+1 {
		t.Errorf("a newer version: %v", err)
	}
}

func FuzzDecodeMeta(f *testing.F) {
	for _, m := range []Meta{
		{Name: "a", Start: time.Unix(1, 0)},
		{Name: "node-7", Slots: 8, Start: time.Unix(1800000000, 5), LaunchAddr: "10.0.0.7:7947", Draining: true,
			BadSlots: []int{2, 5}, Incarnation: "0123456789abcdef"},
	} {
		b, err := m.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(b)
		if err != nil {
			return
		}
		again, err := m.encode()
		if err != nil {
			t.Fatalf("%+v cannot be said again: %v", m, err)
		}
		if len(again) > len(b) {
			t.Errorf("%d bytes became %d", len(b), len(again))
		}
		if got, err := decodeMeta(again); err != nil || !got.equal(m) {
			t.Errorf("%+v became %+v, %v", m, got, err)
		}
	})
}
