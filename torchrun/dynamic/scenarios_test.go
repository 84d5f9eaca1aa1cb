package dynamic

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/torchrun/store"
	"github.com/hvdrun/hvdrun/torchrun/store/storetest"
)

// The tests are named after the numbers of the scenarios.

var noon = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

// settings returns the settings of most scenarios.
func settings(least, most int) *Settings {
	s, err := Settings{
		RunID: "run", MinNodes: least, MaxNodes: most, KeepAliveInterval: 30 * time.Second, KeepAliveAttempts: 3,
	}.withDefaults()
	if err != nil {
		panic(err)
	}
	return &s
}

func node(n int) NodeDesc { return NodeDesc{"host", 1, n} }

// with returns a state with these participants and fresh heartbeats.
func with(participants ...NodeDesc) *State {
	s := newState()
	for i, n := range participants {
		s.Participants[n] = i
		s.LastHeartbeats[n] = noon
	}
	return s
}

func (s *State) waiting(nodes ...NodeDesc) *State {
	for _, n := range nodes {
		s.WaitList[n], s.LastHeartbeats[n] = true, noon
	}
	return s
}

func (s *State) redundant(nodes ...NodeDesc) *State {
	for _, n := range nodes {
		s.RedundancyList[n], s.LastHeartbeats[n] = true, noon
	}
	return s
}

func (s *State) completed() *State { s.Complete = true; return s }

