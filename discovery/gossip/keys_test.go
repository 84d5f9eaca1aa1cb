package gossip

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hashicorp/memberlist"
)

// TestKeysAreReplaced: the key of a cluster is replaced member by member, and no member is lost
// meanwhile. At the end the old key alone does not admit a member.
func TestKeysAreReplaced(t *testing.T) {
	old, next := testKey, bytes.Repeat([]byte{7}, keyLen)
	a := mustJoin(t, agentConfig("a", 0))
	b := mustJoin(t, agentConfig("b", 1, a.Addr()))
	s := NewSource(observerConfig(a.Addr()))
	f := follow(t, s)
	f.until("a:2 b:2")
	f.seen = nil
	slots := 2
	heard := func() { // checks that what each member says reaches the others
		t.Helper()
		slots++
		for _, m := range []*Member{a, b} {
			meta, _ := m.Meta()
			meta.Slots = slots
			if err := m.SetMeta(within(t), meta); err != nil {
				t.Fatal(err)
			}
		}
		f.until(fmt.Sprintf("a:%d b:%[1]d", slots))
	}
	for _, keys := range [][][]byte{{old, next}, {next, old}, {next}} {
		for _, m := range []interface{ SetKeys([][]byte) error }{a, s, b} {
			if err := m.SetKeys(keys); err != nil {
				t.Fatal(err)
			}
			heard()
		}
	}
	if _, err := Join(within(t), observerConfig(a.Addr())); !errors.Is(err, ErrKey) {
		t.Errorf("with the old key: %v", err)
	}
	cfg := observerConfig(a.Addr())
	cfg.Key = next
	late := NewSource(cfg)
	defer late.Close()
	if _, err := late.Discover(within(t)); err != nil {
		t.Errorf("with the new key: %v", err)
	}
	for _, before := range f.seen {
		if !strings.HasPrefix(before, "a:") || !strings.Contains(before, " b:") {
			t.Errorf("a host was lost meanwhile: %q", f.seen)
		}
	}
	for _, bad := range [][][]byte{nil, {}, {next[1:]}, {next, nil}} {
		if a.SetKeys(bad) == nil || s.SetKeys(bad) == nil {
			t.Errorf("%d keys were taken", len(bad))
		}
	}
	heard()
}

// TestKeysBeforeTheFirstDiscovery: a source joins with the keys that it was given before.
func TestKeysBeforeTheFirstDiscovery(t *testing.T) {
	a := mustJoin(t, agentConfig("a", 0))
	cfg := observerConfig(a.Addr())
	cfg.Key = bytes.Repeat([]byte{7}, keyLen)
	s := NewSource(cfg)
	defer s.Close()
	if err := s.SetKeys([][]byte{testKey}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Discover(within(t)); err != nil {
		t.Error(err)
	}
}

// TestReplaceKeys: replaceKeys sets the keys of a ring whatever it had before, and does not change
// the slices that GetKeys has returned, as the race detector would notice.
func TestReplaceKeys(t *testing.T) {
	key := func(n byte) []byte { return bytes.Repeat([]byte{n}, keyLen) }
	ring, err := memberlist.NewKeyring(nil, key(1))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var reading sync.WaitGroup
	defer reading.Wait()
	defer cancel()
	reading.Go(func() {
		for ctx.Err() == nil {
			for _, k := range ring.GetKeys() {
				if len(k) != keyLen {
					t.Error("an invalid key")
				}
			}
		}
	})
	for range 20 {
		for _, want := range [][][]byte{
			{key(1), key(2)}, {key(2), key(1)}, {key(2)}, {key(4), key(3)}, {key(3), key(1), key(2)}, {key(2), key(4), key(1)}, {key(1)},
		} {
			if err := replaceKeys(ring, want); err != nil {
				t.Fatal(err)
			}
			got := slices.Clone(ring.GetKeys())
			if !bytes.Equal(got[0], want[0]) || len(got) != len(want) {
				t.Fatalf("%d keys, want %d", len(got), len(want))
			}
			for _, k := range want {
				if !slices.ContainsFunc(got, func(o []byte) bool { return bytes.Equal(o, k) }) {
					t.Fatal("a key is missing")
				}
			}
		}
	}
}
