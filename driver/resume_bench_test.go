package driver

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// BenchmarkResume measures how another driver restores the machine of a job of eight workers, one
// of which dies repeatedly, by the job's number of events.
func BenchmarkResume(b *testing.B) {
	for _, events := range []int{10, 1000, 4000, 100_000} {
		b.Run(fmt.Sprint(events), func(b *testing.B) {
			path := longJob(b, events)
			fi, err := os.Stat(path)
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				p := &decide.Replay{}
				j, _, err := journal.Open(path, p.Next)
				if err != nil {
					b.Fatal(err)
				}
				if len(p.Machine.Incarnations()) < 7 {
					b.Fatalf("%d workers", len(p.Machine.Incarnations()))
				}
				j.Close()
			}
			b.ReportMetric(float64(fi.Size())/(1<<10), "KiB")
		})
	}
}

// longJob returns the path of the journal of a job with this number of events.
func longJob(b *testing.B, events int) string {
	log := logrus.New()
	log.SetOutput(io.Discard)
	cfg, err := Config{
		Command: []string{"x"}, Source: noSource{}, Log: log, Size: job.Size{NP: 8, Min: 1, Elastic: true},
		Journal: filepath.Join(b.TempDir(), "journal"),
	}.withDefaults()
	if err != nil {
		b.Fatal(err)
	}
	l := newLoop(cfg)
	l.job = decide.JobRecord{Version: decide.JournalVersion, Size: cfg.Size, Blame: cfg.Blame, Timeouts: cfg.Timeouts}
	if err := l.writer.begin(cfg, l.job); err != nil {
		b.Fatal(err)
	}
	now, n := time.Unix(0, 0).UTC(), 0
	var alive []string // incarnations, in order of start
	generation := uint64(0)
	step := func(in decide.Input) {
		if n++; n > events {
			return
		}
		actions := l.m.Step(now, in)
		r := decide.NewRecord(now, in, l.writer.ids)
		l.writer.ids = nil
		l.writer.write(r, false)
		for _, a := range actions {
			switch a := a.(type) {
			case decide.EmitEvent:
				l.recent.Add(a.Event)
			case decide.StartWorker:
				alive = append(alive, a.ID)
			case decide.PublishWorld:
				generation = a.World.Generation
			}
		}
		l.tidy()
	}
	step(decide.HostsFound{Hosts: []plan.Host{{Name: "node-with-a-name-1", Slots: 4}, {Name: "node-with-a-name-2", Slots: 4}}})
	forked := 0
	for commits := uint64(0); n < events; commits++ {
		for _, id := range alive[forked:] {
			step(decide.WorkerForked{ID: id, PID: 4711})
		}
		after := generation
		for _, id := range alive {
			step(decide.WorkerJoined{ID: id, Join: decide.Join{
				After: after, Commits: commits, HoldsState: commits > 0,
				DataAddrs: []string{"10.0.0.1:40001", "192.168.0.1:40001"},
			}})
		}
		step(decide.WorkerReported{ID: alive[0], Report: decide.ReportCommitted, Generation: generation, Commits: commits + 1})
		now = now.Add(time.Hour) // all exclusions have decayed
		last := alive[len(alive)-1]
		alive = alive[:len(alive)-1]
		forked = len(alive)
		step(decide.WorkerEnded{ID: last, Exit: job.Exit{Code: 137, Signal: syscall.SIGKILL}})
		now = now.Add(2 * time.Second)
		step(decide.DeadlinePassed{})
	}
	l.writer.k.Close()
	return cfg.Journal
}
