package jobrun

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/collective/timeline"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// tracks writes the driver's part of a timeline: the job's events, the parts of its resets, and
// tasks.
type tracks struct{ file *timeline.Driver }

// writeTimeline writes the driver's part of the timeline, if the settings request one.
func writeTimeline(_ context.Context, r *run) (stop func(), err error) {
	if r.tracks = openTracks(r.settings, r.log); r.tracks == nil {
		return nil, nil
	}
	r.events = append(r.events, r.tracks.event)
	r.traces = append(r.traces, r.tracks.trace)
	return func() { r.tracks.file.Close() }, nil
}

// openTracks opens the driver's file of --timeline-filename, if that is set. If the file cannot be
// opened, the job runs without it: the folder may exist only on the workers' hosts.
func openTracks(s *settings.Settings, log logrus.FieldLogger) *tracks {
	if s.Tuning.TimelineFilename == "" {
		return nil
	}
	file, err := timeline.OpenDriver(timeline.Config{
		Filename: s.Tuning.TimelineFilename, RunID: s.RunID, Shared: s.Tuning.ShareOutput, Log: log,
	})
	if err != nil {
		log.WithError(safefile.Explain(err)).Warnf("%s: there is no timeline of the driver", s.Origin("timeline-filename"))
		return nil
	}
	return &tracks{file}
}

func (t *tracks) event(e job.Event) {
	args, err := json.Marshal(e)
	if err != nil {
		args = nil // a mark without fields
	}
	t.file.Mark(e.Time, string(e.Name), args)
}

func (t *tracks) trace(trace driver.Trace) {
	for _, s := range trace.Spans {
		row := "driver"
		if s.Host != "" {
			row = fmt.Sprintf("%s:%d %s", s.Host, s.Slot, s.Role)
		}
		t.file.Slice(row, s.Name, s.Start, s.End, trace.Generation)
	}
}

// leastTask is the least duration of a task in the timeline: many shorter tasks would displace
// everything else.
const leastTask = time.Millisecond

// task writes a task that a worker has run, in the worker's row.
func (t *tracks) task(worker, function string, began, ended time.Time) {
	if ended.Sub(began) >= leastTask {
		t.file.Slice("tasks "+worker, function, began, ended, 0)
	}
}
