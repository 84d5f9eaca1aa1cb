package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/identity"
)

// duty is the task of a rank, on its standard input. The addresses of all ranks follow it; the end
// of the input permits the rank to exit.
type duty struct {
	Program     *program
	Rank        int
	Credentials string
	Key         []byte // of data connections
}

// message is a message of a rank on its standard output. Exactly one field is set.
type message struct {
	Addrs   []string `json:",omitempty"`
	Ended   *ended   `json:",omitempty"`
	Stop    int      `json:",omitempty"` // milliseconds for which this process asks to be suspended
	Idle    *idle    `json:",omitempty"`
	Verdict *verdict `json:",omitempty"` // the last message
}

// ended reports a completed step of this rank.
type ended struct {
	Step   int
	Digest uint32 // of the result if it must be the same on all ranks of the group; otherwise 0
	Bytes  int64
}

// idle reports that this rank waits without progress, or no longer does.
type idle struct {
	Ticks    int // consecutive ticks without an operation, a byte or computation
	Spinning int // consecutive ticks without an operation or a byte
	Step     int
	Progress []collective.Progress
}

// verdict is the result of the program on this rank.
type verdict struct {
	Step  int    `json:",omitempty"`
	Class string `json:",omitempty"` // empty: success
	Error string `json:",omitempty"`
}

// The classes of errors.
const (
	classMismatch = "mismatch"
	classAborted  = "aborted"
	classWrong    = "wrong result"
	classAccepted = "accepted" // an invalid call was not refused
	classOther    = "error"
)

// wrongResult is a result that differs from the reference.
type wrongResult struct{ text string }

func (w *wrongResult) Error() string { return w.text }

// errAccepted reports that an invalid call was not refused.
var errAccepted = errors.New("an invalid call was not refused")

// errSeeded is the cause with which a rank aborts the group because its program says so.
var errSeeded = errors.New("the program wants it so")

func classOf(err error) string {
	var w *wrongResult
	var m *collective.MismatchError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &w):
		return classWrong
	case errors.Is(err, errAccepted):
		return classAccepted
	case errors.As(err, &m):
		return classMismatch
	case errors.Is(err, collective.ErrAborted), errors.Is(err, context.Canceled):
		return classAborted
	}
	return classOther
}

// actor is the process of a rank: it runs the steps.
type actor struct {
	duty
	groups []*collective.Group // by number; nil: this rank is not in it
	ctx    context.Context     // of its operations
	cancel context.CancelFunc
	at     atomic.Int64 // the last step that began

	sayMu sync.Mutex
	out   *json.Encoder

	lanes   map[laneKey]chan func()
	running sync.WaitGroup // steps
	workers sync.WaitGroup // lanes

	mu      sync.Mutex
	verdict verdict
	broken  bool // an operation has failed: no further step begins
}

// laneKey identifies a lane: the operations of a group run one after the other, and those of its
// engine likewise.
type laneKey struct {
	group      int
	background bool
}

// asRank runs the process of a rank.
func asRank() error {
	debug.SetGCPercent(50) // tensors are large
	in := json.NewDecoder(os.Stdin)
	a := &actor{out: json.NewEncoder(os.Stdout), lanes: map[laneKey]chan func(){}}
	a.at.Store(-1)
	a.ctx, a.cancel = context.WithCancel(context.Background())
	defer a.cancel()
	if err := in.Decode(&a.duty); err != nil {
		return err
	}
	endpoint, err := a.listen()
	if err != nil {
		return err
	}
	defer endpoint.Close()
	a.say(message{Addrs: endpoint.Addrs()})
	var addrs [][]string
	if err := in.Decode(&addrs); err != nil {
		return err
	}
	a.disturb(-1)
	key, err := identity.ParseDataKey(a.Key)
	if err != nil {
		return err
	}
	group, err := endpoint.Connect(context.Background(), a.peers(key, addrs))
	if err != nil { // the program can make another rank end the groups before this
		a.verdict = verdict{-1, classOf(err), err.Error()}
	} else {
		a.groups = []*collective.Group{group}
		go a.watch(group)
		if err := a.divide(); err != nil {
			a.fail(-1, err)
		} else {
			a.act()
		}
	}
	a.say(message{Verdict: &a.verdict})
	io.Copy(io.Discard, io.MultiReader(in.Buffered(), os.Stdin)) // wait until all ranks are done
	if group == nil {
		return nil
	}
	return group.Close()
}

