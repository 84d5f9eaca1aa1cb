package follow

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// View is what a job has done until the last [View.Look].
type View struct {
	Lines  []steplog.Line
	Events []Event
	// Step is the last step of any worker. Stepped is the time of the Look that found it, or that
	// found a worker entering a world.
	Step    int
	Stepped time.Time
	// Generation is the generation of the newest world in the steplog, Size is its size, and Ranks
	// are the ranks of its workers that have written a line after the world's sync, by process.
	Generation uint64
	Size       int
	Ranks      map[int]int
	// World is the last world_published event.
	World Event
	// Alive are the processes of workers that have started and have not ended, in order of their
	// start. Exits is the number of workers that have ended.
	Alive []int
	Exits int

	steplog     *steplog.Follower[steplog.Line]
	events      *steplog.Follower[Event]
	stepLogPath string
	runID       atomic.Pointer[string]
}

func newView(j Job) *View {
	return &View{
		Stepped: time.Now(), Ranks: make(map[int]int),
		steplog: steplog.Follow[steplog.Line](j.StepLogPath()), events: steplog.Follow[Event](j.EventsPath()),
		stepLogPath: j.StepLogPath(),
	}
}

// Look reads what the job has written since the last call. It does not block.
func (v *View) Look() error {
	lines, err := v.steplog.Next()
	if err != nil {
		return err
	}
	events, err := v.events.Next()
	if err != nil {
		return err
	}
	v.Lines, v.Events = append(v.Lines, lines...), append(v.Events, events...)
	for _, l := range lines {
		if l.Generation > v.Generation {
			v.Generation, v.Size = l.Generation, l.Size
			clear(v.Ranks)
		}
		if l.Generation == v.Generation && !l.Settling {
			v.Ranks[l.PID] = l.Rank
		}
		if l.Step > v.Step || l.Event == steplog.Enter {
			v.Stepped = time.Now()
		}
		v.Step = max(v.Step, l.Step)
	}
	for _, e := range events {
		switch e.Name {
		case "worker_started":
			v.Alive = append(v.Alive, e.PID)
		case "worker_exited":
			v.Alive = slices.DeleteFunc(v.Alive, func(pid int) bool { return pid == e.PID })
			v.Exits++
		case "world_published":
			v.World = e
		}
	}
	return nil
}

// Holders returns the living workers of the newest world in the steplog, by rank: they have the
// job's state.
func (v *View) Holders() []int { return v.living(v.Ranks) }

// Members returns the living workers of the newest world in the events, by rank.
func (v *View) Members() []int {
	ranks := make(map[int]int)
	for _, slot := range v.World.Slots {
		ranks[slot.PID] = slot.Rank
	}
	return v.living(ranks)
}

func (v *View) living(ranks map[int]int) []int {
	pids := slices.DeleteFunc(slices.Clone(v.Alive), func(pid int) bool { _, ok := ranks[pid]; return !ok })
	slices.SortFunc(pids, func(a, b int) int { return ranks[a] - ranks[b] })
	return pids
}

// RunID returns the job's id; empty if no worker has written a line. It is safe for concurrent use.
func (v *View) RunID() string {
	if id := v.runID.Load(); id != nil {
		return *id
	}
	lines, _ := steplog.Follow[steplog.Line](v.stepLogPath).Next() // Look reports errors
	if len(lines) == 0 {
		return ""
	}
	v.runID.Store(&lines[0].Run)
	return lines[0].Run
}

// Count returns the number of events with the name.
func (v *View) Count(name job.EventName) int { return Count(v.Events, name) }
