package client

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestNoted: agents are told of many records at once, and not while these are made.
func TestNoted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, s := New(Config{}), &session{wake: make(chan struct{}, 1)}
		a.sessions = map[string]*session{"h": s}
		for round := range 2 {
			last := int64(0)
			for n := range 100 {
				last = int64(100*round + n + 1)
				a.Noted(time.Unix(0, last))
			}
			if synctest.Wait(); len(s.wake) > 0 || a.noted.Load() == last {
				t.Error("an agent is told at once")
			}
			<-time.After(notedDelay)
			if synctest.Wait(); len(s.wake) != 1 || a.noted.Load() != last {
				t.Errorf("after %v an agent is told of %d, want %d", notedDelay, a.noted.Load(), last)
			}
			<-s.wake
		}
	})
}
