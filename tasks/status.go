package tasks

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/report"
)

// Status is the scheduler's status: tasks by function, with the reasons why they wait, and workers.
type Status = report.Status

// inquiries are the questions of users that the scheduler has not answered.
type inquiries struct {
	asked  []chan<- []byte // waiting for the status
	wonder []question
}

// Status asks the scheduler for its status.
func (p *Pool) Status(ctx context.Context) (s Status, err error) {
	answer := make(chan []byte, 1)
	p.mu.Lock()
	if err := p.failed; err != nil {
		p.mu.Unlock()
		return s, err
	}
	p.asked = append(p.asked, answer)
	p.send(nil, func(m *taskspb.ToTasks) { m.Status = true })
	p.mu.Unlock()
	text, err := p.answer(ctx, answer)
	if err == nil {
		if err = json.Unmarshal(text, &s); err != nil {
			err = fmt.Errorf("tasks: the scheduler's status: %w", err)
		}
	}
	return s, err
}

// answer waits for the answer to a question.
func (p *Pool) answer(ctx context.Context, to <-chan []byte) ([]byte, error) {
	select {
	case text, ok := <-to:
		if !ok {
			return nil, p.Err()
		}
		return text, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// end closes all questions without an answer.
func (i *inquiries) end() {
	for _, c := range i.asked {
		close(c)
	}
	for _, w := range i.wonder {
		close(w.answer)
	}
	i.asked, i.wonder = nil, nil
}

// answered passes the scheduler's answer to those who have asked.
func (p *Pool) answered(text []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.asked {
		c <- text
	}
	p.asked = nil
}

// Explanation describes the state of a task and the reason for it.
type Explanation = report.Explanation

// question is a request for explanations.
type question struct {
	what   string
	answer chan<- []byte
}

// Explain asks the scheduler why tasks do not run. what is a number, which selects at most one task
// of each client, or the name of a function, which selects its unfinished tasks. It returns at most
// 20 explanations.
func (p *Pool) Explain(ctx context.Context, what string) (all []Explanation, err error) {
	if !isName(what) {
		return nil, fmt.Errorf("tasks: %.20q… is not the name of a function", what)
	}
	answer := make(chan []byte, 1)
	p.mu.Lock()
	if err := p.failed; err != nil {
		p.mu.Unlock()
		return nil, err
	}
	p.wonder = append(p.wonder, question{what, answer})
	p.send(&taskspb.ToTasks{Explain: []string{what}}, func(m *taskspb.ToTasks) { m.Explain = append(m.Explain, what) })
	p.mu.Unlock()
	text, err := p.answer(ctx, answer)
	if err == nil {
		if err = json.Unmarshal(text, &all); err != nil {
			err = fmt.Errorf("tasks: the scheduler's explanation: %w", err)
		}
	}
	return all, err
}

// explained passes answers to those who have asked, in the order of the questions.
func (p *Pool) explained(texts [][]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := min(len(texts), len(p.wonder))
	for i, text := range texts[:n] {
		p.wonder[i].answer <- bytes.Clone(text)
	}
	p.wonder = p.wonder[n:]
}
