// Package bench measures collective operations: ours as any worker of a job sees them, and those of
// other libraries.
//
// One rule for all of them: float32 sums, in place where there is such a form, called by every rank
// back to back. A sample is one operation, and its time the longest over the ranks, by each rank's
// monotonic clock. The result of an operation is checked before it is timed.
package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Op is what is measured.
type Op string

// The operations. Copy is none, but what bounds them: a plain copy of memory, half of the bytes
// onto the other half, by rank 0 alone (CopyAlone) or by all ranks at once (CopyAll).
const (
	AllReduce     Op = "allreduce"
	Broadcast     Op = "broadcast"
	AllGather     Op = "allgather"
	ReduceScatter Op = "reducescatter"
	AllToAll      Op = "alltoall"
	Barrier       Op = "barrier"

	CopyAlone Op = "copy-alone"
	CopyAll   Op = "copy-all"
)

// Ops are those that a person may choose.
var Ops = []Op{AllReduce, Broadcast, AllGather, ReduceScatter, AllToAll, Barrier}

const (
	minSamples = 10
	maxSamples = 20000

	// maxSize bounds the bytes of one tensor, whose elements MPI counts in 31 bits.
	maxSize = 4 << 30
)

// Spec says what a rank is to measure.
type Spec struct {
	Op Op
	// Sizes are bytes of float32: of the whole tensor, of which allgather, reducescatter and
	// alltoall give or take a part by rank.
	Sizes []int
	// Time is aimed at for the samples of one size: as many as fit in, at least 10 and at most
	// 20,000.
	Time time.Duration
	// Alloc takes tensors from memory that the ranks of a host share (collective.Alloc).
	Alloc bool
	// Memory asks for CopyAlone and CopyAll too.
	Memory bool
}

var units = []struct {
	suffix string
	bytes  int
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}, {"", 1}}

// ParseSizes reads a list as 4,64KiB,1MiB, and returns it sorted, without doubles. A size is a
// multiple of 4 bytes.
func ParseSizes(text string) ([]int, error) {
	var sizes []int
	for word := range strings.SplitSeq(text, ",") {
		n, err := parseSize(strings.TrimSpace(word))
		if err != nil {
			return nil, err
		}
		sizes = append(sizes, n)
	}
	slices.Sort(sizes)
	return slices.Compact(sizes), nil
}

func parseSize(word string) (int, error) {
	for _, u := range units {
		number, ok := strings.CutSuffix(word, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.Atoi(strings.TrimSpace(number))
		switch {
		case err != nil || n < 0:
			return 0, fmt.Errorf("%q is no number of bytes (4, 64KiB, 1MiB, 1GiB)", word)
		case n == 0 || n*u.bytes%4 != 0:
			return 0, fmt.Errorf("%q is no multiple of the 4 bytes of a float32", word)
		case n > maxSize/u.bytes:
			return 0, fmt.Errorf("%q is more than can be measured, %s", word, SizeText(maxSize))
		}
		return n * u.bytes, nil
	}
	panic("unreachable: the last unit is no suffix")
}

// SizeText returns the bytes as ParseSizes reads them, in the largest unit of which they are a
// multiple.
func SizeText(n int) string {
	for _, u := range units[:3] {
		if n >= u.bytes && n%u.bytes == 0 {
			return strconv.Itoa(n/u.bytes) + u.suffix
		}
	}
	return strconv.Itoa(n)
}

// ParseOp reads the name of one of Ops.
func ParseOp(text string) (Op, error) {
	if op := Op(strings.ToLower(text)); slices.Contains(Ops, op) {
		return op, nil
	}
	names := make([]string, len(Ops))
	for i, op := range Ops {
		names[i] = string(op)
	}
	return "", fmt.Errorf("%q is none of %s", text, strings.Join(names, ", "))
}
