// Package dashboardtest provides simulated jobs for tests of programs that show jobs: they answer
// as a driver does, but nothing runs.
package dashboardtest

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// Job is a simulated job. Its methods may be called by several goroutines.
type Job struct {
	mu       sync.Mutex
	status   job.Status
	events   []json.RawMessage
	commands []job.Command
	refuse   string
	err      error
	alone    *rand.Rand
	seq      int
}

// New returns a job whose hosts have trained with slots slots each since begun.
func New(begun time.Time, slots int, hosts ...string) *Job {
	j := &Job{alone: rand.New(rand.NewPCG(1, 2))}
	n := slots * len(hosts)
	j.status = job.Status{
		Job: "26a4bfccb49cce88", Time: begun, Driver: 20590, State: job.Running, Since: begun, Begun: begun, Last: begun, Generation: 0, Size: n,
		NP: n, MinNP: max(1, n/4), MaxNP: 2 * n, Elastic: true, Waits: []job.Wait{},
	}
	for i, name := range hosts {
		h := job.Host{Host: name, Listed: true}
		for s := range slots {
			rank := i*slots + s
			h.Slots = append(h.Slots, job.Slot{Slot: s, State: job.SlotTraining, Rank: &rank, PID: 20600 + rank, Commits: new(uint64(1))})
		}
		j.status.Hosts = append(j.status.Hosts, h)
	}
	return j
}

// Status returns a copy of the status.
func (j *Job) Status(context.Context) (job.Status, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err != nil {
		return job.Status{}, j.err
	}
	s := j.status
	text, err := json.Marshal(s)
	if err == nil {
		s = job.Status{}
		err = json.Unmarshal(text, &s)
	}
	s.Events = append([]json.RawMessage{}, j.events[max(0, len(j.events)-20):]...)
	return s, err
}

// Command records the command, and changes the slots as a driver would.
func (j *Job) Command(_ context.Context, c job.Command) (string, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.commands = append(j.commands, c)
	if j.refuse != "" {
		return "", &job.RefusedError{Reason: j.refuse}
	}
	out := map[job.Verb]job.SlotState{job.Drain: job.SlotDrained, job.Exclude: job.SlotHeld}[c.Verb]
	for hi := range j.status.Hosts {
		h := &j.status.Hosts[hi]
		for si := range h.Slots {
			s := &h.Slots[si]
			if h.Host != c.Host || c.Slot != nil && *c.Slot != s.Slot {
				continue
			}
			*s = job.Slot{Slot: s.Slot, State: job.SlotFree, Out: out}
			if out != "" {
				s.State = out
			}
		}
	}
	if c.MinNP != nil {
		j.status.MinNP = *c.MinNP
	}
	if c.MaxNP != nil {
		j.status.MaxNP = *c.MaxNP
	}
	if c.Verb == job.Stop {
		j.status.State = job.Stopping
	}
	return fmt.Sprintf("%s is done", c.Verb), nil
}

// Commands returns the commands so far.
func (j *Job) Commands() []job.Command {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]job.Command{}, j.commands...)
}

// Refuse makes the job refuse all commands; "" ends that.
func (j *Job) Refuse(why string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.refuse = why
}

// Fail makes Status return an error; nil ends that.
func (j *Job) Fail(err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.err = err
}

// Change changes the status.
func (j *Job) Change(change func(*job.Status)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	change(&j.status)
}

// Pass advances the time by d, in which each training worker makes that many commits.
func (j *Job) Pass(d time.Duration, commits uint64) {
	j.Change(func(s *job.Status) {
		s.Time = s.Time.Add(d)
		s.Goodput = Goodput(s.Time.Sub(s.Begun), s.Goodput)
		for hi := range s.Hosts {
			for si := range s.Hosts[hi].Slots {
				if slot := &s.Hosts[hi].Slots[si]; slot.Commits != nil {
					slot.Commits = new(*slot.Commits + commits)
				}
			}
		}
	})
}

// Goodput returns the goodput of a job that took the time whole: it spent the given parts, and has
// trained for the rest.
func Goodput(whole time.Duration, parts job.Goodput) job.Goodput {
	g := job.Goodput{Seconds: whole.Seconds(), StalledBy: parts.StalledBy}
	rest := g.Seconds
	for _, p := range job.Parts() {
		spent := job.Spent{Part: p}
		if p != job.PartTraining {
			spent.Seconds = parts.Of(p)
		}
		rest -= spent.Seconds
		g.Parts = append(g.Parts, spent)
	}
	g.Parts[0].Seconds = rest // training is the first
	return g
}

// Stir changes the state of n random slots.
func (j *Job) Stir(n int) {
	j.Change(func(s *job.Status) {
		for range n {
			h := &s.Hosts[j.alone.IntN(len(s.Hosts))]
			slot := &h.Slots[j.alone.IntN(len(h.Slots))]
			slot.State = []job.SlotState{job.SlotTraining, job.SlotLeaving, job.SlotStarting, job.SlotFree}[j.alone.IntN(4)]
		}
	})
}

// Tell adds an event at a time, with fields as pairs of names and values, as the job's last event.
func (j *Job) Tell(at time.Time, name job.EventName, fields ...any) {
	e := job.Event{Time: at, Name: name}
	for i := 0; i < len(fields); i += 2 {
		e.Fields = append(e.Fields, job.Field{Key: fields[i].(string), Value: fields[i+1]})
	}
	text, err := json.Marshal(e)
	if err != nil {
		panic(err) // the test passed a value that JSON cannot encode
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.events = append(j.events, text)
	j.status.Last, j.status.Time = at, at
}

// World publishes a generation of that size, whose first commit follows after d.
func (j *Job) World(at time.Time, size int, d time.Duration, commits uint64) {
	j.Change(func(s *job.Status) {
		s.Generation++
		s.Size = size
		if s.Generation > 1 {
			s.Resets++
		}
		j.seq = int(s.Generation)
	})
	j.Tell(at, job.WorldPublished, "generation", j.seq, "size", size, "root", 0)
	j.Tell(at.Add(d), job.FirstCommit, "generation", j.seq, "commits", commits, "cause", "growth", "seconds", d.Seconds())
}

// Events returns all events, as in an events file.
func (j *Job) Events() ([]json.RawMessage, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]json.RawMessage{}, j.events...), nil
}