func TestTimeouts(t *testing.T) {
	t.Run("T1", func(t *testing.T) {
		var s Settings
		if unknown, err := s.ParseConf(map[string]string{
			"join_timeout": "50", "last_call_timeout": "60", "close_timeout": "70", "heartbeat_timeout": "80",
			"keep_alive_interval": "0.5", "keep_alive_max_attempt": "7", "other": "x",
		}); err != nil || !slices.Equal(unknown, []string{"other"}) {
			t.Fatal(unknown, err)
		}
		if s.Join != 50*time.Second || s.LastCall != time.Minute || s.Close != 70*time.Second || s.Heartbeat != 80*time.Second ||
			s.KeepAliveInterval != 500*time.Millisecond || s.KeepAliveAttempts != 7 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("T2", func(t *testing.T) {
		s, err := Settings{RunID: "run", MinNodes: 1, MaxNodes: 1}.withDefaults()
		if err != nil || s.Join != 600*time.Second || s.LastCall != 30*time.Second || s.Close != 30*time.Second || s.Heartbeat != 5*time.Second {
			t.Errorf("%+v, %v", s, err)
		}
	})
	t.Run("T3", func(t *testing.T) {
		for _, key := range []string{"join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"} {
			for _, value := range []string{"0", "-1", "", "x", "NaN", "1e99"} {
				var s Settings
				if _, err := s.ParseConf(map[string]string{key: value}); err == nil || !strings.Contains(err.Error(), key) {
					t.Errorf("%s=%s: %v", key, value, err)
				}
			}
		}
		for _, s := range []Settings{
			{RunID: "run", MinNodes: 1, MaxNodes: 1, Join: -1}, {MinNodes: 1, MaxNodes: 1}, {RunID: "run", MaxNodes: 1},
			{RunID: "run", MinNodes: 2, MaxNodes: 1}, {RunID: "run", MinNodes: 1, MaxNodes: 1, KeepAliveAttempts: -1},
		} {
			if _, err := s.withDefaults(); err == nil {
				t.Errorf("%+v is accepted", s)
			}
		}
	})
}

func TestNodes(t *testing.T) {
	t.Run("N1", func(t *testing.T) {
		if got := (NodeDesc{"h", 3, 5}).String(); got != "h_3_5" {
			t.Error(got)
		}
	})
	t.Run("N2", func(t *testing.T) {
		var made []NodeDesc
		for range 4 {
			h, err := New(Config{Settings: *settings(1, 1), Store: &storetest.Memory{}, Log: quiet()})
			if err != nil {
				t.Fatal(err)
			}
			made = append(made, h.Node())
		}
		for i, n := range made {
			if n.LocalID != made[0].LocalID+i || n.Addr != made[0].Addr || n.PID != made[0].PID || n.Addr == "" {
				t.Errorf("node %d is %v", i, n)
			}
		}
		if made[0].LocalID < 1<<6 {
			t.Errorf("a process with the same name and id in another container would be %v too", made[0])
		}
	})
	t.Run("N3", func(t *testing.T) {
		for n, most := range map[int]int{5: 2, 50: 16, 500: 160, 5000: 1600} {
			s := newState().completed()
			s.Deadline = noon
			for i := range 2 * n {
				name := NodeDesc{fmt.Sprintf("dummy%d.example.com", i), 4194304, i}
				s.LastHeartbeats[name] = noon.Add(time.Duration(i))
				if i < n {
					s.Participants[name], s.LastRanks[name] = i, i
					s.Infos[name] = "10.11.12.13:29400"
				} else {
					s.WaitList[name] = true
				}
			}
			if size := base64.StdEncoding.EncodedLen(len(s.Encode())); size > most<<10 {
				t.Errorf("%d nodes and as many that wait take %d bytes, more than %d KiB", n, size, most)
			}
		}
	})
}

// counted is a store that counts calls.
type counted struct {
	storetest.Memory
	gets, sets int
	delay      atomic.Int64 // nanoseconds
	err        error
}

func (c *counted) Get(ctx context.Context, key string) (store.Entry, error) {
	c.gets++
	if err := c.pause(ctx); err != nil {
		return store.Entry{}, err
	}
	return c.Memory.Get(ctx, key)
}

func (c *counted) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (store.Entry, bool, error) {
	c.sets++
	if err := c.pause(ctx); err != nil {
		return store.Entry{}, false, err
	}
	return c.Memory.CompareAndSet(ctx, key, version, value)
}

func (c *counted) pause(ctx context.Context) error {
	if delay := time.Duration(c.delay.Load()); delay > 0 {
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return c.err
}

// put stores a state as another node would.
func put(t *testing.T, m *storetest.Memory, s *State) {
	t.Helper()
	e, err := m.Get(t.Context(), recordKey)
	if err == nil {
		_, _, err = m.CompareAndSet(t.Context(), recordKey, e.Version, s.Encode())
	}
	if err != nil {
		t.Fatal(err)
	}
}

func same(a, b *State) bool { return string(a.Encode()) == string(b.Encode()) }

func TestHolder(t *testing.T) {
	run := func(name string, f func(t *testing.T, c *counted)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { f(t, &counted{}) })
		})
	}
	fresh := func(round int) *State {
		s := newState()
		s.Round = round
		s.Participants[node(round)] = 0
		s.LastHeartbeats[node(round)] = time.Now()
		return s
	}
	run("H1", func(t *testing.T, c *counted) {
		if h := newHolder(c, settings(1, 1), 0); !same(h.current(), newState()) || c.gets+c.sets > 0 {
			t.Error("a new holder is not empty, or has read")
		}
	})
	run("H2", func(t *testing.T, c *counted) {
		h := newHolder(c, settings(1, 1), 0)
		if kept, err := h.sync(t.Context()); kept || err != nil || !same(h.current(), newState()) || c.gets != 1 || c.sets != 0 {
			t.Errorf("%v, %v, %d gets and %d sets", kept, err, c.gets, c.sets)
		}
	})
	run("H3", func(t *testing.T, c *counted) {
		h := newHolder(c, settings(1, 1), -1)
		for i := range 3 {
			put(t, &c.Memory, fresh(i))
			if kept, err := h.sync(t.Context()); kept || err != nil || !same(h.current(), fresh(i)) || c.gets != i+1 || c.sets != 0 {
				t.Errorf("%d: %v, %v, %d gets and %d sets", i, kept, err, c.gets, c.sets)
			}
		}
	})
	run("H4", func(t *testing.T, c *counted) {
		h := newHolder(c, settings(1, 1), 0)
		put(t, &c.Memory, fresh(7))
		h.current().Closed = true
		h.markDirty()
		if kept, err := h.sync(t.Context()); kept || err != nil || !same(h.current(), fresh(7)) || c.gets != 0 || c.sets != 1 {
			t.Errorf("%v, %v, %d gets and %d sets", kept, err, c.gets, c.sets)
		}
	})
	run("H5", func(t *testing.T, c *counted) {
		put(t, &c.Memory, fresh(1))
		h := newHolder(c, settings(1, 1), 0)
		if _, err := h.sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		c.gets = 0
		for i := range 3 {
			h.current().Restarts++
			h.markDirty()
			kept, err := h.sync(t.Context())
			e, _ := c.Memory.Get(t.Context(), recordKey)
			if !kept || err != nil || string(e.Value) != string(h.current().Encode()) || c.gets != 0 || c.sets != i+1 || h.current().Restarts != i+1 {
				t.Errorf("%d: %v, %v, %d gets and %d sets", i, kept, err, c.gets, c.sets)
			}
		}
	})
	for _, d := range []time.Duration{time.Second, 5 * time.Second, 10 * time.Second} {
		run(fmt.Sprint("H6/", d), func(t *testing.T, c *counted) {
			h := newHolder(c, settings(1, 1), d)
			for range 3 {
				if _, err := h.sync(t.Context()); err != nil || c.gets != 1 {
					t.Errorf("%d gets, %v", c.gets, err)
				}
				<-time.After(d / 2)
			}
		})
	}
	run("H7", func(t *testing.T, c *counted) {
		h := newHolder(c, settings(1, 1), time.Second)
		for want := 1; want <= 2; want++ {
			if _, err := h.sync(t.Context()); err != nil || c.gets != want {
				t.Errorf("%d gets, %v", c.gets, err)
			}
			<-time.After(1010 * time.Millisecond)
		}
	})
	run("H8", func(t *testing.T, c *counted) {
		s := newState()
		set := func(i, age int) {
			s.LastHeartbeats[node(i)] = time.Now().Add(-time.Duration(age) * time.Second)
			if i%2 == 0 {
				s.Participants[node(i)] = 0
			} else {
				s.WaitList[node(i)] = true
			}
		}
		for i, age := range []int{0, 15, 30, 60, 90} {
			set(i, age)
		}
		want, err := Decode(s.Encode())
		if err != nil {
			t.Fatal(err)
		}
		for i, age := range []int{91, 100, 110, 120, 130} {
			set(10+i, age)
		}
		put(t, &c.Memory, s)
		h := newHolder(c, settings(1, 100), 0)
		if _, err := h.sync(t.Context()); err != nil || !same(h.current(), want) {
			t.Errorf("%v; left %v", err, h.current())
		}
	})
	run("H9", func(t *testing.T, c *counted) {
		s := newState().completed()
		s.Round = 999
		for i := range 5 {
			s.LastHeartbeats[node(i)] = time.Now().Add(-100 * time.Second)
			if i < 3 {
				s.Participants[node(i)] = i
			} else {
				s.WaitList[node(i)] = true
			}
		}
		put(t, &c.Memory, s)
		h := newHolder(c, settings(1, 100), 0)
		want := newState()
		want.Round = 1000
		if _, err := h.sync(t.Context()); err != nil || !same(h.current(), want) {
			t.Errorf("%v, %+v", err, h.current())
		}
	})
	run("H10", func(t *testing.T, c *counted) {
		if _, _, err := c.Memory.CompareAndSet(t.Context(), recordKey, 0, []byte("corrupt")); err != nil {
			t.Fatal(err)
		}
		if _, err := newHolder(c, settings(1, 1), 0).sync(t.Context()); !errors.Is(err, errCorrupt) {
			t.Error(err)
		}
	})
}

