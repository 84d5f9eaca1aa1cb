package tasks

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/report"
)

// Status is the scheduler's status: tasks by function, with the reasons why they wait, and workers.
type Status = report.Status

// question is a question of a user that the scheduler has not answered.
type question struct {
	status bool   // it asks for the status
	what   string // otherwise: the tasks to explain
	answer chan<- []byte
}

// ask adds the question to a message.
func (q question) ask(m *taskspb.ToTasks) {
	if q.status {
		m.Status = true
	} else {
		m.Explain = append(m.Explain, q.what)
	}
}

// inquire asks the scheduler a question, and decodes the answer into to.
func (p *Pool) inquire(ctx context.Context, q question, to any) error {
	answer := make(chan []byte, 1)
	q.answer = answer
	p.mu.Lock()
	if err := p.failed; err != nil {
		p.mu.Unlock()
		return err
	}
	p.questions = append(p.questions, q)
	p.send(&taskspb.ToTasks{Explain: []string{q.what}}, q.ask)
	p.mu.Unlock()
	select {
	case text, ok := <-answer:
		if !ok {
			return p.Err()
		}
		if err := json.Unmarshal(text, to); err != nil {
			return fmt.Errorf("tasks: the scheduler's answer: %w", err)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// answered passes the answers in a message to those who have asked: a status to all who wait for
// one, explanations in the order of the questions. The caller holds the lock.
func (p *Pool) answered(m *taskspb.FromTasks) {
	explained := m.GetExplained()
	p.questions = slices.DeleteFunc(p.questions, func(q question) bool {
		switch {
		case q.status && len(m.GetStatus()) > 0:
			q.answer <- m.GetStatus()
		case !q.status && len(explained) > 0:
			q.answer <- explained[0]
			explained = explained[1:]
		default:
			return false
		}
		return true
	})
}

// Status asks the scheduler for its status.
func (p *Pool) Status(ctx context.Context) (s Status, err error) {
	err = p.inquire(ctx, question{status: true}, &s)
	return s, err
}

// Explanation describes the state of a task and the reason for it.
type Explanation = report.Explanation

// Explain asks the scheduler why tasks do not run. what is a number, which selects at most one task
// of each client, or the name of a function, which selects its unfinished tasks. It returns at most
// 20 explanations.
func (p *Pool) Explain(ctx context.Context, what string) (all []Explanation, err error) {
	if !isName(what) {
		return nil, fmt.Errorf("tasks: %.20q… is not the name of a function", what)
	}
	err = p.inquire(ctx, question{what: what}, &all)
	return all, err
}
