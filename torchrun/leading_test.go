package torchrun

import (
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/torchrun/replica"
	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

// TestLeadingStore: the store of the leading agent passes the tests of all stores.
func TestLeadingStore(t *testing.T) {
	p, err := NewPeers(nil, "run", "127.0.0.1", discard())
	if err == nil {
		_, err = p.Listen("127.0.0.1:0")
	}
	if err != nil {
		t.Fatal(err)
	}
	noon := time.Date(2020, 1, 1, 12, 0, 0, 0, time.UTC)
	at, err := p.leadStore(t.Context(), &replica.Node{Name: p.Member()}, []string{p.Member()}, store.ClockAt(noon))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		at.close()
		p.Close(t.Context())
	})
	if e, err := at.Get(t.Context(), "key"); err != nil || e.Now.Before(noon) || e.Now.Year() != 2020 {
		t.Errorf("its clock does not go on from that of the store before it: %v, %v", e.Now, err)
	}
	storetest.Run(t, func(*testing.T) store.Store { return at })
}

// TestOldValuesGo: when the store has too many values it drops the oldest ones, but never the
// record.
func TestOldValuesGo(t *testing.T) {
	p, err := NewPeers(nil, "run", "127.0.0.1", discard())
	if err == nil {
		_, err = p.Listen("127.0.0.1:0")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(t.Context())
	at, err := p.leadStore(t.Context(), &replica.Node{Name: p.Member()}, []string{p.Member()}, store.Clock{})
	if err != nil {
		t.Fatal(err)
	}
	defer at.close()
	set := func(key string) {
		if _, is, err := at.CompareAndSet(t.Context(), key, 0, nil); !is || err != nil {
			t.Fatalf("%s: %v, %v", key, is, err)
		}
	}
	set("run/record")
	set("run/0/old")
	at.mu.Lock()
	for i := range uint64(mostValues) {
		at.values[string(rune('a'+i))] = at.version + i
	}
	at.version += mostValues
	at.mu.Unlock()
	set("run/1/new")
	for key, want := range map[string]bool{"run/record": true, "run/0/old": false, "run/1/new": true} {
		if e, err := at.Get(t.Context(), key); err != nil || (e.Version > 0) != want {
			t.Errorf("%s: version %d, %v", key, e.Version, err)
		}
	}
}
