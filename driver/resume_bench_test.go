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

	"github.com/hvdrun/hvdrun/driver/journal"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// BenchmarkResume measures how long another driver takes to make the machine of a job of eight
// workers, one of which has died again and again, by how many events the job has had.
func BenchmarkResume(b *testing.B) {
	for _, events := range []int{10, 1000, 4000, 100_000} {
		b.Run(fmt.Sprint(events), func(b *testing.B) {
			path := longJob(b, events)
			fi, err := os.Stat(path)
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				p := &replay{}
				j, _, err := journal.Open(path, p.next)
				if err != nil {
					b.Fatal(err)
				}
				if len(p.m.workers) < 7 {
					b.Fatalf("%d workers", len(p.m.workers))
				}
				j.Close()
			}
			b.ReportMetric(float64(fi.Size())/(1<<10), "KiB")
		})
	}
}

// longJob returns the journal of a job that has had so many events.
func longJob(b *testing.B, events int) string {
	log := logrus.New()
	log.SetOutput(io.Discard)
	cfg, err := Config{
		Command: []string{"x"}, Source: noSource{}, Log: log, Size: Size{NP: 8, Min: 1, Elastic: true},
		Journal: filepath.Join(b.TempDir(), "journal"),
	}.withDefaults()
	if err != nil {
		b.Fatal(err)
	}
	l := newLoop(cfg)
	l.job = jobRecord{Version: recordVersion, Size: cfg.Size, Blame: cfg.Blame, Timeouts: cfg.Timeouts}
	if err := l.book.begin(cfg, l.job); err != nil {
		b.Fatal(err)
	}
	now, n := time.Unix(0, 0).UTC(), 0
	step := func(ev event) {
		if n++; n > events {
			return
		}
		actions := l.m.step(now, ev)
		r := newRecord(now, ev, l.book.ids)
		l.book.ids = nil
		l.book.write(r, false)
		for _, a := range actions {
			if e, ok := a.(emitEvent); ok {
				l.recent.add(e.event)
			}
		}
		l.tidy()
	}
	step(hostsFound{[]plan.Host{{Name: "node-with-a-name-1", Slots: 4}, {Name: "node-with-a-name-2", Slots: 4}}})
	for commits := uint64(0); n < events; commits++ {
		for _, w := range l.m.workers {
			if w.phase == starting {
				step(workerForked{w.id, 4711})
			}
		}
		for _, w := range l.m.workers {
			step(workerJoined{w.id, rendezvous.Joining{
				After: w.generation, Commits: commits, HoldsState: commits > 0,
				DataAddrs: []string{"10.0.0.1:40001", "192.168.0.1:40001"}, NotifyAddr: "10.0.0.1:40002",
			}})
		}
		w := l.m.workers[0]
		step(workerReport{w.id, rendezvous.Committed, w.generation, commits + 1})
		now = now.Add(time.Hour) // all exclusions have decayed
		step(workerEnded{l.m.workers[len(l.m.workers)-1].id, Exit{Code: 137, Signal: syscall.SIGKILL}})
		now = now.Add(2 * time.Second)
		step(deadlinePassed{})
	}
	l.book.close(true)
	return cfg.Journal
}
