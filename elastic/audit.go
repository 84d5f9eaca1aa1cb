package elastic

import (
	"context"
)

// auditAside is the size of the tensors, in bytes, from which on their checksums are computed while
// training goes on.
const auditAside = 4 << 20

// audit is the comparison of what a sync has left on the ranks. The checksums are computed in the
// background, and the first commit to which all ranks come with theirs compares them. Where there
// is another sync before that, its own takes the place of this one.
type audit struct {
	root int // whose state the sync was to make everybody's
	done chan struct{}
	sums [][]uint32 // once done is closed
	err  error

	word []uint64 // what all ranks have said
}

// beginAudit compares what a sync has left, or begins to.
func (s *State) beginAudit(ctx context.Context, root int) error {
	if s.worker.verification.every < 0 {
		return nil
	}
	size := 0
	for _, o := range s.own {
		if m := asInMemory(o); m != nil {
			for _, b := range m.memory() {
				size += len(b)
			}
		}
	}
	if size < auditAside {
		return s.verify(ctx, root)
	}
	a := &audit{root: root, done: make(chan struct{})}
	s.audit = a
	held := s.saved.Hold()
	s.auditing.Go(func() {
		defer close(a.done)
		defer held.Release()
		a.sums, a.err = s.sumsIn(held, true)
	})
	return nil
}

// say puts into three words what is to be reduced: whether this rank is not ready yet, and what it
// has found.
func (a *audit) say(word []uint64) {
	a.word = word
	select {
	case <-a.done:
		sum := digestOf(a.sums)
		word[0], word[1], word[2] = 0, sum, ^sum
	default:
		word[0], word[1], word[2] = 1, 0, 0
	}
}

// compareAudited acts on what all ranks have said in the agreement before it.
func (s *State) compareAudited() error {
	a := s.audit
	if a == nil || a.word[0] != 0 {
		return nil
	}
	s.audit = nil
	if a.err != nil {
		return a.err
	}
	if a.word[1] == ^a.word[2] {
		return nil
	}
	if err := s.settled(); err != nil {
		return err
	}
	g := s.worker.Group()
	diverged, _, err := s.locate(s.ctx, g, a.sums)
	if err != nil {
		return err
	}
	if !s.worker.verification.heal {
		return diverged
	}
	return s.heal(s.ctx, g, a.root, diverged, " since the last sync", false)
}
