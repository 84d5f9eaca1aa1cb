package agreement

import (
	"github.com/hvdrun/hvdrun/collective/internal/operation"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Bucket is a set of tensors that are reduced as one.
type Bucket struct {
	Do          operation.Action // 0: AllReduce
	Wire        kernel.Type      // as ranks send it
	Op          operation.Op
	Compression operation.Compression
	Elsewhere   bool
	IDs         []int
	Bytes       int // on the wire
	full        bool
}

// fits reports whether the tensors of a request may be in the bucket.
func (b *Bucket) fits(r *Request, bytes, alone, most int) bool {
	return !b.full && !r.ownBucket(bytes, alone) && b.Op != operation.Adasum && b.alike(r) && b.Bytes+bytes <= most
}

// alike reports whether the tensors of a request are reduced in the same way as those of the
// bucket.
func (b *Bucket) alike(r *Request) bool {
	return b.Do == r.Do && b.Wire == r.wire() && b.Op == r.Op && b.Compression == r.Compression && b.Elsewhere == r.Elsewhere
}
