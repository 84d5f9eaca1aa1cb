package ledger

import (
	"maps"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Saved is a Ledger in a journal. Durations are in nanoseconds.
type Saved struct {
	Begun time.Time                  `json:"begun"`
	At    time.Time                  `json:"at"`
	Part  job.Part                   `json:"part"`
	By    *savedBy                   `json:"by,omitempty"`
	Spent map[job.Part]time.Duration `json:"spent"`
	Owed  []savedDebt                `json:"owed,omitempty"`
	Held  []savedBy                  `json:"held,omitempty"`
	Ended bool                       `json:"ended,omitempty"`
}

type (
	savedBy struct {
		Host string        `json:"host"`
		Slot int           `json:"slot,omitempty"`
		Long time.Duration `json:"long,omitempty"`
	}
	savedDebt struct {
		Part job.Part `json:"part"`
		savedBy
	}
)

// Save returns the state of l; nil if it has not begun.
func (l *Ledger) Save() *Saved {
	if l.begun.IsZero() {
		return nil
	}
	s := &Saved{Begun: l.begun, At: l.at, Part: l.part, Spent: maps.Clone(l.spent), Ended: l.ended}
	if l.by != (plan.SlotID{}) {
		s.By = &savedBy{Host: l.by.Host, Slot: l.by.Index}
	}
	for _, d := range l.owed {
		s.Owed = append(s.Owed, savedDebt{d.part, savedBy{d.by.Host, d.by.Index, d.long}})
	}
	for _, h := range l.held {
		s.Held = append(s.Held, savedBy{h.slot.Host, h.slot.Index, h.long})
	}
	return s
}

// Load returns the ledger; nil: one that has not begun.
func (s *Saved) Load() (l Ledger) {
	if s == nil {
		return l
	}
	l = Ledger{begun: s.Begun, at: s.At, part: s.Part, spent: map[job.Part]time.Duration{}, ended: s.Ended}
	maps.Copy(l.spent, s.Spent)
	if s.By != nil {
		l.by = plan.SlotID{Host: s.By.Host, Index: s.By.Slot}
	}
	for _, d := range s.Owed {
		l.owed = append(l.owed, debt{d.Part, plan.SlotID{Host: d.Host, Index: d.Slot}, d.Long})
	}
	for _, h := range s.Held {
		l.held = append(l.held, held{plan.SlotID{Host: h.Host, Index: h.Slot}, h.Long})
	}
	return l
}
