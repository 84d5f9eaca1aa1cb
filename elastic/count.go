package elastic

import (
	"fmt"
	"iter"
)

// counting lists the loops over State.Count that the training function is in, outermost first.
type counting []*counted

// counted is one such loop.
type counted struct {
	value *int // the part's live value
	at    int  // the number of the current execution of the body
	inner []*int
}

// Count returns the numbers from the value of the part with the given name to n-1, for a loop in
// the training function. The part is a [Value] of an int, whose value is the number of the next
// step:
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
// Commit and CheckHostUpdates, when called in the body, count the step before they save or agree,
// so that no step is done twice when the hosts change or a worker dies. Call them after the step's
// work. If the body calls neither, the step counts when the body ends.
//
// Loops can be nested, for example over epochs and batches: a commit counts a step of the innermost
// loop around it, and the inner loops start at 0 when the number of an outer loop changes.
//
// If the State has no such part, the sequence is empty, and Run, Commit and the other methods that
// return an error return one that names the part.
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

// count counts the step of the body, unless it has been counted already.
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

// number returns the live value of a part. If the part is not an int, it returns nil and makes the
// state unusable.
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
