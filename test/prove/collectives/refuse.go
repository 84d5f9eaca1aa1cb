package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/hvdrun/hvdrun/collective"
)

// refused makes the step's invalid call, on one rank or on all.
func (t *turnOf[T]) refused() error {
	s := *t.step
	w := s.Wrong
	if w.Rank < 0 || w.Rank == t.g.Rank() {
		s.mistake(w.How, t.g.Size())
	}
	err := callers[s.Type](t.performer, &s)
	switch {
	case err == nil:
		return errAccepted
	case w.Rank >= 0:
		return err
	case errors.Is(err, collective.ErrAborted) || classOf(err) == classMismatch:
		return fmt.Errorf("a call that is invalid on all ranks: %w", err)
	}
	return nil
}

// mistake makes the step's call invalid.
func (s *step) mistake(how string, ranks int) {
	other := func(is, a, b string) string {
		if is == a {
			return b
		}
		return a
	}
	switch how {
	case wrongCount:
		if s.Count++; len(s.Tensors) > 0 {
			s.Tensors = []int{s.Tensors[0] + 1}
		}
	case wrongType:
		s.Type = other(s.Type, "float32", "float64")
	case wrongOp:
		s.Op = other(s.Op, "sum", "max")
	case wrongRoot:
		s.Root = (s.Root + 1) % ranks
	case wrongCall:
		s.Do = other(s.Do, barrier, allGather)
	case wrongCompression:
		s.Compress = other(s.Compress, "float16", "bfloat16")
	case noOp:
		s.Op = "none"
	case noRoot:
		s.Root = -1
	case noCompression:
		s.Compress = "none"
	case noParts:
		s.surplus = true
	}
}

var callers = map[string]func(*performer, *step) error{
	"": call[uint8], "float32": call[float32], "float64": call[float64], "float16": call[collective.Float16],
	"bfloat16": call[collective.BFloat16], "int8": call[int8], "int16": call[int16], "int32": call[int32], "int64": call[int64],
	"uint8": call[uint8], "uint16": call[uint16], "uint32": call[uint32], "uint64": call[uint64],
}

// call makes a call whose result does not matter.
func call[T collective.Element](p *performer, s *step) error {
	t := turnOf[T]{performer: &performer{actor: p.actor, g: p.g, number: p.number, step: s}, ctx: context.Background(), op: opOf(s.Op)}
	data := make([]T, s.counts()[0])
	var err error
	switch s.Do {
	case allReduce, compressed:
		return t.reduce(p.g, data)
	case broadcast:
		return collective.Broadcast(t.ctx, p.g, data, s.Root)
	case bytesOp:
		_, err = collective.BroadcastBytes(t.ctx, p.g, make([]byte, s.Count), s.Root)
	case allGather:
		_, err = collective.AllGather(t.ctx, p.g, data)
	case scatter:
		_, err = collective.ReduceScatter(t.ctx, p.g, data, t.op)
	case tree:
		partials, parts := halves(p.g, s.Count, func(int) []T { return data })
		return collective.ReduceTree(t.ctx, p.g, partials, parts, make([]T, len(data)), t.op)
	case allToAll:
		parts := make([][]T, p.g.Size())
		if s.surplus {
			parts = append(parts, nil)
		}
		_, err = collective.AllToAll(t.ctx, p.g, parts)
	case barrier:
		return collective.Barrier(t.ctx, p.g)
	case messagesOp:
		return callMessages(&t, data)
	case async:
		return collective.AllReduceAsync(t.ctx, p.g, t.name(0), data, t.op).Wait()
	default:
		return fmt.Errorf("there is no such call of %s", s.Do)
	}
	return err
}
