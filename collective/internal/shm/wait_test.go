package shm

import (
	"runtime"
	"sync/atomic"
	"testing"
)

// TestLead: the pause before the first look grows up to a bound with looks that were too early, and
// shrinks with others. Members that share cores do not pause.
func TestLead(t *testing.T) {
	m := &Member{}
	m.looked(true)
	if m.lead != leadStep {
		t.Errorf("%d turns after an early look, not %d", m.lead, leadStep)
	}
	for range 2 * mostLead / leadStep {
		m.looked(true)
	}
	if m.lead != mostLead {
		t.Errorf("%d turns at most, not %d", m.lead, mostLead)
	}
	for range mostLead - 1 {
		m.looked(false)
	}
	if m.lead != 1 {
		t.Errorf("%d turns, not 1", m.lead)
	}
	m.looked(false)
	m.looked(false)
	m.oversubscribed = true
	m.looked(true)
	if m.lead != 0 {
		t.Errorf("%d turns, not 0", m.lead)
	}
}

// TestSpinsForCore: a member that shares its core with others spins only while it waits for a
// member on another core, and if all members on its own core have come.
func TestSpinsForCore(t *testing.T) {
	for _, c := range []struct {
		name  string
		cores [4]uint32 // from 1
		given [4]uint64
		of    int
		want  bool
	}{
		{"the others of the core have come", [4]uint32{1, 1, 2, 2}, [4]uint64{0, 7, 7, 0}, 2, true},
		{"one of the core has not", [4]uint32{1, 1, 2, 2}, [4]uint64{7, 6, 7, 7}, 2, false},
		{"it has not come itself", [4]uint32{1, 1, 2, 2}, [4]uint64{7, 7, 6, 7}, 2, false},
		{"it shares the core", [4]uint32{1, 1, 2, 2}, [4]uint64{7, 7, 7, 7}, 1, false},
		{"alone on a core", [4]uint32{1, 2, 2, 2}, [4]uint64{0, 0, 0, 7}, 3, true},
		{"own core unknown", [4]uint32{0, 1, 2, 2}, [4]uint64{7, 7, 7, 7}, 2, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			members := gathering(t, 4, nil)
			defer leave(t, members)
			m := members[0]
			for i, a := range m.areas {
				atomic.StoreUint32(&a.core, c.cores[i])
				atomic.StoreUint64(&a.given.word, c.given[i])
			}
			if got := m.spinsForCore(c.of, &m.areas[c.of].given.word, 7); got != c.want {
				t.Errorf("%v, not %v", got, c.want)
			}
		})
	}
}

// TestWaited: the time of a wait that becomes a sleep is measured.
func TestWaited(t *testing.T) {
	members := gathering(t, 2, nil)
	defer leave(t, members)
	eachMust(t, members, func(m *Member) error {
		for m.Index() == 1 && atomic.LoadUint32(&m.own.sleepers) == 0 {
			runtime.Gosched()
		}
		return m.Barrier(background, Desc{1})
	})
	if waited := members[0].Waited(); waited <= 0 {
		t.Errorf("waited for %v", waited)
	}
	if waited := members[0].Waited(); waited != 0 {
		t.Errorf("waited for %v since", waited)
	}
}
