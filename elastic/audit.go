package elastic

import (
	"context"
	"sync"
)

// backgroundAudit is the size of the tensors, in bytes, from which on their checksums are computed
// in the background of training.
const backgroundAudit = 4 << 20

// audits are the comparisons of the states after syncs.
type audits struct {
	due     *audit         // of the last sync, until the ranks have compared the checksums; nil: none
	running sync.WaitGroup // computes checksums
}

// audit is the comparison of the ranks' states after a sync. The checksums are computed in the
// background and compared at the first commit for which all ranks have finished. The audit of a
// later sync replaces it.
type audit struct {
	root int // the sync root
	done chan struct{}
	sums [][]uint32 // valid when done is closed
	err  error

	word []uint64 // the reduced words
}

// beginAudit compares the states after a sync, or starts to do so in the background.
func (s *State) beginAudit(ctx context.Context, root int) error {
	if s.worker.verification.every < 0 {
		return nil
	}
	size := 0
	s.parts.inMemory(func(_, _ int, live []byte) { size += len(live) })
	if size < backgroundAudit {
		return s.verify(ctx, root)
	}
	a := &audit{root: root, done: make(chan struct{})}
	s.audits.due = a
	held := s.saved.Hold()
	s.audits.running.Go(func() {
		defer close(a.done)
		defer held.Release()
		a.sums, a.err = s.parts.sums(held, true)
	})
	return nil
}

// fill sets the three words of this rank for the reduction: whether it is not ready yet, and its
// digest.
func (a *audit) fill(word []uint64) {
	a.word = word
	select {
	case <-a.done:
		sum := digestOf(a.sums)
		word[0], word[1], word[2] = 0, sum, ^sum
	default:
		word[0], word[1], word[2] = 1, 0, 0
	}
}

// compareAudited evaluates the reduced words of the preceding agreement.
func (s *State) compareAudited() error {
	a := s.audits.due
	if a == nil || a.word[0] != 0 {
		return nil
	}
	s.audits.due = nil
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
	diverged, _, err := s.parts.locate(s.ctx, g, a.sums)
	if err != nil {
		return err
	}
	if !s.worker.verification.heal {
		return diverged
	}
	return s.heal(s.ctx, g, a.root, diverged, " since the last sync", false)
}
