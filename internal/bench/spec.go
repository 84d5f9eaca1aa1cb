// Package bench measures collective operations: hvdrun's, as any worker of a job calls them, and
// those of other libraries.
//
// All are measured alike: float32 sums, in place if the library supports it, called back to back by
// every rank. A sample is one operation; its time is the longest over the ranks, by each rank's
// monotonic clock. The result of an operation is verified before it is timed.
package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Op is an operation to measure.
type Op string

// The operations. Async is AllReduceAsync and the wait for it. Gradients is a backward pass during
// which an Averager reduces the gradients, and After the same pass followed by one AllReduce. In
// SendRecv each rank sends the tensor to the next rank and receives that of the one before.
// CopyAlone and CopyAll are not collectives but their bound: a plain copy of half of the bytes onto
// the other half, by rank 0 alone or by all ranks at once. Stream is the bound between hosts: one
// rank sends to one rank of another host.
const (
	AllReduce     Op = "allreduce"
	Async         Op = "allreduce-async"
	Broadcast     Op = "broadcast"
	AllGather     Op = "allgather"
	ReduceScatter Op = "reducescatter"
	AllToAll      Op = "alltoall"
	SendRecv      Op = "sendrecv"
	Barrier       Op = "barrier"
	Gradients     Op = "gradients"

	After     Op = "gradients-after"
	CopyAlone Op = "copy-alone"
	CopyAll   Op = "copy-all"
	Stream    Op = "stream"
)

// ops are the operations that a user may select.
var ops = []Op{AllReduce, Async, Broadcast, AllGather, ReduceScatter, AllToAll, SendRecv, Barrier, Gradients}

const (
	minSamples = 10
	maxSamples = 20000

	streamSize = 16 << 20

	// maxSize bounds the size of a tensor in bytes, because MPI counts elements in 31 bits.
	maxSize = 4 << 30
)

// Spec is what a rank measures.
type Spec struct {
	Op Op
	// Sizes are the sizes of the whole tensor in bytes. In allgather, reducescatter and alltoall
	// each rank sends or receives a part of it.
	Sizes []int
	// Time is the target for all samples of a size: as many samples as fit, at least 10 and at most
	// 20,000.
	Time time.Duration
	// Alloc allocates tensors in memory shared by the ranks of a host (collective.Alloc).
	Alloc bool
	// Into makes allgather, reducescatter and alltoall write their results into existing tensors
	// (collective.AllGatherInto and so on). Sizes for allgather and alltoall must then be multiples
	// of 4 bytes times the number of ranks.
	Into bool
	// Async runs allreduce and broadcast, and with Into allgather and reducescatter, in the
	// background, and waits for them.
	Async bool
	// Memory also measures CopyAlone and CopyAll.
	Memory bool
	// Bucket is the size of a bucket in gradient.Options, in bytes, for Gradients. 0: the default.
	Bucket int
}

var units = []struct {
	suffix string
	bytes  int
}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}, {"", 1}}

// ParseSizes parses a list such as 4,64KiB,1MiB and returns it sorted and without duplicates. Sizes
// must be multiples of 4 bytes.
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
			return 0, fmt.Errorf("%q is not a number of bytes (4, 64KiB, 1MiB, 1GiB)", word)
		case n == 0 || n*u.bytes%4 != 0:
			return 0, fmt.Errorf("%q is not a multiple of the 4 bytes of a float32", word)
		case n > maxSize/u.bytes:
			return 0, fmt.Errorf("%q exceeds the largest size, %s", word, SizeText(maxSize))
		}
		return n * u.bytes, nil
	}
	panic("unreachable: the last unit has no suffix")
}

// SizeText formats a size for ParseSizes, in the largest unit that divides it.
func SizeText(n int) string {
	for _, u := range units[:3] {
		if n >= u.bytes && n%u.bytes == 0 {
			return strconv.Itoa(n/u.bytes) + u.suffix
		}
	}
	return strconv.Itoa(n)
}

// HasInto reports whether an operation has a form that allocates no memory for its result.
func (op Op) HasInto() bool { return op == AllGather || op == ReduceScatter || op == AllToAll }

// HasAsync reports whether an operation has a form in the background.
func (op Op) HasAsync() bool {
	return op == AllReduce || op == Broadcast || op == AllGather || op == ReduceScatter
}

// ParseOp parses the name of one of ops.
func ParseOp(text string) (Op, error) {
	if op := Op(strings.ToLower(text)); slices.Contains(ops, op) {
		return op, nil
	}
	names := make([]string, len(ops))
	for i, op := range ops {
		names[i] = string(op)
	}
	return "", fmt.Errorf("%q is not one of %s", text, strings.Join(names, ", "))
}
