package main

import (
	"context"
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// microbatches trains with elastic.Steps. The sums of its gradients depend on their order, and the
// weights on every earlier sum: they have the same bits at the end only if every microbatch of
// every step was used once, in the order of the numbers.
type microbatches struct {
	*training
	steps   *elastic.Steps[float32]
	logged  uint64 // generation of the last line
	synced  uint64 // generation of the world that this process has last synchronised with
	applied int    // the last step that this process has applied; -1: none
}

func newMicrobatches(t *training) *microbatches {
	m := &microbatches{training: t, applied: -1}
	m.steps = elastic.NewSteps[float32](t.worker, elastic.StepsOptions{
		Microbatches: t.set.microbatches, Seed: 1, Balance: t.set.balance,
	}, len(t.weights), t.set.microbatches)
	return m
}

func (m *microbatches) train(ctx context.Context) error {
	m.synced = m.worker.Generation()
	if m.logged == 0 {
		m.applied = -1 // steps of others that this process has applied do not count
	}
	for m.at.Step < m.set.steps {
		if err := m.set.faults.at("step", m.at.Step); err != nil {
			return err
		}
		m.chat()
		if err := m.steps.Step(ctx, m.backward, m.apply); err != nil {
			return err
		}
	}
	return nil
}

// enter records that this process has entered a world.
func (m *microbatches) enter() error {
	if m.logged == m.worker.Generation() {
		return nil
	}
	m.logged = m.worker.Generation()
	if err := m.checkBallast(); err != nil {
		return err
	}
	return m.record(m.line(steplog.Enter))
}

// record writes the line. A world that settles a step applies it before its sync.
func (m *microbatches) record(l steplog.Line) error {
	l.Settling = m.synced != l.Generation
	return m.write(l)
}

func (m *microbatches) backward(b elastic.Micro[float32]) error {
	if err := m.enter(); err != nil {
		return err
	}
	time.Sleep(m.set.stepTime / time.Duration(m.set.microbatches)) // simulates computation
	noise := b.Rand()
	shift := noise.Float32()
	for i := range b.Gradient[0] {
		b.Gradient[0][i] += m.weights[i]*0.1 - shift/float32(i+b.Index+1)
	}
	b.Gradient[1][b.Index]++
	return nil
}

func (m *microbatches) apply(mean [][]float32) error {
	if err := m.enter(); err != nil {
		return err
	}
	for i, n := range mean[1] {
		if n*float32(len(mean[1])) != 1 {
			return fmt.Errorf("step %d has microbatch %d %v times", m.at.Step, i, n*float32(len(mean[1])))
		}
	}
	next := m.at.Step + 1
	if next <= m.applied {
		return fmt.Errorf("step %d is applied after step %d", next, m.applied)
	}
	for i, g := range mean[0] {
		m.weights[i] -= g
	}
	m.changeBallast(next)
	m.at.Step, m.at.Chain, m.applied = next, steplog.Chain(m.at.Chain, next), next
	if m.worker.Generation() == 0 { // a spare applies the steps of the members
		return nil
	}
	l := m.line(steplog.Step)
	l.Outcome = steplog.OK
	return m.record(l)
}
