package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/stacks"
)

// probed is the launcher of a job whose workers do not report their goroutines.
type probed struct {
	launch.Launcher
	mu    sync.Mutex
	asked int
	at    func(n int) stacks.Worker
}

func (p *probed) Probe(_ context.Context, _, _ string) (stacks.Worker, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	if p.at == nil {
		return stacks.Worker{}, errors.New("no agent")
	}
	return p.at(p.asked), nil
}

// at is a worker that reads a file.
func at(file string) stacks.Worker {
	w := stacks.Worker{Processes: []stacks.Process{{PID: 42, Threads: []stacks.Thread{{Name: "train", State: "S", Syscall: "read", Of: file}}}}}
	w.Clean()
	return w
}

// TestLocate: stalled workers are inspected, but only a few of many. Those at the same place are
// reported together, and all that they print can be shown.
func TestLocate(t *testing.T) {
	for name, test := range map[string]struct {
		workers int
		stalled []int // nil: all wait
		at      func(n int) stacks.Worker
		want    []string
		most    int
	}{
		"one":              {workers: 3, stalled: []int{1}, at: func(int) stacks.Worker { return at("load") }, want: []string{"a:1: train (pid 42) sleeps in read of load"}, most: 1},
		"all, one place":   {workers: 30, at: func(int) stacks.Worker { return at("load") }, want: []string{"train (pid 42) sleeps in read of load; there too: ranks 1 2 3 4 5 6 7"}, most: mostLocated},
		"many, two places": {workers: 4, at: func(n int) stacks.Worker { return at(fmt.Sprint("load", n%2)) }, want: []string{"read of load0", "read of load1", "; there too: rank "}, most: 4},
		"a liar":           {workers: 2, stalled: []int{0}, at: func(int) stacks.Worker { return at("x\x1b[2J\n" + strings.Repeat("y", 1000)) }, want: []string{"in read of x?[2J?yyyy"}, most: 1},
		"nobody knows":     {workers: 2, stalled: []int{0}, most: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := newJob(t, context.Background(), Config{
					Source: discovery.Fixed{{Name: "a", Slots: test.workers}}, Size: job.Size{NP: test.workers, Min: 1, Elastic: true},
				})
				var slots []string
				for i := range test.workers {
					slots = append(slots, fmt.Sprint("a:", i))
				}
				j.joins(t, 0, slots...)
				p := &probed{Launcher: j.cfg.Launcher, at: test.at}
				var mu sync.Mutex
				var found []string
				// The loop's goroutine waits between two events, and reads these fields with the
				// next one.
				done := make(chan struct{})
				j.asks <- func() {
					j.cfg.Launcher = p
					j.cfg.Events = func(e job.Event) {
						if e.Name != "located" {
							return
						}
						place := ""
						for _, f := range e.Fields {
							switch f.Key {
							case "host":
								place = fmt.Sprint(f.Value)
							case "slot":
								place += fmt.Sprint(":", f.Value)
							case "where":
								mu.Lock()
								found = append(found, fmt.Sprint(place, ": ", f.Value))
								mu.Unlock()
							}
						}
					}
					close(done)
				}
				<-done
				side, cancel := context.WithCancel(context.Background())
				j.wg.Go(func() { j.locateStalled(side) })
				if test.stalled == nil {
					j.locate.report(decide.WorldJammed{Generation: 1})
				}
				for _, r := range test.stalled {
					j.locate.report(decide.WorkerStalled{ID: j.worker(t, slots[r]).spec.Incarnation, Generation: 1})
				}
				<-time.After(10 * time.Second)
				synctest.Wait()
				mu.Lock()
				text := strings.Join(found, "\n")
				mu.Unlock()
				for _, want := range test.want {
					if !strings.Contains(text, want) {
						t.Errorf("%q is missing in:\n%s", want, text)
					}
				}
				if n := p.asked; n > test.most || n == 0 && test.at != nil {
					t.Errorf("%d workers were looked at", n)
				}
				if strings.ContainsAny(strings.ReplaceAll(text, "\n", ""), "\x1b") {
					t.Errorf("%q", text)
				}
				status := j.m.Status(time.Now(), j.stalls.shows(time.Now()))
				if w := status.Hosts[0].Slots[0].Where; test.stalled == nil && w == "" {
					t.Errorf("the status does not tell where: %+v", status.Hosts[0].Slots[0])
				}
				cancel()
				for _, slot := range slots {
					j.worker(t, slot).exit <- nil
				}
				<-j.result
			})
		})
	}
}
