package tasks

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// Status is what the scheduler has: tasks by function, with why they wait, and workers.
type Status = queue.Status

// Status asks the scheduler how it is doing.
func (p *Pool) Status(ctx context.Context) (s Status, err error) {
	answer := make(chan []byte, 1)
	p.mu.Lock()
	if err := p.failed; err != nil {
		p.mu.Unlock()
		return s, err
	}
	p.asked = append(p.asked, answer)
	p.send(8, func(m *wire.ToTasks) { m.Status = true })
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
