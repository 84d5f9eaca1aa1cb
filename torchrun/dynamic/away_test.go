package dynamic

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

var errAway = errors.New("store: connection refused")

// leaving is a store that is unreachable while away is true.
type leaving struct {
	storetest.Memory
	away atomic.Bool
}

func (l *leaving) err() error {
	if l.away.Load() {
		return errAway
	}
	return nil
}

func (l *leaving) Get(ctx context.Context, key string) (store.Entry, error) {
	if err := l.err(); err != nil {
		return store.Entry{}, err
	}
	return l.Memory.Get(ctx, key)
}

func (l *leaving) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (store.Entry, bool, error) {
	if err := l.err(); err != nil {
		return store.Entry{}, false, err
	}
	return l.Memory.CompareAndSet(ctx, key, version, value)
}

func (l *leaving) Wait(ctx context.Context, key string, version uint64) (store.Entry, error) {
	if err := l.err(); err != nil {
		return store.Entry{}, err
	}
	e, err := l.Memory.Wait(ctx, key, version)
	return e, errors.Join(err, l.err())
}

// TestStoreIsAway: a round survives the time in which its store is unreachable, and its return,
// although heartbeats have been missing for long. The log has the reason, at growing intervals.
// After the return, nodes that arrive or fall silent are noticed.
func TestStoreIsAway(t *testing.T) {
	for _, event := range []string{"comes", "is silent"} {
		t.Run(event, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				set := *settings(1, 3)
				set.KeepAliveInterval = time.Second
				shared := new(leaving)
				a, b := handler(t, shared, set), handler(t, shared, set)
				log, hook := logtest.NewNullLogger()
				a.cfg.Log = log
				together(t, a, b)
				var told []bool
				changed := make(chan Change, 1)
				var watching sync.WaitGroup
				watching.Go(func() {
					c, err := a.Changed(t.Context(), func(is bool) { told = append(told, is) })
					if err != nil {
						t.Error(err)
					}
					changed <- c
				})
				<-time.After(3 * time.Second)
				for range 2 {
					shared.away.Store(true)
					<-time.After(10 * time.Minute)
					shared.away.Store(false)
					<-time.After(time.Minute)
				}
				synctest.Wait()
				if len(changed) > 0 {
					t.Fatalf("the store was away: %+v", <-changed)
				}
				if len(told) != 4 || !told[0] || told[1] {
					t.Errorf("told %v", told)
				}
				warnings, back := 0, 0
				for _, e := range hook.AllEntries() {
					switch {
					case e.Level == logrus.WarnLevel && strings.HasSuffix(e.Message, errAway.Error()):
						warnings++
					case e.Level == logrus.InfoLevel && strings.Contains(e.Message, "can be reached again, after "):
						back++
					default:
						t.Error(e.Message)
					}
				}
				if warnings < 4 || warnings > 24 || back != 2 {
					t.Errorf("it was away for 10 minutes, twice: logged %d times, and its return %d times", warnings, back)
				}
				third := handler(t, shared, set)
				ctx, cancel := context.WithCancel(t.Context())
				if event == "comes" {
					watching.Go(func() { _, _ = third.Next(ctx) })
				} else {
					b.Stop()
				}
				c := <-changed
				if event == "comes" && c.Waiting != 1 || event != "comes" && (len(c.Lost) != 1 || c.Lost[0] != b.Node()) {
					t.Errorf("%+v", c)
				}
				cancel()
				watching.Wait()
			})
		})
	}
}

// TestWaitsAreNamed: a node that waits for others logs that at growing intervals, and its error
// says how many have joined.
func TestWaitsAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set := *settings(2, 2)
		set.Join = 10 * time.Minute
		shared := new(leaving)
		lines := func(h *Handler) (said []string) {
			log, hook := logtest.NewNullLogger()
			h.cfg.Log = log
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			_, err := h.Next(ctx)
			for _, e := range hook.AllEntries() {
				said = append(said, e.Message)
			}
			return append(said, err.Error())
		}
		a, b := handler(t, shared, set), handler(t, shared, set)
		a.node.Addr, b.node.Addr = "left", "right"
		said := lines(a)
		if first := said[0]; first != "rendezvous: waiting for 10s: 1 of at least 2 nodes have joined: left" {
			t.Errorf("it says %q", first)
		}
		if len(said) < 4 || len(said) > 9 {
			t.Errorf("it says %q", said)
		}
		want := "joining a round was not possible within 10m"
		if last := said[len(said)-1]; !strings.Contains(last, want) || !strings.HasSuffix(last, "s: 1 of at least 2 nodes have joined: left") {
			t.Errorf("it ends with %q", last)
		}
		together(t, a, b)
		spare := handler(t, shared, set)
		if said := lines(spare); len(said) < 5 || !strings.Contains(said[0], "all 2 nodes of the job are there") {
			t.Errorf("the spare node says %q", said)
		}
	})
}

// TestDropSilent: Drop removes a member from the record although its heartbeats have already
// expired.
func TestDropSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set := *settings(1, 2)
		shared := new(leaving)
		a, b := handler(t, shared, set), handler(t, shared, set)
		rounds := together(t, a, b)
		a.Stop()
		b.Stop()
		<-time.After(time.Hour)
		if err := a.Drop(t.Context(), rounds[0].Number, b.Node()); err != nil {
			t.Fatal(err)
		}
		if s := record(t, shared, nil); len(s.Participants) != 1 || len(s.LastRanks) != 1 {
			t.Errorf("%+v", s)
		}
	})
}
