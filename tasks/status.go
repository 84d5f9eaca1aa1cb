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

// inquiries are what people have asked the scheduler, and have no answer to.
type inquiries struct {
	asked  []chan<- []byte // for the status
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
	select {
	case text := <-answer:
		if err := json.Unmarshal(text, &s); err != nil {
			return s, fmt.Errorf("tasks: the scheduler's status: %w", err)
		}
		return s, nil
	case <-ctx.Done():
		return s, ctx.Err()
	}
}

// answered gives the scheduler's answer to those who have asked.
func (p *Pool) answered(text []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.asked {
		c <- text
	}
	p.asked = nil
}

// Explanation gives the state of a task, and the reason.
type Explanation = report.Explanation

// question asks for explanations.
type question struct {
	what   string
	answer chan<- []byte
}

// Explain asks the scheduler why tasks do not run. It selects the tasks with a number, one for each
// client at most, or the unfinished tasks of a function. It returns at most 20.
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
	select {
	case text := <-answer:
		if err := json.Unmarshal(text, &all); err != nil {
			return nil, fmt.Errorf("tasks: the scheduler's explanation: %w", err)
		}
		return all, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// explained gives answers to those who have asked, in the order in which they did.
func (p *Pool) explained(texts [][]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := min(len(texts), len(p.wonder))
	for i, text := range texts[:n] {
		p.wonder[i].answer <- bytes.Clone(text)
	}
	p.wonder = p.wonder[n:]
}
