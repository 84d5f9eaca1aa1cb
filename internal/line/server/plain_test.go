package server

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/wake"
)

// TestQuiet: quiet is the time since the program last reported something new.
func TestQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		p := &plain{t: &talk{worker: &worker{}}, news: wake.New(), looking: looking{usage: func(int) proc.Usage {
			looks++
			return proc.Usage{Resident: 1}
		}}}
		p.place.Generation = 3
		op := func(number uint64, waiting bool) *operation { return &operation{number, "all_reduce", waiting} }
		for i, step := range []struct {
			beat  beatLine
			phase line.Phase
			quiet time.Duration // a second after the beat
			news  bool
		}{
			{beatLine{Phase: "training", Commits: 1}, line.Training, time.Second, true},
			{beatLine{Phase: "training", Commits: 2}, line.Training, 2 * time.Second, false},
			{beatLine{Phase: "training", Operation: op(1, false), Commits: 2}, line.Training, time.Second, false},
			{beatLine{Phase: "training", Operation: op(1, false), Commits: 2}, line.Training, 2 * time.Second, false},
			{beatLine{Phase: "training", Operation: op(1, true), Commits: 2}, line.Training, time.Second, false},
			{beatLine{Phase: "saving", Commits: 3}, line.Saving, time.Second, true},
			{beatLine{Phase: "saving", Written: 7, Commits: 3}, line.Saving, time.Second, false},
		} {
			p.hearBeat(step.beat)
			news := len(p.news) > 0
			if news {
				<-p.news
			}
			<-time.After(time.Second)
			b, size := p.nextBeat(time.Now())
			if again, _ := p.nextBeat(time.Now()); b.Usage == nil || again.Usage != nil || looks != i+1 {
				t.Errorf("%d: usage %v, and at once again %v, after %d looks", i, b.Usage, again.Usage, looks)
			}
			if b.Phase != step.phase || b.Quiet != step.quiet || news != step.news || b.Generation != 3 || b.Commits != step.beat.Commits || b.Written != step.beat.Written || size != 1 {
				t.Errorf("%d: %+v, news %v", i, b, news)
			}
			if o := step.beat.Operation; o != nil && (len(b.Lanes) != 1 || b.Lanes[0].For != step.quiet || b.Lanes[0].Waiting != o.Waiting) {
				t.Errorf("%d: %+v", i, b.Lanes)
			}
		}
		p.joining = true
		p.setBeat(beatLine{Phase: "joining", Commits: 4})
		p.hearBeat(beatLine{Phase: "training"}) // of the world that it has left
		if b, _ := p.nextBeat(time.Now()); b.Phase != line.Joins || b.Commits != 0 || b.Lanes != nil {
			t.Errorf("%+v", b)
		}
	})
}

// TestPreparing: a program counts as preparing while it reads its lines, for at most ten minutes.
func TestPreparing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reports atomic.Int64
		p := &plain{t: &talk{server: New(Config{Up: func(string, []byte, string) { reports.Add(1) }})}}
		p.t.room = sync.NewCond(&p.t.mu)
		go line.Prepare(t.Context(), p.prepares)
		after := func(d time.Duration, more int64) {
			t.Helper()
			before := reports.Load()
			<-time.After(d)
			synctest.Wait()
			if got := reports.Load() - before; got != more {
				t.Errorf("%d reports in %v, want %d", got, d, more)
			}
		}
		synctest.Wait()
		after(10*time.Second, 10)
		for range mostWaiting {
			p.t.complain("not read")
		}
		after(10*time.Second, 0)
		p.t.mu.Lock()
		p.t.out = nil
		p.t.mu.Unlock()
		after(10*time.Second, 10)
		after(line.PrepareBound-31*time.Second, 569)
		<-time.After(2 * time.Second) // the last tick and the end come together
		synctest.Wait()
		after(time.Minute, 0)
	})
}

func TestBeside(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "bin", "hvdrun")
	for _, path := range []string{"bin/lib/libhvdrun.so", "bin/libhvdrun.so"} {
		at := filepath.Join(dir, path)
		if beside(program) == at {
			t.Errorf("%s is there before it is", at)
		}
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := beside(program); got != at {
			t.Errorf("%q, want %q", got, at)
		}
	}
	if beside("") != "" {
		t.Error("there is a library beside no program")
	}
}
