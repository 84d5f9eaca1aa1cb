package collective

import "github.com/hvdrun/hvdrun/collective/internal/operation"

// Algorithm is the algorithm of an AllReduce between processes that share no memory. An algorithm
// is forced only to measure or to debug. Every rank of a group must force the same one; otherwise
// its AllReduces fail with a [*MismatchError]. An [Average] of [Float16] or [BFloat16] is always
// Direct, since the others have no rank that sees all values of an element.
type Algorithm uint8

const (
	// Auto picks the fastest algorithm for the number of ranks and of bytes; nothing else
	// influences the choice.
	Auto Algorithm = Algorithm(operation.Auto)
	// Strict combines each element in the order of the ranks, so the bits of the result depend
	// neither on the transport, nor on the sizes of segments, nor on the position of an element in
	// the data. Between processes it is Direct.
	Strict Algorithm = Algorithm(operation.Strict)
	// Doubling is recursive doubling: log2(n) exchanges of all the data.
	Doubling Algorithm = Algorithm(operation.Doubling)
	// Rabenseifner halves recursively and gathers back: 2·log2(n) exchanges, with as few bytes as a
	// ring. If the number of ranks is not a power of two, it is Ring.
	Rabenseifner Algorithm = Algorithm(operation.Rabenseifner)
	// Ring is the pipelined ring: 2·(n−1) steps, between neighbours only.
	Ring Algorithm = Algorithm(operation.Ring)
	// Direct sends each part of the data to the part's owner, which combines the parts in the order
	// of the ranks and sends the result to all ranks: as few bytes as a ring, between all pairs of
	// ranks.
	Direct Algorithm = Algorithm(operation.Direct)
)

// Algorithm returns the algorithm that [Config] forces for the AllReduces of the generation; Auto
// for a nil Group.
func (g *Group) Algorithm() Algorithm {
	if g == nil {
		return Auto
	}
	return Algorithm(g.family.forced.Algorithm)
}

// String returns the lower-case name, which [ParseAlgorithm] parses.
func (a Algorithm) String() string { return operation.Algorithm(a).String() }

// ParseAlgorithm parses the name of an algorithm; the empty name is Auto.
func ParseAlgorithm(name string) (Algorithm, error) {
	a, err := operation.ParseAlgorithm(name)
	return Algorithm(a), err
}
