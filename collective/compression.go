package collective

import (
	"context"
	"fmt"
	"sync"

	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Compression is the format in which float32s travel between ranks and are combined. Half the bytes
// cost precision: the data of every rank is rounded. So is every partial result, except most of
// those of an [Average].
type Compression uint8

const (
	// CompressNone leaves data as it is.
	CompressNone Compression = iota
	// CompressFloat16 rounds to [Float16]; what is above 65504 becomes infinite, data or sum.
	CompressFloat16
	// CompressBFloat16 rounds to [BFloat16]: the range of float32, 8 bits of precision.
	CompressBFloat16
	compressions
)

// String is the name of the type on the wire.
func (c Compression) String() string {
	switch c {
	case CompressNone:
		return "none"
	case CompressFloat16, CompressBFloat16:
		return c.wire().String()
	}
	return fmt.Sprintf("compression(%d)", uint8(c))
}

// wire is the type on the wire; 0: that of the data.
func (c Compression) wire() kernel.Type {
	return [compressions]kernel.Type{CompressFloat16: kernel.Float16, CompressBFloat16: kernel.BFloat16}[c]
}

func (c Compression) check(t kernel.Type, _ Op) error {
	switch {
	case c >= compressions:
		return fmt.Errorf("%v is not a compression", c)
	case c != CompressNone && t != kernel.Float32:
		return fmt.Errorf("compression to %v is for float32, not for %v", c, t)
	}
	return nil
}

// wires holds buffers of AllReduceCompressed, as *[]byte.
var wires sync.Pool

// AllReduceCompressed is [AllReduce] of float32s that go from rank to rank in another form.
func AllReduceCompressed(ctx context.Context, g *Group, data []float32, op Op, c Compression) error {
	if c == CompressNone {
		return AllReduce(ctx, g, data, op)
	}
	if err := c.check(kernel.Float32, op); err != nil {
		d := descriptor{action: allReduceAction, dtype: kernel.Float32, reduce: op, root: int32(c), count: uint64(len(data))}
		return g.run(ctx, d, err, nil)
	}
	buffer, _ := wires.Get().(*[]byte)
	if buffer == nil {
		buffer = new([]byte)
	}
	defer wires.Put(buffer)
	t := c.wire()
	if n := len(data) * t.Size(); cap(*buffer) < n {
		*buffer = make([]byte, n)
	}
	wire := (*buffer)[:len(data)*t.Size()]
	kernel.Narrow(t)(wire, kernel.Bytes(data))
	if err := g.allReduceBytes(ctx, t, op, wire, nil); err != nil {
		return err
	}
	kernel.Widen(t)(kernel.Bytes(data), wire)
	return nil
}
