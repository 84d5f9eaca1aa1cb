package elastic

import "github.com/hvdrun/hvdrun/elastic/internal/snapshot"

// In a state with Steps, only apply changes tensors, and no rank goes back to a commit once all
// ranks have the averages of the step after it. A commit of such a state therefore need not be
// copied: it lies in place, in the tensors themselves, until the next apply. It is copied only if
// it must outlast that: when another worker takes it, and when a sync is about to write to the
// tensors.

// inPlace is the state of commits that lie in place.
type inPlace struct {
	used   bool // saves lie in place, except those made before others write to the tensors
	copies bool // memory of earlier copies has not been given back yet
}

// savesInPlace reports whether the next save can lie in place.
func (s *State) savesInPlace() bool {
	return s.steps != nil && s.steps.applyIsCalm() && s.mayLieInPlace()
}

// mayLieInPlace reports whether saves can lie in place once apply is known to be calm.
func (s *State) mayLieInPlace() bool {
	return s.checkpoints == nil && s.replayable() && !s.parts.anyWatched()
}

// waitsForCalm reports whether saves are copied only until apply is known to be calm. It is safe
// for concurrent use.
func (s *State) waitsForCalm() bool { return s.steps.applyIsUnknown() && s.mayLieInPlace() }

// laysOut prepares the sources of a save that lies in place or is copied.
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
		s.watch.end() // saves in place compare nothing
	}
}

// giveBack frees the memory of earlier copied commits once a save lies in place.
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

// secure copies a save that lies in place, before others write to the tensors. If the worker has
// not been in a world, secure drops the save instead: nobody needs it, and copying takes long.
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
