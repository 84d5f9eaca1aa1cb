package elastic

import (
	"fmt"
	"iter"
)

// counting are the loops by State.Count in which the training function is, the outermost first.
type counting []*counted

// counted is one such loop.
type counted struct {
	value *int // the part's live value
	at    int  // the number that the body has now
	inner []*int
}

// Count returns the numbers from the value of the part name up to n, excluding n, for a loop of the
// training function. The part is a [Value] of an int, which has the number of the next step:
//
//	state := elastic.NewState(w, elastic.Tensor("weights", weights), elastic.Value("step", new(int)))
//	…
//		for step := range state.Count("step", 1000) {
//			… // one step
//			if err := state.Commit(); err != nil {
//				return err
//			}
//		}
//
// A step counts with the Commit or CheckHostUpdates in the body, before these save or agree, so
// that none is done twice when the hosts change or a worker dies; a body without them counts when
// it ends. Call them after the step's work.
//
// Loops nest, as over epochs and batches: a commit counts for the innermost loop around it, and the
// inner loops begin at 0 when the number of an outer one changes.
//
// If there is no such part, there is no step, and Run, Commit and the other methods that return an
// error return one that names it.
func (s *State) Count(name string, n int) iter.Seq[int] {
	return func(yield func(int) bool) {
		value := s.number(name)
		if value == nil {
			return
		}
		loop, depth := &counted{value: value}, len(s.loops)
		if depth > 0 {
			outer := s.loops[depth-1]
			outer.inner = append(outer.inner, value)
		}
		s.loops = append(s.loops, loop)
		defer func() { s.loops = s.loops[:depth] }()
		for *value < n {
			loop.at = *value
			if !yield(loop.at) {
				return
			}
			loop.count()
		}
	}
}

// count counts the body's step, unless that has been done.
func (c *counted) count() {
	if *c.value != c.at {
		return
	}
	*c.value = c.at + 1
	for _, inner := range c.inner {
		*inner = 0
	}
	c.inner = nil
}

// count counts the step of the innermost loop.
func (s *State) count() {
	if n := len(s.loops); n > 0 {
		s.loops[n-1].count()
	}
}

// number returns the live value of a part; nil, and the state cannot be used, if it is no int.
func (s *State) number(name string) *int {
	for i := range s.parts.all {
		if c := s.parts.of[i]; c != nil && c.name == name && c.number != nil {
			return c.number
		}
	}
	if s.err == nil {
		s.err = fmt.Errorf("elastic: Count(%q): the state has no part elastic.Value(%q, …) of an int", name, name)
	}
	return nil
}