// listen opens the endpoint on the address of the rank's host.
func (a *actor) listen() (*collective.Endpoint, error) {
	c, err := identity.Decode(a.Credentials)
	if err != nil {
		return nil, err
	}
	algorithm, err := collective.ParseAlgorithm(a.Program.Algorithm)
	if err != nil {
		return nil, err
	}
	host := a.Program.hostOf(a.Rank)
	return collective.Listen(collective.Config{Credentials: c, ListenAddr: fmt.Sprintf("127.0.0.%d:0", host+1),
		Encrypt: a.Program.Encrypt, OnlySockets: a.Program.apart(host), Algorithm: algorithm,
		Connections: a.Program.Connections, FusionThreshold: a.Program.Fusion,
		CycleTime: time.Duration(a.Program.Cycle) * time.Microsecond, StallWarning: -1})
}

func (a *actor) peers(key identity.DataKey, addrs [][]string) collective.Peers {
	p := collective.Peers{Generation: 1, Key: key, Rank: a.Rank, Addrs: addrs}
	for rank := range addrs {
		p.Hosts = append(p.Hosts, fmt.Sprintf("127.0.0.%d", a.Program.hostOf(rank)+1))
	}
	return p
}

// divide creates the subsets.
func (a *actor) divide() error {
	for i, s := range a.Program.Subsets {
		var g *collective.Group
		if of := a.groups[s.Of]; of != nil {
			var err error
			if g, err = of.Subset(context.Background(), s.Ranks); err != nil {
				return fmt.Errorf("group %d: %w", i+1, err)
			}
			if g.Rank() != slices.Index(s.Ranks, of.Rank()) {
				return &wrongResult{fmt.Sprintf("rank %d of group %d is rank %d of group %d", of.Rank(), s.Of, g.Rank(), i+1)}
			}
		}
		a.groups = append(a.groups, g)
	}
	return nil
}

// act runs the steps.
func (a *actor) act() {
	for i := range a.Program.Steps {
		s := &a.Program.Steps[i]
		a.disturb(i)
		a.at.Store(int64(i))
		if s.Wrong != nil && s.Wrong.Rank >= 0 { // all ranks have completed the previous steps
			if err := collective.Barrier(context.Background(), a.groups[0]); err != nil {
				a.fail(i, err)
			}
		}
		if g := a.groups[s.Group]; g != nil {
			a.start(laneKey{s.Group, s.background()}, func() { a.step(g, i, s) })
		}
		if !s.Beside {
			a.running.Wait()
		}
		if a.isBroken() {
			break
		}
	}
	a.running.Wait()
	for _, lane := range a.lanes {
		close(lane)
	}
	a.workers.Wait()
}

// start queues a step in a lane.
func (a *actor) start(key laneKey, f func()) {
	lane := a.lanes[key]
	if lane == nil {
		lane = make(chan func(), len(a.Program.Steps))
		a.lanes[key] = lane
		a.workers.Go(func() {
			for f := range lane {
				f()
				a.running.Done()
			}
		})
	}
	a.running.Add(1)
	lane <- f
}

// step runs a step.
func (a *actor) step(g *collective.Group, i int, s *step) {
	if a.isBroken() {
		return
	}
	p := &performer{actor: a, g: g, number: i, step: s}
	if err := p.perform(); err != nil {
		a.fail(i, err)
		return
	}
	e := ended{Step: i, Digest: p.digest, Bytes: int64(s.bytes()) * int64(s.Times)}
	a.say(message{Ended: &e})
}

// fail records the first error. An error on this rank only makes the other ranks fail too.
func (a *actor) fail(step int, err error) {
	a.mu.Lock()
	class := classOf(err)
	if a.verdict.Class == "" {
		a.verdict = verdict{step, class, err.Error()}
	}
	a.broken = a.broken || class != classWrong
	a.mu.Unlock()
	if class == classOther {
		a.groups[0].Abort(err)
	}
}

func (a *actor) isBroken() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.broken
}

func (a *actor) say(m message) {
	a.sayMu.Lock()
	defer a.sayMu.Unlock()
	a.out.Encode(m) // fails only if the parent has ended, which also ends this process
}

// disturb applies this rank's disturbances of a step.
func (a *actor) disturb(step int) {
	for _, d := range a.Program.Disturbed {
		switch {
		case d.Rank != a.Rank || d.Step != step:
		case d.Kind == late:
			time.Sleep(time.Duration(d.For) * time.Millisecond)
		case d.Kind == abort || d.Kind == cancel:
			go func() {
				time.Sleep(time.Duration(d.After) * time.Microsecond)
				if d.Kind == cancel {
					a.cancel()
				} else {
					a.groups[0].Abort(errSeeded)
				}
			}()
		default:
			go func() {
				time.Sleep(time.Duration(d.After) * time.Microsecond)
				a.say(message{Stop: d.For})
			}()
		}
	}
}
