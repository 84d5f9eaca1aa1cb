package operation

import (
	"fmt"
	"strings"
)

// Algorithm is the algorithm of an AllReduce over sockets, with the values of Algorithm in package
// collective.
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

// String returns the lower-case name.
func (a Algorithm) String() string {
	if a < Algorithms {
		return algorithmNames[a]
	}
	return fmt.Sprintf("algorithm(%d)", uint8(a))
}

// ParseAlgorithm parses the name of an algorithm; the empty name is Auto.
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

// Shares reports whether the algorithm may run in shared memory; the other algorithms use sockets
// only.
func (a Algorithm) Shares() bool { return a == Auto || a == Strict }

// Widest is the size in bytes of the largest element.
const Widest = 8

// Over returns the algorithm that n ranks run over sockets for the given number of bytes: Doubling,
// Rabenseifner, Ring or Direct.
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
		if bytes < Widest*n { // a part may be empty, so that its ranks would not learn of the call
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
	Segment      = 256 << 10 // largest frame in bytes; two of them fit a core's second-level cache
	smallSegment = 64 << 10
	perPart      = 2 // number of segments of a part, unless they would be too small
)

// SegmentFor returns the size in bytes of the segments of an AllReduce whose parts have the given
// number of bytes. It is a multiple of the size of every element.
func SegmentFor(part int) int {
	return max(smallSegment, min(Segment, part/perPart/Widest*Widest))
}
