package agent

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/internal/wire/agentpb"
)

// maxLines is the maximum number of log lines that wait to be sent to the driver; older ones are
// dropped.
const maxLines = 256

// logLines holds the lines that have not been sent to the driver yet.
type logLines struct {
	mu    sync.Mutex
	lines []*agentpb.FromAgent
	wake  wake.Flag // there may be lines to take
}

// Levels implements logrus.Hook.
func (l *logLines) Levels() []logrus.Level { return logrus.AllLevels }

// Fire implements logrus.Hook: it queues a line. It does not block.
func (l *logLines) Fire(e *logrus.Entry) error {
	text := strings.TrimPrefix(e.Message, "agent: ")
	names := make([]string, 0, len(e.Data))
	for name := range e.Data {
		if name != "run" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		text += fmt.Sprintf(" %s=%v", name, e.Data[name])
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines) == maxLines {
		l.lines = slices.Delete(l.lines, 0, 1)
	}
	l.lines = append(l.lines, &agentpb.FromAgent{What: &agentpb.FromAgent_Log{
		Log: &agentpb.Log{Level: uint32(e.Level), Text: "agent: " + strings.ToValidUTF8(text[:min(len(text), 4<<10)], "?")},
	}})
	l.wake.Set()
	return nil
}

// take returns the lines, which the caller has to send.
func (l *logLines) take() (lines []*agentpb.FromAgent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines, l.lines = l.lines, nil
	return lines
}
