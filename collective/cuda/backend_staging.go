package cuda

import (
	"context"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// stagingBackend is the backend that every group can use: the processors combine the data, piece by
// piece.
type stagingBackend struct {
	device *Device
	group  *collective.Group
}

func (*stagingBackend) name() string { return BackendStaging }

func (*stagingBackend) shut() error { return nil }

func (*stagingBackend) takeDeferred() []uint64 { return nil }

func (*stagingBackend) deferFree(uint64, uint64) bool { return false }

func (w *stagingBackend) allReduce(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, ready *Event) error {
	count, ranges := cut(address, n*t.Size())
	reduce := onHost[t].allReduce
	return w.runTransfer(ctx, ready, transfer{count: count, down: ranges, up: ranges, step: func(i int, piece []byte) error {
		return reduce(ctx, w.group, piece[:ranges(i)[0].n], op)
	}})
}

func (w *stagingBackend) broadcast(ctx context.Context, address uint64, n, root int) error {
	count, ranges := cut(address, n)
	j := transfer{count: count, step: func(i int, piece []byte) error {
		return collective.Broadcast(ctx, w.group, piece[:ranges(i)[0].n], root)
	}}
	if w.group.Rank() == root {
		j.down = ranges
	} else {
		j.up = ranges
	}
	return w.runTransfer(ctx, nil, j)
}

func (w *stagingBackend) allGather(ctx context.Context, own uint64, into []uint64, sizes []int) error {
	for root, n := range sizes {
		if n == 0 {
			continue
		}
		if root == w.group.Rank() {
			to, from := &Slice[byte]{device: w.device, address: into[root], n: n}, &Slice[byte]{device: w.device, address: own, n: n}
			if err := to.CopySlice(ctx, from); err != nil {
				return err
			}
		}
		if err := w.broadcast(ctx, into[root], n, root); err != nil {
			return err
		}
	}
	return nil
}

// reduceScatter uses pieces that have the same number of elements of each rank's part.
func (w *stagingBackend) reduceScatter(ctx context.Context, t kernel.Type, op collective.Op, address uint64, n int, into uint64) error {
	ranks, size := w.group.Size(), t.Size()
	each := max(1, pieceSize/size/ranks) // elements
	_, longest := kernel.Split(n, ranks, 0)
	down := func(i int) []copyRange {
		var ranges []copyRange
		offset := 0
		for rank := range ranks {
			lo, hi := within(n, ranks, rank, i*each, each)
			ranges = append(ranges, copyRange{address: address + uint64(lo*size), offset: offset, n: (hi - lo) * size})
			offset += (hi - lo) * size
		}
		return ranges
	}
	begin, _ := kernel.Split(n, ranks, w.group.Rank())
	scatter := onHost[t].reduceScatter
	return w.runTransfer(ctx, nil, transfer{count: (longest + each - 1) / each, down: down,
		up: func(i int) []copyRange {
			lo, hi := within(n, ranks, w.group.Rank(), i*each, each)
			return []copyRange{{address: into + uint64((lo-begin)*size), n: (hi - lo) * size}}
		},
		step: func(i int, piece []byte) error {
			last := down(i)[ranks-1]
			mine, err := scatter(ctx, w.group, piece[:last.offset+last.n], op)
			copy(piece, mine)
			return err
		}})
}

// runTransfer runs a transfer with an unused staging, once ready has occurred.
func (w *stagingBackend) runTransfer(ctx context.Context, ready *Event, j transfer) error {
	return w.device.with(ctx, func(s *staging) error {
		if err := s.after(ready); err != nil {
			return err
		}
		return s.run(ctx, j)
	})
}

// typed are operations of package collective on bytes that hold elements of one type.
type typed struct {
	allReduce     func(context.Context, *collective.Group, []byte, collective.Op) error
	reduceScatter func(context.Context, *collective.Group, []byte, collective.Op) ([]byte, error)
}

// onHost has these operations, by the type of the elements.
var onHost = [kernel.Types]typed{
	kernel.Float32: typedFor[float32](), kernel.Float64: typedFor[float64](),
	kernel.Int8: typedFor[int8](), kernel.Int16: typedFor[int16](), kernel.Int32: typedFor[int32](), kernel.Int64: typedFor[int64](),
	kernel.Uint8: typedFor[uint8](), kernel.Uint16: typedFor[uint16](), kernel.Uint32: typedFor[uint32](), kernel.Uint64: typedFor[uint64](),
	kernel.Float16: typedFor[collective.Float16](), kernel.BFloat16: typedFor[collective.BFloat16](),
}

func typedFor[T collective.Element]() typed {
	return typed{
		func(ctx context.Context, g *collective.Group, b []byte, op collective.Op) error {
			return collective.AllReduce(ctx, g, kernel.Elements[T](b), op)
		},
		func(ctx context.Context, g *collective.Group, b []byte, op collective.Op) ([]byte, error) {
			mine, err := collective.ReduceScatter(ctx, g, kernel.Elements[T](b), op)
			return kernel.Bytes(mine), err
		},
	}
}
