package dynamic

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrClosed: the run is closed, and no node joins any more.
var ErrClosed = errors.New("dynamic: the rendezvous is closed")

// ErrDismissed: the run was closed while this node was one too many. There is nothing to do for it.
var ErrDismissed = errors.New("dynamic: the rendezvous has closed without a place for this node")

// TimeoutError: an operation has taken longer than its timeout.
type TimeoutError struct {
	What string
	For  time.Duration
}

// Error names the operation.
func (e *TimeoutError) Error() string {
	return fmt.Sprintf("dynamic: %s was not possible within %v", e.What, e.For)
}

// run does what an operator decides until it is finished: each decision is made by a record that
// was read after the last change of this node was written, so that none is made by a change that
// was lost to another node.
func run(ctx context.Context, h holder, node NodeDesc, info string, set *Settings, op operator, o operation) error {
	began := time.Now()
	deadline := began.Add(o.limit)
	wrote, losses := false, 0
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
			return &TimeoutError{o.what, time.Since(began)}
		case syncState:
			if err := h.await(ctx, poll); err != nil {
				return err
			}
		default:
			h.current().apply(a, node, info, h.now(), set)
			h.markDirty()
			wrote = true
			if a == removeFromRedundancyList {
				deadline = time.Now().Add(o.limit) // the node begins anew
			}
		}
	}
}

// operation is what an operator is for.
type operation struct {
	what  string
	limit time.Duration
}
