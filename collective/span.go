package collective

import (
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// Span is an operation that has ended on this rank, or a phase of one.
type Span struct {
	// Name is the name of the operation, such as AllReduce. Phase is empty for the whole operation.
	// Phases in shared memory are reported in the order copy-in, wait, reduce, copy-out, although
	// they alternate for large data: each has its total time.
	Name, Phase string
	// Tensor is the name of an asynchronous operation, and empty for others. Spans of one tensor do
	// not overlap, but spans of other tensors may lie between them.
	Tensor string
	// Lane identifies the group within its generation; 0 is the group of all ranks. Spans of one
	// lane without a tensor either do not overlap or are nested.
	Lane       uint64
	Generation uint64
	Start      time.Time
	Duration   time.Duration
	// Bytes is the size of this rank's tensor, or 0 if that is not known beforehand.
	Bytes int
	// Algorithm is as in [Operations].
	Algorithm string
}

// Timeline receives the spans of all groups of an [Endpoint]. Many goroutines call Span, each when
// an operation has ended but before it returns, so Span should return at once.
type Timeline interface{ Span(s Span) }

// record adds an operation that began at begun and ends now to the timeline.
func (g *Group) record(d operation.Descriptor, begun time.Time, by operation.Method) {
	g.family.timeline.Span(Span{Name: g.noted(d.Action).String(), Lane: g.lane, Generation: g.generation,
		Start: begun, Duration: time.Since(begun), Bytes: d.Bytes(), Algorithm: by.String()})
}
