package agreement

import (
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Bucket is a set of tensors that are reduced as one.
type Bucket struct {
	Do          operation.Action // 0 for an AllReduce
	Wire        kernel.Type      // as ranks send it
	Op          operation.Op
	Compression operation.Compression
	Elsewhere   bool
	IDs         []int
	Bytes       int  // on the wire
	full        bool // later tensors go into another bucket
}

// fits reports whether the tensor of a request, of the given number of bytes on the wire, may be
// added to the bucket.
func (b *Bucket) fits(r *Request, bytes, alone, most int) bool {
	return !b.full && !r.ownBucket(bytes, alone) && b.Op != operation.Adasum && b.alike(r) && b.Bytes+bytes <= most
}

// alike reports whether the tensor of a request is reduced in the same way as those of the bucket.
func (b *Bucket) alike(r *Request) bool {
	return b.Do == r.Do && b.Wire == r.wire() && b.Op == r.Op && b.Compression == r.Compression && b.Elsewhere == r.Elsewhere
}
