package agreement

import (
	"cmp"
	"math"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Request describes the operation that a rank wants on a named tensor. It must be equal on all
// ranks.
type Request struct {
	Do          operation.Action // 0 for an AllReduce
	Root        int32            // of a broadcast
	Type        kernel.Type
	Op          operation.Op
	Compression operation.Compression
	Count       uint64 // elements
	Prescale    float64
	Postscale   float64
	Elsewhere   bool // the tensor is outside host memory
	Refused     bool // the rank itself refuses it: its arguments are invalid
}

// call returns the request as printed in errors.
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

// Action returns the operation of the API.
func (r *Request) Action() operation.Action { return cmp.Or(r.Do, operation.AllReduceAsync) }

// Bytes returns the size of the tensor, in bytes.
func (r *Request) Bytes() int { return int(r.Count) * r.Type.Size() }

// wire returns the type of the tensor's elements on the wire.
func (r *Request) wire() kernel.Type {
	if t := r.Compression.Wire(); t != 0 {
		return t
	}
	return r.Type
}

// scales returns a number that distinguishes scales in errors; 0 for scales of 1.
func (r *Request) scales() uint16 {
	if r.Prescale == 1 && r.Postscale == 1 {
		return 0
	}
	x := math.Float64bits(r.Prescale)*31 ^ math.Float64bits(r.Postscale)
	return max(1, uint16(x^x>>16^x>>32^x>>48))
}

// moves reports whether the operation is not an AllReduce.
func (r *Request) moves() bool {
	return r.Do == operation.BroadcastAsync || r.Do == operation.AllGatherIntoAsync || r.Do == operation.ReduceScatterIntoAsync
}

// movable reports whether a request from another rank, other than an AllReduce, is valid.
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

// sound reports whether a request from another rank is valid.
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

// ownBucket reports whether a tensor with the given number of bytes on the wire has its own bucket.
// alone is the size in bytes from which tensors have one.
func (r *Request) ownBucket(bytes, alone int) bool {
	return r.Do != 0 || bytes >= alone && r.Compression == operation.NotCompressed
}

// Sizes in bytes from which a tensor is reduced in place: copying it into a bucket and back costs
// more than a separate operation.
const (
	AloneInMemory = 64 << 10 // among ranks that share memory
	aloneOnWire   = 1 << 20
)
