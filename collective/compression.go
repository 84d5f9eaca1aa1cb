package collective

import (
	"context"
	"sync"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Compression is the format in which float32 elements are sent between ranks and combined. The
// formats halve the bytes at the cost of precision: the data of every rank is rounded, and so is
// every partial result, except most of those of an [Average].
type Compression uint8

const (
	// CompressNone leaves data as it is.
	CompressNone Compression = Compression(operation.NotCompressed)
	// CompressFloat16 rounds to [Float16]; data and sums above 65504 become infinite.
	CompressFloat16 Compression = Compression(operation.AsFloat16)
	// CompressBFloat16 rounds to [BFloat16]: the range of float32, 8 bits of precision.
	CompressBFloat16 Compression = Compression(operation.AsBFloat16)
)

// String returns the name of the type on the wire.
func (c Compression) String() string { return operation.Compression(c).String() }

// wires holds buffers of AllReduceCompressed, as *[]byte.
var wires sync.Pool

// AllReduceCompressed is [AllReduce] of float32 elements that are sent between ranks in the format
// c.
func AllReduceCompressed(ctx context.Context, g *Group, data []float32, op Op, c Compression) error {
	if c == CompressNone {
		return AllReduce(ctx, g, data, op)
	}
	if err := operation.Compression(c).Check(kernel.Float32); err != nil {
		d := operation.Descriptor{Action: operation.AllReduce, Type: kernel.Float32, Op: operation.Op(op), Root: int32(c), Count: uint64(len(data))}
		return g.run(ctx, d, err, nil)
	}
	buffer, _ := wires.Get().(*[]byte)
	if buffer == nil {
		buffer = new([]byte)
	}
	defer wires.Put(buffer)
	t := operation.Compression(c).Wire()
	if n := len(data) * t.Size(); cap(*buffer) < n {
		*buffer = make([]byte, n)
	}
	wire := (*buffer)[:len(data)*t.Size()]
	kernel.Narrow(t)(wire, kernel.Bytes(data))
	if err := g.allReduceBytes(ctx, t, operation.Op(op), wire, nil); err != nil {
		return err
	}
	kernel.Widen(t)(kernel.Bytes(data), wire)
	return nil
}