// script is a holder that records its calls.
type script struct {
	state *State
	calls []string
}

func (s *script) current() *State { return s.state }
func (s *script) markDirty()      { s.calls = append(s.calls, "mark") }
func (s *script) sync(context.Context) (bool, error) {
	s.calls = append(s.calls, "sync")
	return true, nil
}
func (s *script) lose(context.Context, int) error {
	s.calls = append(s.calls, "lose")
	return nil
}
func (s *script) now() time.Time { return noon }
func (s *script) await(_ context.Context, most time.Duration) error {
	s.calls = append(s.calls, fmt.Sprint("await ", most))
	return nil
}

// steps returns an operator that returns these actions in turn, then finish.
func steps(actions ...action) operator {
	return func(view) action {
		if len(actions) == 0 {
			return finish
		}
		a := actions[0]
		actions = actions[1:]
		return a
	}
}

func TestExecutor(t *testing.T) {
	me := node(0)
	execute := func(t *testing.T, s *State, set *Settings, a action, want ...string) error {
		t.Helper()
		h := &script{state: s}
		err := run(t.Context(), h, me, "", set, steps(a), operation{what: "a test", limit: time.Minute})
		if !slices.Equal(h.calls, want) {
			t.Errorf("calls %q, want %q", h.calls, want)
		}
		return err
	}
	change := func(t *testing.T, s *State, set *Settings, a action) {
		t.Helper()
		if err := execute(t, s, set, a, "sync", "mark", "sync"); err != nil {
			t.Error(err)
		}
	}
	t.Run("X1", func(t *testing.T) {
		s := with(me)
		s.LastHeartbeats[me] = noon.Add(-time.Hour)
		change(t, s, settings(1, 1), keepAlive)
		if s.LastHeartbeats[me] != noon {
			t.Error(s.LastHeartbeats)
		}
	})
	t.Run("X2", func(t *testing.T) {
		s := newState()
		change(t, s, settings(2, 2), addToParticipants)
		if want := with(me); !same(s, want) {
			t.Errorf("%+v", s)
		}
	})
	t.Run("X3", func(t *testing.T) {
		s := newState().waiting(me)
		change(t, s, settings(2, 2), addToParticipants)
		if want := with(me); !same(s, want) {
			t.Errorf("%+v", s)
		}
	})
	for n := range 3 {
		t.Run(fmt.Sprint("X4/", n), func(t *testing.T) {
			var others []NodeDesc
			for i := range n {
				others = append(others, node(i+1))
			}
			s := with(others...)
			change(t, s, settings(n+1, n+2), addToParticipants)
			if s.Complete || s.Deadline != noon.Add(30*time.Second) || len(s.Participants) != n+1 {
				t.Errorf("%+v", s)
			}
		})
		for _, least := range []int{1, n + 1} {
			t.Run(fmt.Sprint("X5/", n, "/", least), func(t *testing.T) {
				s := newState()
				for i := n; i > 0; i-- {
					s.Participants[node(i)], s.LastHeartbeats[node(i)] = 0, noon
				}
				s.Deadline = noon.Add(time.Second)
				change(t, s, settings(least, n+1), addToParticipants)
				if !s.Complete || !s.Deadline.IsZero() || len(s.Participants) != n+1 {
					t.Errorf("%+v", s)
				}
				for i := range n + 1 {
					if s.Participants[node(i)] != i {
						t.Errorf("ranks %v", s.Participants)
					}
				}
			})
		}
	}
	t.Run("X6", func(t *testing.T) {
		s := with(node(1)).completed()
		change(t, s, settings(1, 2), addToWaitList)
		if want := with(node(1)).completed().waiting(me); !same(s, want) {
			t.Errorf("%+v", s)
		}
	})
	for _, complete := range []bool{false, true} {
		t.Run(fmt.Sprint("X7/", complete), func(t *testing.T) {
			s := with(me, node(1), node(2))
			s.Complete, s.Round, s.Deadline = complete, 1, noon
			change(t, s, settings(1, 3), removeFromParticipants)
			if s.Complete != complete || s.Round != 1 || s.Deadline != noon || len(s.Participants) != 2 || len(s.LastHeartbeats) != 2 {
				t.Errorf("%+v", s)
			}
		})
	}
	t.Run("X8", func(t *testing.T) {
		s := with(me).completed()
		s.Round = 1
		change(t, s, settings(1, 3), removeFromParticipants)
		if s.Complete || s.Round != 2 || len(s.Participants) != 0 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("X9", func(t *testing.T) {
		s := with(me, node(1), node(2))
		s.Deadline = noon
		change(t, s, settings(3, 4), removeFromParticipants)
		if !s.Deadline.IsZero() || len(s.Participants) != 2 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("X10", func(t *testing.T) {
		s := with(node(1)).completed().waiting(me)
		change(t, s, settings(1, 3), removeFromWaitList)
		if want := with(node(1)).completed(); !same(s, want) {
			t.Errorf("%+v", s)
		}
	})
	t.Run("X11", func(t *testing.T) {
		s := newState()
		change(t, s, settings(1, 1), markClosed)
		if !s.Closed {
			t.Errorf("%+v", s)
		}
	})
	t.Run("X12", func(t *testing.T) {
		if err := execute(t, newState(), settings(1, 1), errorClosed, "sync"); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		var late *timeoutError
		if err := execute(t, newState(), settings(1, 1), errorTimeout, "sync"); !errors.As(err, &late) {
			t.Error(err)
		}
	})
	t.Run("X13", func(t *testing.T) {
		if err := execute(t, newState(), settings(1, 1), syncState, "sync", "await 1s", "sync"); err != nil {
			t.Error(err)
		}
	})
}

func TestOperators(t *testing.T) {
	me, other := node(0), node(1)
	now := noon
	clock := time.Unix(10, 0)
	at := func(s *State, most int, deadline int64) view {
		return view{node: me, state: s, settings: settings(1, most), now: now, clock: clock, deadline: time.Unix(deadline, 0)}
	}
	check := func(name string, got, want action) {
		t.Run(name, func(t *testing.T) {
			if got != want {
				t.Errorf("action %d, want %d", got, want)
			}
		})
	}
	aged := func(s *State, seconds int) *State {
		s.LastHeartbeats[me] = now.Add(-time.Duration(seconds) * time.Second)
		return s
	}
	check("E1", exitOp(at(with(me, other), 2, 10)), removeFromParticipants)
	check("E2", exitOp(at(with(me, other), 2, 0)), errorTimeout)
	check("E3", exitOp(at(with(other), 2, 10)), finish)

	closed := with(other)
	closed.Closed = true
	check("J1", joinOp(at(closed, 2, 10)), errorClosed)
	check("J2", joinOp(at(with(me, other).completed(), 2, 10)), finish)
	left := with(me, other).completed()
	left.Participants[me], left.Participants[other] = 1, 0
	check("J2/whole", joinOp(at(left, 2, 10)), finish)
	delete(left.Participants, other)
	check("J2/left", joinOp(at(left, 2, 10)), removeFromParticipants)
	check("J3", joinOp(at(with(other).completed(), 2, 10)), addToWaitList)
	check("J4/30s", joinOp(at(aged(with(other).completed().waiting(me), 30), 2, 10)), keepAlive)
	check("J4/29s", joinOp(at(aged(with(other).completed().waiting(me), 29), 2, 10)), syncState)
	check("J5", joinOp(at(with(other).completed(), 1, 10)), addToRedundancyList)
	check("J6/30s", joinOp(at(aged(with(other).completed().redundant(me), 30), 1, 10)), keepAlive)
	check("J6/29s", joinOp(at(aged(with(other).completed().redundant(me), 29), 1, 10)), syncState)
	check("J7", joinOp(at(with(other).completed().redundant(me), 2, 10)), removeFromRedundancyList)
	check("J8/30s", joinOp(at(aged(with(other).completed().redundant(me), 30), 1, 0)), keepAlive)
	check("J8/29s", joinOp(at(aged(with(other).completed().redundant(me), 29), 1, 0)), syncState)
	dismissed := with(other).completed().redundant(me)
	dismissed.Closed = true
	check("J1/redundant", joinOp(at(dismissed, 1, 10)), errorDismiss)
	called := with(me, other)
	called.Deadline = now
	check("J9/30s", joinOp(at(aged(called, 30), 3, 10)), keepAlive)
	check("J9/29s", joinOp(at(aged(called, 29), 3, 10)), syncState)
	over := with(me, other)
	over.Deadline = now.Add(-time.Second)
	check("J10", joinOp(at(over, 3, 10)), markComplete)
	check("J11", joinOp(at(with(other), 2, 10)), addToParticipants)
	check("J12/absent", joinOp(at(with(other), 2, 0)), errorTimeout)
	check("J12/participant", joinOp(at(with(me, other), 2, 0)), errorTimeout)
	check("J12/waiting", joinOp(at(with(other).completed().waiting(me), 2, 0)), errorTimeout)
	check("J13/participant", joinOp(at(with(me, other), 2, 5)), removeFromParticipants)
	check("J13/waiting", joinOp(at(with(other).completed().waiting(me), 2, 5)), removeFromWaitList)

	check("C1", closeOp(at(closed, 2, 10)), finish)
	check("C2", closeOp(at(with(other), 2, 0)), errorTimeout)
	check("C3", closeOp(at(with(other), 2, 10)), markClosed)
	check("K1/30s", keepAliveOp(at(aged(with(me), 30), 2, 10)), keepAlive)
	check("K1/31s", keepAliveOp(at(aged(with(me), 31), 2, 10)), keepAlive)
	check("K2", keepAliveOp(at(aged(with(me), 30), 2, 0)), errorTimeout)
	check("K3", keepAliveOp(at(aged(with(me), 29), 2, 10)), finish)

	// Actions that torchelastic lacks.
	early := with(me, other)
	early.Deadline = now.Add(time.Second)
	early.LastRanks = map[NodeDesc]int{me: 1, other: 0}
	check("last call/all back", joinOp(at(early, 3, 10)), markComplete)
	early.LastRanks[node(2)] = 2
	check("last call/one is not back", joinOp(at(early, 3, 10)), syncState)
	check("leave/in the record", leaveOp(at(with(me), 2, 10)), leaveForGood)
	check("leave/remembered", leaveOp(at(&State{LastRanks: map[NodeDesc]int{me: 0}}, 2, 10)), leaveForGood)
	check("leave/gone", leaveOp(at(with(other), 2, 10)), finish)
}

func quiet() logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

// handler returns a handler of the run whose record is in s. The test stops it at its end.
func handler(t *testing.T, s store.Store, set Settings) *Handler {
	t.Helper()
	h, err := New(Config{Settings: set, Store: s, Addr: "host", Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Stop)
	return h
}

// record changes the record of the run as another node would.
func record(t *testing.T, s store.Store, change func(*State)) *State {
	t.Helper()
	run := store.WithPrefix(s, "torch.rendezvous.run/")
	for {
		e, err := run.Get(t.Context(), recordKey)
		if err != nil {
			t.Fatal(err)
		}
		state, err := Decode(e.Value)
		if err != nil {
			t.Fatal(err)
		}
		if change == nil {
			return state
		}
		change(state)
		if _, set, err := run.CompareAndSet(t.Context(), recordKey, e.Version, state.Encode()); err != nil {
			t.Fatal(err)
		} else if set {
			return state
		}
	}
}

func TestHandler(t *testing.T) {
	in := func(name string, f func(t *testing.T)) {
		t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
	}
	next := func(t *testing.T, h *Handler) Round {
		t.Helper()
		r, err := h.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	in("D1", func(t *testing.T) {
		for round, bound := range []time.Duration{mostJitter, 0} {
			h := handler(t, &storetest.Memory{}, *settings(1, 1))
			record(t, h.cfg.Store, func(s *State) { s.Round = round })
			began := time.Now()
			next(t, h)
			if took := time.Since(began); took > bound {
				t.Errorf("round %d: joining took %v", round, took)
			}
			h.Stop()
		}
	})
	in("D2", func(t *testing.T) {
		m := &storetest.Memory{}
		record(t, m, func(s *State) {
			for _, n := range []NodeDesc{{"a", 1, 0}, {"b", 1, 0}} {
				s.Participants[n], s.LastHeartbeats[n], s.Infos[n] = 0, time.Now(), "at "+n.Addr
			}
		})
		r := next(t, handler(t, m, *settings(1, 3)))
		if r.Rank != 2 || len(r.Members) != 3 || r.Members[1].Info != "at b" || r.Number != 0 {
			t.Errorf("%+v", r)
		}
		if _, _, err := r.Store.CompareAndSet(t.Context(), "k", 0, nil); err != nil {
			t.Fatal(err)
		}
		if e, err := m.Get(t.Context(), "torch.rendezvous.run/0/k"); err != nil || e.Version == 0 {
			t.Errorf("%+v, %v", e, err)
		}
	})
	in("D3", func(t *testing.T) {
		var late *timeoutError
		slow := *settings(1, 1)
		slow.Join, slow.Close, slow.Heartbeat, slow.KeepAliveInterval = 200*time.Millisecond, 200*time.Millisecond, 200*time.Millisecond, time.Second
		c := &counted{}
		c.delay.Store(int64(300 * time.Millisecond))
		h := handler(t, c, slow)
		if _, err := h.Next(t.Context()); !errors.As(err, &late) {
			t.Errorf("join: %v", err)
		}
		h = handler(t, c, slow)
		if err := h.Close(t.Context()); !errors.As(err, &late) {
			t.Errorf("close: %v", err)
		}
		c = &counted{}
		h = handler(t, c, slow)
		next(t, h)
		before := record(t, &c.Memory, nil).LastHeartbeats[h.Node()]
		c.delay.Store(int64(300 * time.Millisecond))
		<-time.After(2500 * time.Millisecond)
		h.Stop()
		if after := record(t, &c.Memory, nil).LastHeartbeats[h.Node()]; !after.Equal(before) {
			t.Errorf("a heartbeat at %v after one at %v", after, before)
		}
	})
	in("D4", func(t *testing.T) {
		h := handler(t, &storetest.Memory{}, *settings(1, 1))
		for want := range 4 {
			if r := next(t, h); r.Number != want || r.Rank != 0 || len(r.Members) != 1 {
				t.Errorf("%+v, want round %d", r, want)
			}
		}
		h.Stop()
	})
	in("D5", func(t *testing.T) {
		c := &counted{}
		record(t, &c.Memory, func(s *State) { s.waiting(node(1), node(2)); s.LastHeartbeats = map[NodeDesc]time.Time{} })
		h := handler(t, c, *settings(1, 1))
		if s, err := h.look(t.Context(), h.newHolder(0)); len(s.WaitList) != 2 || err != nil || c.gets != 1 {
			t.Errorf("%d wait, %v, after %d reads", len(s.WaitList), err, c.gets)
		}
	})
	in("D6", func(t *testing.T) {
		c := &counted{}
		h := handler(t, c, *settings(1, 1))
		for range 2 {
			if err := h.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if closed, err := h.Closed(t.Context()); !closed || err != nil {
			t.Errorf("%v, %v", closed, err)
		}
		c.err = errors.New("no store")
		if err := handler(t, c, *settings(1, 1)).Close(t.Context()); !errors.Is(err, c.err) {
			t.Error(err)
		}
	})
	in("D7", func(t *testing.T) {
		set := *settings(1, 1)
		set.KeepAliveInterval = time.Second
		m := &storetest.Memory{}
		h := handler(t, m, set)
		next(t, h)
		<-time.After(10 * time.Second)
		if age := time.Since(record(t, m, nil).LastHeartbeats[h.Node()]); age > 2*time.Second {
			t.Errorf("the last heartbeat is %v old", age)
		}
		h.Stop()
		last := record(t, m, nil).LastHeartbeats[h.Node()]
		<-time.After(10 * time.Second)
		if !record(t, m, nil).LastHeartbeats[h.Node()].Equal(last) {
			t.Error("there are heartbeats after Stop")
		}
	})
	in("D8", func(t *testing.T) {
		m := &storetest.Memory{}
		rounds := together(t, handler(t, m, *settings(2, 2)), handler(t, m, *settings(2, 2)))
		if rounds[0].Rank == rounds[1].Rank || len(rounds[0].Members) != 2 || len(rounds[1].Members) != 2 {
			t.Errorf("%+v", rounds)
		}
	})
	in("D9", func(t *testing.T) {
		m := &storetest.Memory{}
		together(t, handler(t, m, *settings(2, 2)), handler(t, m, *settings(2, 2)))
		ctx, cancel := context.WithCancel(t.Context())
		third := handler(t, m, *settings(2, 2))
		var joining sync.WaitGroup
		joining.Go(func() { _, _ = third.Next(ctx) })
		<-time.After(2 * time.Second)
		if s := record(t, m, nil); !s.RedundancyList[third.Node()] || len(s.WaitList) != 0 {
			t.Errorf("%+v", s)
		}
		cancel()
		joining.Wait()
	})
	in("D10", func(t *testing.T) {
		set := *settings(1, 2)
		set.KeepAliveInterval = time.Second
		m := &storetest.Memory{}
		a, b := handler(t, m, set), handler(t, m, set)
		together(t, a, b)
		ctx, cancel := context.WithCancel(t.Context())
		third := handler(t, m, set)
		var joining sync.WaitGroup
		joining.Go(func() { _, _ = third.Next(ctx) })
		<-time.After(2 * time.Second)
		lost := make(chan Change, 1)
		joining.Go(func() {
			c, err := a.Changed(ctx, nil)
			if err != nil {
				t.Error(err)
			}
			lost <- c
		})
		b.Stop() // as if its process were dead
		dead := time.Now()
		c := <-lost
		if took := time.Since(dead); took > 6*time.Second || (!slices.Contains(c.Lost, b.Node()) && c.Waiting == 0) {
			t.Errorf("%+v after %v", c, took)
		}
		<-time.After(10*time.Second - time.Since(dead))
		s := record(t, m, nil)
		if _, is := s.Participants[a.Node()]; !is || len(s.Participants) != 1 || !s.WaitList[third.Node()] || len(s.RedundancyList) != 0 {
			t.Errorf("%+v", s)
		}
		cancel()
		joining.Wait()
	})
	in("D11", func(t *testing.T) {
		set := *settings(1, 3)
		m := &storetest.Memory{}
		a, b, c := handler(t, m, set), handler(t, m, set), handler(t, m, set)
		first := together(t, a, b, c)
		if first[0].Rank != 0 || first[1].Rank != 1 {
			t.Fatalf("%+v", first)
		}
		if err := a.Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
		change, err := b.Changed(t.Context(), nil)
		if err != nil || !slices.Equal(change.Lost, []NodeDesc{a.Node()}) {
			t.Errorf("%+v, %v", change, err)
		}
		began := time.Now()
		second := together(t, b, c)
		if second[0].Rank != 0 || second[1].Rank != 1 || second[0].Number != 1 || len(second[0].Members) != 2 {
			t.Errorf("%+v", second)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the round of all that are left took %v", took)
		}
	})
	in("D12", func(t *testing.T) { // a member that is done does not end the round, and one that has failed does
		m, set := &storetest.Memory{}, *settings(1, 3)
		set.KeepAliveInterval = time.Second
		a, b, c := handler(t, m, set), handler(t, m, set), handler(t, m, set)
		together(t, a, b, c)
		changes := make(chan Change, 1)
		var watching sync.WaitGroup
		watching.Go(func() {
			change, err := b.Changed(t.Context(), nil)
			if err != nil {
				t.Error(err)
			}
			changes <- change
		})
		for _, say := range []func(context.Context) error{a.Done, a.Close, a.Leave} {
			if err := say(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(time.Minute)
		select {
		case change := <-changes:
			t.Fatalf("the round should end: %+v", change)
		default:
		}
		if err := c.Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
		if change := <-changes; !slices.Equal(change.Lost, []NodeDesc{c.Node()}) {
			t.Errorf("%+v", change)
		}
		watching.Wait()
	})
}

// together calls Next on all handlers at once and returns their rounds.
func together(t *testing.T, handlers ...*Handler) []Round {
	t.Helper()
	rounds := make([]Round, len(handlers))
	var joining sync.WaitGroup
	for i, h := range handlers {
		joining.Go(func() {
			var err error
			if rounds[i], err = h.Next(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	joining.Wait()
	return rounds
}

// TestRanksAreKept: nodes of the last round keep their order and precede new ones, whatever their
// names.
func TestRanksAreKept(t *testing.T) {
	a, b, c, d := NodeDesc{"a", 1, 0}, NodeDesc{"b", 1, 0}, NodeDesc{"c", 1, 0}, NodeDesc{"d", 1, 0}
	s := with(a, b, c, d)
	s.LastRanks = map[NodeDesc]int{d: 0, c: 2, NodeDesc{"gone", 1, 0}: 1}
	s.complete()
	if want := map[NodeDesc]int{d: 0, c: 1, a: 2, b: 3}; !maps.Equal(s.Participants, want) || !maps.Equal(s.LastRanks, want) {
		t.Errorf("%v, %v", s.Participants, s.LastRanks)
	}
}

// TestRestartsAreCounted: a failed round counts once, however many of its nodes report the failure,
// and all nodes of the next round see the same count, although one of them fails again at once.
func TestRestartsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &storetest.Memory{}
		handlers := []*Handler{handler(t, m, *settings(3, 3)), handler(t, m, *settings(3, 3)), handler(t, m, *settings(3, 3))}
		want := 0
		for _, failing := range []int{1, 3, 0, 2} {
			var early sync.WaitGroup
			rounds := together(t, handlers...)
			for i, r := range rounds {
				if r.Restarts != want {
					t.Errorf("round %d: node %d sees %d restarts, and not %d", r.Number, i, r.Restarts, want)
				}
			}
			for _, h := range handlers[:failing] {
				early.Go(func() {
					if err := h.Fail(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
			early.Wait()
			if failing > 0 {
				want++
			}
		}
		for _, h := range handlers {
			h.Stop()
		}
	})
}

// TestRestartsOfARound: the count of restarts does not change during a round, and a node that has
// left the round does not add to it.
func TestRestartsOfARound(t *testing.T) {
	a, b := NodeDesc{"a", 1, 0}, NodeDesc{"b", 1, 0}
	set := settings(2, 2)
	now := time.Unix(100, 0)
	s := newState()
	s.Restarts = 4
	for _, n := range []NodeDesc{a, b} {
		s.apply(addToParticipants, n, "", now, set)
	}
	see := func(n NodeDesc) action {
		return failOp(view{node: n, state: s, settings: set, now: now, clock: now, deadline: now})
	}
	if got := see(a); !s.Complete || got != markFailed {
		t.Fatalf("%v, complete %v", got, s.Complete)
	}
	s.apply(markFailed, a, "", now, set)
	if got := see(b); got != finish || s.Restarts != 4 {
		t.Errorf("%v, %d restarts", got, s.Restarts)
	}
	s.apply(removeFromParticipants, a, "", now, set)
	if s.Restarts != 4 || s.Round != 0 {
		t.Errorf("%d restarts in round %d", s.Restarts, s.Round)
	}
	s.apply(removeFromParticipants, b, "", now, set)
	if s.Restarts != 5 || s.Round != 1 || s.Failed {
		t.Errorf("%d restarts in round %d, failed %v", s.Restarts, s.Round, s.Failed)
	}
	s.apply(addToParticipants, b, "", now, set)
	for _, n := range []NodeDesc{a, b} {
		if got := see(n); got != finish {
			t.Errorf("%v of the round before: %v", n, got)
		}
	}
}

// TestClocksDiffer: a node whose clock is an hour off does not count as dead, because heartbeats
// have the time of the store.
func TestClocksDiffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &storetest.Memory{}
		set := *settings(2, 2)
		set.KeepAliveInterval = time.Second
		a, b := handler(t, &skewed{Memory: m}, set), handler(t, &skewed{Memory: m}, set)
		// The store's clock is an hour behind those of both nodes.
		together(t, a, b)
		<-time.After(10 * time.Second)
		s := record(t, m, nil)
		if len(s.Participants) != 2 {
			t.Errorf("%+v", s)
		}
		for n, beat := range s.LastHeartbeats {
			if off := time.Since(beat) - time.Hour; off < 0 || off > 3*time.Second {
				t.Errorf("%v was heard of at %v", n, beat)
			}
		}
		a.Stop()
		b.Stop()
	})
}

// skewed is a store whose clock is an hour behind.
type skewed struct{ *storetest.Memory }

func (s *skewed) Get(ctx context.Context, key string) (store.Entry, error) {
	e, err := s.Memory.Get(ctx, key)
	e.Now = e.Now.Add(-time.Hour)
	return e, err
}

func (s *skewed) CompareAndSet(ctx context.Context, key string, version uint64, value []byte) (store.Entry, bool, error) {
	e, set, err := s.Memory.CompareAndSet(ctx, key, version, value)
	e.Now = e.Now.Add(-time.Hour)
	return e, set, err
}

func (s *skewed) Wait(ctx context.Context, key string, version uint64) (store.Entry, error) {
	e, err := s.Memory.Wait(ctx, key, version)
	e.Now = e.Now.Add(-time.Hour)
	return e, err
}

// FuzzDecode: any bytes decode to a state or an error, and a decoded state survives another
// encoding and decoding.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(nil))
	s := with(node(1), node(2)).waiting(node(3)).redundant(node(4)).completed()
	s.Deadline, s.Infos[node(1)], s.LastRanks[node(9)] = noon, "info", 3
	f.Add(s.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Decode(b)
		if err != nil {
			if !errors.Is(err, errCorrupt) {
				t.Error(err)
			}
			return
		}
		again, err := Decode(s.Encode())
		if err != nil || !same(s, again) {
			t.Errorf("%+v, then %+v, %v", s, again, err)
		}
	})
}
