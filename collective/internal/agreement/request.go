package agreement

import (
	"cmp"
	"fmt"
	"math"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Request is the operation that a rank wants on the tensor of a name. It must be equal on all
// ranks.
type Request struct {
	Do          operation.Action // 0: AllReduce
	Root        int32            // of a broadcast
	Type        kernel.Type
	Op          operation.Op
	Compression operation.Compression
	Count       uint64 // elements
	Prescale    float64
	Postscale   float64
	Elsewhere   bool // than in memory
	Refused     bool // by the rank itself: its arguments are invalid
}

// call is the request as errors print it.
func (r *Request) call() operation.Descriptor {
	d := operation.Descriptor{Action: r.Action(), Type: r.Type, Op: r.Op, Count: r.Count,
		Root: int32(r.Compression) | int32(r.scales())<<8}
	if r.Do != 0 {
		d.Root = r.Root
	}
	if r.Elsewhere {
		d.Root |= operation.ElsewhereBit
	}
	if r.Refused {
		d.Algorithm |= operation.Refused
	}
	return d
}

// Wrong is an error of the operation's arguments, or of its context.
func (r *Request) Wrong(err error) error {
	return fmt.Errorf("collective: %s: %w", r.Action().String(), err)
}

// Action is the operation of the API.
func (r *Request) Action() operation.Action { return cmp.Or(r.Do, operation.AllReduceAsync) }

// Bytes is the size of the tensor itself.
func (r *Request) Bytes() int { return int(r.Count) * r.Type.Size() }

// wire is the type of a tensor as ranks send it.
func (r *Request) wire() kernel.Type {
	if t := r.Compression.Wire(); t != 0 {
		return t
	}
	return r.Type
}

// scales distinguishes scales in errors; 0 for those that change nothing.
func (r *Request) scales() uint16 {
	if r.Prescale == 1 && r.Postscale == 1 {
		return 0
	}
	x := math.Float64bits(r.Prescale)*31 ^ math.Float64bits(r.Postscale)
	return max(1, uint16(x^x>>16^x>>32^x>>48))
}

// moves reports whether the operation is another one than AllReduce.
func (r *Request) moves() bool {
	return r.Do == operation.BroadcastAsync || r.Do == operation.AllGatherIntoAsync || r.Do == operation.ReduceScatterIntoAsync
}

// movable reports whether a request that another rank has sent, and that is no AllReduce, is valid.
func (r *Request) movable() bool {
	if r.Elsewhere || r.Compression != operation.NotCompressed || r.Prescale != 1 || r.Postscale != 1 {
		return false
	}
	switch r.Do {
	case operation.BroadcastAsync:
		return r.Op == 0 && r.Root >= 0
	case operation.AllGatherIntoAsync:
		return r.Op == 0 && r.Root == 0
	case operation.ReduceScatterIntoAsync:
		return r.Op.CheckParts(r.Type) == nil && r.Root == 0
	}
	return false
}

// sound reports whether a request that another rank has sent is valid.
func (r *Request) sound() bool {
	switch {
	case r.Type == 0, r.Type >= kernel.Types, r.Count > uint64(math.MaxInt/r.Type.Size()),
		r.Prescale != r.Prescale, r.Postscale != r.Postscale:
		return false
	case r.Refused:
		return true
	case r.moves():
		return r.movable()
	case r.Elsewhere && (r.Op == operation.Adasum || r.Compression != operation.NotCompressed || r.Prescale != 1 || r.Postscale != 1):
		return false
	}
	return r.Op.Check(r.Type) == nil && r.Compression.Check(r.Type) == nil
}

// ownBucket reports whether a tensor, of so many bytes on the wire, has a bucket of its own, where
// those of alone bytes have.
func (r *Request) ownBucket(bytes, alone int) bool {
	return r.Do != 0 || bytes >= alone && r.Compression == operation.NotCompressed
}

// Sizes in bytes from which on a tensor is reduced where it lies: to copy it into a bucket and back
// costs more than another operation does.
const (
	AloneInMemory = 64 << 10 // among ranks that share memory
	aloneOnWire   = 1 << 20
)
