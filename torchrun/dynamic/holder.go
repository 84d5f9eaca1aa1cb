package dynamic

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/torchrun/store"
)

// holder is a node's copy of the record.
type holder interface {
	// current returns the copy, which the caller may change. sync then writes it if markDirty was
	// called.
	current() *State
	markDirty()
	// sync writes a dirty copy, and otherwise reads the record. kept reports whether a dirty copy
	// was written. If it is false after a write, another node has written first, and the copy is
	// now what that node has written.
	sync(ctx context.Context) (kept bool, err error)
	// lose is called when another node has written before this one, the given number of times in a
	// row. It pauses to let others proceed, and reads the record again.
	lose(ctx context.Context, losses int) error
	// now returns the time of the record's clock.
	now() time.Time
	// await blocks until the record may have changed, but no longer than most.
	await(ctx context.Context, most time.Duration) error
}

// recordKey is the record's key in the store of its run.
const recordKey = "record"

// storeHolder is the holder of a record in a store.
type storeHolder struct {
	store    store.Store
	settings *Settings
	cache    time.Duration // how long a copy that was read is used without reading again

	state   *State
	dirty   bool
	version uint64
	read    time.Time // time of the last read, by this process's clock; zero: none yet
	clock   store.Clock
	taken   time.Time // when the record was last taken; unlike read, it is never reset
	back    time.Time // when the record was first read after a gap; zero: no gap
}

func newHolder(s store.Store, set *Settings, cache time.Duration) *storeHolder {
	return &storeHolder{store: s, settings: set, cache: cache, state: newState()}
}

func (h *storeHolder) current() *State { return h.state }
func (h *storeHolder) markDirty()      { h.dirty = true }
func (h *storeHolder) now() time.Time  { return h.clock.Now() }

func (h *storeHolder) sync(ctx context.Context) (kept bool, err error) {
	var entry store.Entry
	switch {
	case h.dirty:
		entry, kept, err = h.store.CompareAndSet(ctx, recordKey, h.version, h.state.Encode())
	case !h.read.IsZero() && time.Since(h.read) <= h.cache:
		return false, nil
	default:
		entry, err = h.store.Get(ctx, recordKey)
	}
	if err != nil {
		return false, fmt.Errorf("dynamic: %w", err)
	}
	return kept, h.take(entry)
}

// take replaces the copy by what the store contains.
func (h *storeHolder) take(entry store.Entry) error {
	h.read = time.Now()
	if !entry.Now.IsZero() {
		h.clock = store.ClockAt(entry.Now)
	}
	state, err := Decode(entry.Value)
	if err != nil {
		return err
	}
	h.state, h.version, h.dirty = state, entry.Version, false
	if h.seeing() {
		h.state.sanitize(h.now(), h.settings)
	}
	return nil
}

// seeing reports whether missing heartbeats mean that nodes are dead. They do not for a while after
// the store was unreachable or this process was stopped, because the other nodes may not have
// reached the store either.
func (h *storeHolder) seeing() bool {
	window := h.settings.KeepAliveInterval * time.Duration(h.settings.KeepAliveAttempts)
	if !h.taken.IsZero() && h.read.Sub(h.taken) > window {
		h.back = h.read
	}
	h.taken = h.read
	return h.back.IsZero() || h.read.Sub(h.back) > window+backAfter
}

func (h *storeHolder) lose(ctx context.Context, losses int) error {
	if err := retry.Pause(ctx, rand.N(retreat.After(losses))); err != nil {
		return err
	}
	h.read = time.Time{}
	_, err := h.sync(ctx)
	return err
}

// lingering returns a random pause after a change was noticed, so that in a large run not every
// node reads every change.
func (h *storeHolder) lingering() time.Duration {
	count := time.Duration(len(h.state.LastHeartbeats))
	return rand.N(min(count*lingerPerNode, poll) + 1)
}

func (h *storeHolder) await(ctx context.Context, most time.Duration) error {
	bounded, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	entry, err := h.store.Wait(bounded, recordKey, h.version)
	if err == nil {
		pause := h.lingering()
		if pause < time.Millisecond {
			return h.take(entry)
		}
		if err := retry.Pause(ctx, pause); err != nil {
			return err
		}
		h.read = time.Time{} // more may have changed meanwhile
		_, err := h.sync(ctx)
		return err
	}
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, context.DeadlineExceeded):
		return nil
	}
	return fmt.Errorf("dynamic: %w", err)
}

// ErrClosed means that the run is closed, and no node can join.
var ErrClosed = errors.New("dynamic: the rendezvous is closed")

// ErrDismissed means that the run was closed while this node was spare. The node has nothing to do.
var ErrDismissed = errors.New("dynamic: the rendezvous has closed without a place for this node")

// timeoutError means that an operation has exceeded its timeout.
type timeoutError struct {
	What string
	// Why is what the operation has waited for; empty: nothing.
	Why string
	For time.Duration
}

// Error includes the name of the operation.
func (e *timeoutError) Error() string {
	text := fmt.Sprintf("dynamic: %s was not possible within %v", e.What, e.For.Round(time.Millisecond))
	if e.Why != "" {
		text += ": " + e.Why
	}
	return text
}

// run performs the actions that an operator decides on until the operator is finished. Each
// decision is based on a record that was read after this node's last change was written, so that no
// decision is based on a change that another node has overtaken.
func run(ctx context.Context, h holder, node NodeDesc, info string, set *Settings, op operator, o operation) error {
	began := time.Now()
	deadline := began.Add(o.limit)
	wrote, losses, why := false, 0, ""
	for {
		kept, err := h.sync(ctx)
		if err != nil {
			return err
		}
		if losses++; !wrote || kept {
			losses = 0
		} else if err := h.lose(ctx, losses); err != nil {
			return err
		}
		wrote = false
		v := view{node: node, state: h.current(), settings: set, now: h.now(), clock: time.Now(), deadline: deadline}
		switch a := op(v); a {
		case finish:
			return nil
		case errorClosed:
			return ErrClosed
		case errorDismiss:
			return ErrDismissed
		case errorTimeout:
			return &timeoutError{o.what, why, time.Since(began)}
		case syncState:
			if o.waits != nil {
				why = o.waits(v)
			}
			if err := h.await(ctx, poll); err != nil {
				return err
			}
		default:
			h.current().apply(a, node, info, h.now(), set)
			h.markDirty()
			wrote = true
			if a == removeFromRedundancyList {
				deadline = time.Now().Add(o.limit) // the node starts over
			}
		}
	}
}

// operation describes the purpose of an operator.
type operation struct {
	what  string
	limit time.Duration
	// waits, if not nil, is called each time the operator waits for a change, and returns what it
	// waits for.
	waits func(view) string
}
