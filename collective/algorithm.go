package collective

import "github.com/hvdrun/hvdrun/collective/internal/operation"

// Algorithm is how an AllReduce is computed between processes that share no memory. Forcing one is
// for measuring and for debugging; every rank of a group must have the same, otherwise its
// AllReduces fail with a [*MismatchError]. An [Average] of [Float16] or [BFloat16] is always
// Direct, since the others have no rank that sees all values of an element.
type Algorithm uint8

const (
	// Auto picks the fastest for the number of ranks and of bytes, and nothing else.
	Auto Algorithm = Algorithm(operation.Auto)
	// Strict gives the same bits whatever the transport, the sizes of segments and the place of an
	// element in the data: each element is combined in the order of the ranks. Between processes it
	// is Direct.
	Strict Algorithm = Algorithm(operation.Strict)
	// Doubling is recursive doubling: log2(n) exchanges of all the data.
	Doubling Algorithm = Algorithm(operation.Doubling)
	// Rabenseifner halves recursively and gathers back: 2·log2(n) exchanges, with as few bytes as a
	// ring. Where the number of ranks is no power of two it is Ring.
	Rabenseifner Algorithm = Algorithm(operation.Rabenseifner)
	// Ring is the pipelined ring: 2·(n−1) steps, between neighbours alone.
	Ring Algorithm = Algorithm(operation.Ring)
	// Direct sends each part to its owner, who combines them in the order of the ranks, and the
	// results to all: as few bytes as a ring, between all pairs.
	Direct Algorithm = Algorithm(operation.Direct)
)

// Algorithm is the one that AllReduces of the generation were forced to by [Config]; Auto for a nil
// Group.
func (g *Group) Algorithm() Algorithm {
	if g == nil {
		return Auto
	}
	return Algorithm(g.family.forced.Algorithm)
}

// String is the lower-case name, which [ParseAlgorithm] reads.
func (a Algorithm) String() string { return operation.Algorithm(a).String() }

// ParseAlgorithm reads the name of an algorithm; the empty one is Auto.
func ParseAlgorithm(name string) (Algorithm, error) {
	a, err := operation.ParseAlgorithm(name)
	return Algorithm(a), err
}
