package jobrun

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/collective/timeline"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/driver/job"
)

// tracks writes the driver's part of a timeline: the job's events, the parts of its resets, and
// tasks. Nil ones write nothing.
type tracks struct{ file *timeline.Driver }

// openTracks opens the driver's file of --timeline-filename, if that is given. A job whose driver
// cannot write one goes on without it: the folder may be on the workers' hosts alone.
func openTracks(s *settings.Settings, log logrus.FieldLogger) *tracks {
	if s.Tuning.TimelineFilename == "" {
		return nil
	}
	file, err := timeline.OpenDriver(timeline.Config{
		Filename: s.Tuning.TimelineFilename, RunID: s.RunID, Shared: s.Tuning.ShareOutput, Log: log,
	})
	if err != nil {
		log.WithError(err).Warnf("%s: there is no timeline of the driver", s.Origin("timeline-filename"))
		return nil
	}
	return &tracks{file}
}

func (t *tracks) event(e job.Event) {
	if t == nil {
		return
	}
	args, err := json.Marshal(e)
	if err != nil {
		args = nil // a mark without fields
	}
	t.file.Mark(e.Time, string(e.Name), args)
}

func (t *tracks) trace(trace driver.Trace) {
	if t == nil {
		return
	}
	for _, s := range trace.Spans {
		row := "driver"
		if s.Host != "" {
			row = fmt.Sprintf("%s:%d %s", s.Host, s.Slot, s.Role)
		}
		t.file.Slice(row, s.Name, s.Start, s.End, trace.Generation)
	}
}

// leastTask is how long a task runs that is in the timeline: those that many workers run one after
// the other in less time would displace the rest.
const leastTask = time.Millisecond

// task writes what a worker has run, in a row of the worker's.
func (t *tracks) task(worker, function string, began, ended time.Time) {
	if ended.Sub(began) >= leastTask {
		t.file.Slice("tasks "+worker, function, began, ended, 0)
	}
}

func (t *tracks) close() {
	if t != nil {
		t.file.Close()
	}
}

// outlets are where it is written what happens to a job.
type outlets struct {
	events *eventFile
	traces *traceExport
	tracks *tracks
	story  *story
}

func openOutlets(s *settings.Settings, env []string, log logrus.FieldLogger) (o outlets, err error) {
	if o.traces, err = openTraces(s, env, log); err != nil {
		return o, err
	}
	o.tracks, o.story = openTracks(s, log), newStory(s, log)
	o.events, err = openEvents(s, log)
	return o, err
}

// attach has the driver write to them.
func (o outlets) attach(cfg *driver.Config) {
	cfg.Events = func(e job.Event) {
		o.events.write(e)
		o.tracks.event(e)
		o.story.event(e)
	}
	if o.traces != nil || o.tracks != nil {
		cfg.Traces = func(t driver.Trace) {
			o.traces.write(t)
			o.tracks.trace(t)
		}
	}
}

// close writes what waits: to the events file as long as that takes anything within the patience.
func (o outlets) close(patience time.Duration, log logrus.FieldLogger) {
	o.story.close()
	o.tracks.close()
	if err := o.traces.close(); err != nil {
		log.Warnf("the last traces are not exported: %v", err)
	}
	if err := o.events.close(patience); err != nil {
		log.WithError(err).Error("the events file may miss events")
	}
}
