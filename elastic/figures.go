package elastic

import (
	"fmt"
	"slices"
	"sync"

	"github.com/hvdrun/hvdrun/internal/line"
)

// figures are the newest numbers that the program has reported.
type figures struct {
	mu  sync.Mutex
	all []line.Figure
}

// Report reports a number of the program, such as its loss, to the driver. The worker's heartbeats
// carry the newest value of each name, about once a second, to the page, the status and the metrics
// of the job. Report does not block and is safe for concurrent use.
//
// A name consists of 1 to 32 of the characters a-z, A-Z, 0-9, '+', '-', '.' and '_', and a worker
// may use 16 names. Otherwise Report returns an error and reports nothing.
func (w *Worker) Report(name string, value float64) error {
	f := &w.doing.figures
	f.mu.Lock()
	defer f.mu.Unlock()
	var err error
	if f.all, err = line.SetFigure(f.all, line.Figure{Name: name, Value: value}); err != nil {
		return fmt.Errorf("elastic: Report: %w", err)
	}
	return nil
}

func (f *figures) list() []line.Figure {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.all)
}
