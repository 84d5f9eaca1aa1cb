package collective

import (
	"fmt"
	"strings"
)

// Algorithm is how an AllReduce is computed between processes that share no memory. Forcing one is
// for measuring and for debugging; every rank of a group must have the same, otherwise its
// AllReduces fail with a [*MismatchError]. An [Average] of [Float16] or [BFloat16] is always
// Direct, since the others have no rank that sees all values of an element.
type Algorithm uint8

const (
	// Auto picks the fastest for the number of ranks and of bytes, and nothing else.
	Auto Algorithm = iota
	// Strict gives the same bits whatever the transport, the sizes of segments and the place of an
	// element in the data: each element is combined in the order of the ranks. Between processes it
	// is Direct.
	Strict
	// Doubling is recursive doubling: log2(n) exchanges of all the data.
	Doubling
	// Rabenseifner halves recursively and gathers back: 2·log2(n) exchanges, with as few bytes as a
	// ring. Where the number of ranks is no power of two it is Ring.
	Rabenseifner
	// Ring is the pipelined ring: 2·(n−1) steps, between neighbours alone.
	Ring
	// Direct sends each part to its owner, who combines them in the order of the ranks, and the
	// results to all: as few bytes as a ring, between all pairs.
	Direct
	algorithms
)

var algorithmNames = [algorithms]string{"auto", "strict", "doubling", "rabenseifner", "ring", "direct"}

// Algorithm is the one that AllReduces of the generation were forced to by [Config]; Auto for a nil
// Group.
func (g *Group) Algorithm() Algorithm {
	if g == nil {
		return Auto
	}
	return g.family.algorithm
}

// String is the lower-case name, which [ParseAlgorithm] reads.
func (a Algorithm) String() string {
	if a < algorithms {
		return algorithmNames[a]
	}
	return fmt.Sprintf("algorithm(%d)", uint8(a))
}

// ParseAlgorithm reads the name of an algorithm; the empty one is Auto.
func ParseAlgorithm(name string) (Algorithm, error) {
	if name == "" {
		return Auto, nil
	}
	for a, known := range algorithmNames {
		if strings.EqualFold(name, known) {
			return Algorithm(a), nil
		}
	}
	return Auto, fmt.Errorf("collective: %q is not an algorithm; choose one of %s", name, strings.Join(algorithmNames[:], ", "))
}

// shares reports whether the algorithm may run in the memory that the ranks of a host share: the
// other ones are for sockets.
func (a Algorithm) shares() bool { return a == Auto || a == Strict }

const widest = 8 // bytes of the largest element

// over is the algorithm that n ranks run over sockets for so many bytes: Doubling, Rabenseifner,
// Ring or Direct.
func (a Algorithm) over(n, bytes int) Algorithm {
	power := n&(n-1) == 0
	switch a {
	case Strict, Direct:
		return Direct
	case Doubling:
		return Doubling
	}
	if n == 1 {
		return Doubling // in no steps
	}
	switch a {
	case Rabenseifner, Ring:
		if bytes < widest*n { // a part may be empty, and its ranks would not learn of the call
			return Doubling
		}
		if !power {
			return Ring
		}
		return a
	}
	switch {
	case bytes <= thresholds.doublingMore || n <= 2 && bytes <= thresholds.doublingPair:
		return Doubling
	case power && bytes < thresholds.ringFrom:
		return Rabenseifner
	}
	return Ring
}

const (
	segment      = 256 << 10 // most bytes of one frame; fits a core's second-level cache with its partner
	smallSegment = 64 << 10
	perPart      = 2 // segments into which a part is cut where that makes none too small
)

// segmentFor is the size of the segments of an AllReduce whose parts have so many bytes. It holds
// whole elements.
func segmentFor(part int) int {
	return max(smallSegment, min(segment, part/perPart/widest*widest))
}
