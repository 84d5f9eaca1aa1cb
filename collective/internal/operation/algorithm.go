package operation

import (
	"fmt"
	"strings"
)

// Algorithm is how an AllReduce is computed over sockets, as that of package collective.
type Algorithm uint8

// The algorithms, and how many there are.
const (
	Auto Algorithm = iota
	Strict
	Doubling
	Rabenseifner
	Ring
	Direct
	Algorithms
)

var algorithmNames = [Algorithms]string{"auto", "strict", "doubling", "rabenseifner", "ring", "direct"}

// String is the lower-case name.
func (a Algorithm) String() string {
	if a < Algorithms {
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

// Shares reports whether the algorithm may run in the memory that the ranks of a host share: the
// other ones are for sockets.
func (a Algorithm) Shares() bool { return a == Auto || a == Strict }

// Widest is the size in bytes of the largest element.
const Widest = 8

// Over is the algorithm that n ranks run over sockets for so many bytes: Doubling, Rabenseifner,
// Ring or Direct.
func (a Algorithm) Over(n, bytes int) Algorithm {
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
		if bytes < Widest*n { // a part may be empty, and its ranks would not learn of the call
			return Doubling
		}
		if !power {
			return Ring
		}
		return a
	}
	switch {
	case bytes <= Thresholds.doublingMore || n <= 2 && bytes <= Thresholds.doublingPair:
		return Doubling
	case power && bytes < Thresholds.ringFrom:
		return Rabenseifner
	}
	return Ring
}

// Sizes of segments, into which data is cut.
const (
	Segment      = 256 << 10 // most bytes of one frame; fits a core's second-level cache with its partner
	smallSegment = 64 << 10
	perPart      = 2 // segments into which a part is cut where that makes none too small
)

// SegmentFor is the size of the segments of an AllReduce whose parts have so many bytes. It holds
// whole elements.
func SegmentFor(part int) int {
	return max(smallSegment, min(Segment, part/perPart/Widest*Widest))
}
