package collective

import (
	"time"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// Span is an operation that has ended on this rank, or a phase of one.
type Span struct {
	// Name is the operation's, as AllReduce; Phase is "" for all of it. Phases in shared memory are
	// told in the order copy-in, wait, reduce, copy-out, although they alternate where data is
	// large: each has the time that it took in all.
	Name, Phase string
	// Tensor is the name that an asynchronous operation was given, "" for others. Spans of one
	// tensor follow each other, whatever lies between them.
	Tensor string
	// Lane tells the groups of a generation apart: 0 for that of all ranks. Spans of one lane
	// without a tensor follow each other or lie within each other.
	Lane       uint64
	Generation uint64
	Start      time.Time
	Duration   time.Duration
	// Bytes are those of this rank's tensor, 0 where they are not known beforehand.
	Bytes int
	// Algorithm is as in [Operations].
	Algorithm string
}

// Timeline takes the spans of all groups of an [Endpoint]. Span is called by many goroutines, by
// each when the operation has ended and before it returns, so it should return at once.
type Timeline interface{ Span(s Span) }

// record tells the timeline of an operation that has begun then and ends now.
func (g *Group) record(d operation.Descriptor, begun time.Time, by operation.Method) {
	g.family.timeline.Span(Span{Name: g.noted(d.Action).String(), Lane: g.lane, Generation: g.generation,
		Start: begun, Duration: time.Since(begun), Bytes: d.Bytes(), Algorithm: by.String()})
}
