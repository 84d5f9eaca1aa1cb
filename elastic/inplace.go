package elastic

import "github.com/hvdrun/hvdrun/elastic/internal/snapshot"

// In a state with Steps, tensors change in apply alone, and nobody goes back to a commit once all
// have the averages of the step after it. So a commit of such a state need not be copied: it lies
// in place, in the tensors themselves, until the next apply. It is copied where it has to outlast
// that: when another worker takes it, and when a sync is about to write to the tensors.

// inPlace is what a State knows of commits that lie in place.
type inPlace struct {
	used   bool // saves lie in place, but for those before others write to the tensors
	copies bool // the memory of copies was not given back since
}

// savesInPlace reports whether the next save can lie in place.
func (s *State) savesInPlace() bool {
	return s.steps != nil && s.steps.applyIsCalm() && s.mayLieInPlace()
}

// mayLieInPlace reports whether saves can lie in place once apply is known to be calm.
func (s *State) mayLieInPlace() bool {
	return s.checkpoints == nil && s.replayable() && !s.parts.anyWatched()
}

// waitsForCalm reports whether saves are copied only until apply is known to be calm. Any goroutine
// may call it.
func (s *State) waitsForCalm() bool { return s.steps.applyIsUnknown() && s.mayLieInPlace() }

// laysOut prepares the sources of a save for lying in place, or for being copied.
func (s *State) laysOut(inPlace bool) {
	s.inPlace.used = s.inPlace.used && s.steps.applyIsCalm()
	if !inPlace {
		return
	}
	s.parts.inMemory(func(i, j int, live []byte) {
		s.saved.sources[s.parts.first[i]+j] = snapshot.Source{Bytes: live, InPlace: true}
	})
	if !s.inPlace.used {
		s.inPlace.used, s.inPlace.copies = true, true
		s.watch.end() // nothing is compared any more
	}
}

// giveBack gives back the memory of earlier commits once a save lies in place.
func (s *State) giveBack() {
	if s.inPlace.copies && s.saved.InPlace() {
		s.inPlace.copies = false
		s.saved.Trim()
	}
}

// vacate ends a save that lies in place, before the tensors change.
func (s *State) vacate() {
	if s.saved.Vacate() {
		s.saved.mark = snapshotID{}
	}
}

// secure copies a save that lies in place, before others write to the tensors. One of a worker that
// has not been in a world is dropped instead: nobody needs it, and copying it takes long.
func (s *State) secure() error {
	if !s.saved.InPlace() {
		return nil
	}
	if !s.holds {
		s.vacate()
		s.saved.Abandon()
		return nil
	}
	mark := s.saved.mark
	if err := s.saveAs(s.saved.Last().Number(), false); err != nil {
		return err
	}
	s.saved.mark = mark
	return nil
}
