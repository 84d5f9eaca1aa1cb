package collective

import (
	"context"

	"github.com/hvdrun/hvdrun/collective/internal/exchange"
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

const (
	sentAhead = 64 << 10 // largest message, in bytes, that Send copies instead of waiting for the receiver …
	mostAhead = 1 << 20  // … and the maximum number of bytes of all such messages to one rank
	pointLane = 'p'      // the kind of the lanes of messages
)

// Send sends data to another rank, which receives it by [Recv]. It returns when data may be changed
// again: at once for a message of up to 64 KiB, if the messages to that rank that it has not
// received have at most 1 MiB together; for a larger message when the receiver has all of it or, on
// one host, has begun to receive it. So two ranks may first send each other small messages, and
// then receive. With larger messages both would block forever: one of them must call Recv first, or
// they use [SendAsync].
func Send[T Element](ctx context.Context, g *Group, data []T, to int) error {
	return g.pass(ctx, message{operation.Send, to, typeOf[T](), kernel.Bytes(data)})
}

// Recv receives the next message of rank from to this rank. It blocks until the whole message is in
// data.
func Recv[T Element](ctx context.Context, g *Group, data []T, from int) error {
	return g.pass(ctx, message{operation.Recv, from, typeOf[T](), kernel.Bytes(data)})
}

// SendAsync is [Send] in the background: it returns at once, and data belongs to the operation
// until it is done. The order of the messages to that rank is the order of the calls.
func SendAsync[T Element](ctx context.Context, g *Group, data []T, to int) *Handle {
	return g.passAsync(ctx, message{operation.Send, to, typeOf[T](), kernel.Bytes(data)})
}

// RecvAsync is [Recv] in the background, as [SendAsync] is Send.
func RecvAsync[T Element](ctx context.Context, g *Group, data []T, from int) *Handle {
	return g.passAsync(ctx, message{operation.Recv, from, typeOf[T](), kernel.Bytes(data)})
}

// message is one of the calls above.
type message struct {
	do    operation.Action
	peer  int
	dtype kernel.Type
	data  []byte
}

// shared returns the descriptor of the call that both ranks compare.
func (m *message) shared() operation.Descriptor {
	return operation.Descriptor{Action: operation.Send, Type: m.dtype, Count: uint64(len(m.data) / m.dtype.Size())}
}

// pass sends or receives a message.
func (g *Group) pass(ctx context.Context, m message) error {
	p, err := g.pointOf(&m)
	if err == nil {
		err = p.pass(ctx, m)
	}
	g.exitIfKilled()
	return err
}

// passAsync is like pass, in the background.
func (g *Group) passAsync(ctx context.Context, m message) *Handle {
	p, err := g.pointOf(&m)
	if err == nil {
		var h *Handle
		if h, err = p.passAsync(ctx, m); err == nil {
			return h
		}
	}
	g.exitIfKilled()
	return done(err)
}

// done returns the Handle of an operation that has ended.
func done(err error) *Handle {
	h := &Handle{}
	h.finish(err)
	return h
}

// noted returns the action of an operation as the caller of this package knows it.
func (g *Group) noted(a operation.Action) operation.Action {
	if a == operation.Send && g.rank != exchange.Sender {
		return operation.Recv
	}
	return a
}
