package main

import (
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
)

// The sizes up to which Send does not wait for the receiver: of a message, and of all to one rank.
const (
	aheadEach = 64 << 10
	aheadAll  = 1 << 20
)

// messages makes each rank send its tensors to other ranks, in their order, and receive the same
// number, some of them in the background. Messages that Send does not wait for are sent before
// anything is received.
func (t *turnOf[T]) messages() error {
	n, me := t.g.Size(), t.g.Rank()
	if n == 1 {
		return nil
	}
	peers := func(i int) (to, from int) { // of tensor i
		by := 1 + (i+t.turn)%(n-1)
		return (me + by) % n, (me - by + n) % n
	}
	var handles []*collective.Handle
	var errs []error
	ahead := 0
	for i := range t.room {
		to, _ := peers(i)
		data := make([]T, len(t.room[i]))
		fill(data, t.input(i, to, me))
		if bytes := len(data) * widthOf(t.step.Type); bytes <= aheadEach && ahead+bytes <= aheadAll {
			ahead += bytes
			errs = append(errs, collective.Send(t.ctx, t.g, data, to))
			spoil(data)
		} else {
			handles = append(handles, collective.SendAsync(t.ctx, t.g, data, to))
		}
	}
	for i, data := range t.room {
		_, from := peers(i)
		if (i+me)%3 == 0 {
			errs = append(errs, collective.Recv(t.ctx, t.g, data, from))
		} else {
			handles = append(handles, collective.RecvAsync(t.ctx, t.g, data, from))
		}
	}
	for _, h := range handles {
		errs = append(errs, h.Wait())
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for i, data := range t.room {
		_, from := peers(i)
		if err := t.same(data, t.input(i, me, from), 0, fmt.Sprintf("message %d of rank %d", i, from)); err != nil {
			return err
		}
	}
	return nil
}

// callMessages sends data to the next rank, and then makes all ranks meet, so that all notice an
// error.
func callMessages[T collective.Element](t *turnOf[T], data []T) error {
	n, me := t.g.Size(), t.g.Rank()
	sent := collective.SendAsync(t.ctx, t.g, data, (me+1)%n)
	received := collective.RecvAsync(t.ctx, t.g, make([]T, len(data)), (me+n-1)%n)
	if err := errors.Join(sent.Wait(), received.Wait()); err != nil {
		return err
	}
	return collective.Barrier(t.ctx, t.g)
}
