package main

import (
	"context"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/testbed/e2e"
	"github.com/hvdrun/hvdrun/internal/testbed/steplog"
)

// kill is a kill of a worker.
type kill struct {
	at         time.Time
	pid        int
	rank       int // -1: not in a world yet
	generation uint64
}

// killer kills workers of a running job, but always spares one with the job's state.
type killer struct {
	job     *e2e.Running
	dice    *rand.Rand
	pause   time.Duration
	until   int // the step after which nothing is killed
	drivers driverKiller
	ask     float64 // share of workers that are asked to leave instead of killed

	steplog *steplog.Follower[steplog.Line]
	events  *steplog.Follower[e2e.Event]

	alive      []int        // processes that have neither exited nor been killed
	ranks      map[int]int  // of the newest world: rank by process
	generation uint64       // its number
	step       int          // last step seen
	seen       map[int]bool // all processes killed or asked to leave so far
	kills      []kill
	asked      int
}

func newKiller(r *e2e.Running, dice *rand.Rand, pause time.Duration, until int) *killer {
	return &killer{
		job: r, dice: dice, pause: pause, until: until,
		steplog: steplog.Follow[steplog.Line](r.StepLogPath()),
		events:  steplog.Follow[e2e.Event](r.EventsPath()),
		ranks:   make(map[int]int), seen: make(map[int]bool),
	}
}

// run kills until step until, or until the job has ended.
func (k *killer) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-k.job.Ended():
			return nil
		case <-time.After(k.next()):
		}
		if err := k.look(); err != nil {
			return err
		}
		if k.step >= k.until {
			return nil
		}
		if k.drivers.turn(k) {
			if err := k.killDriver(ctx); err != nil {
				return err
			}
			continue
		}
		n := 1
		if k.dice.IntN(4) == 0 {
			n = 2
		}
		for range n {
			k.strike()
		}
	}
}

// next returns the time until the next kill: sometimes very short, so that a kill hits the recovery
// from the previous one.
func (k *killer) next() time.Duration {
	if k.dice.IntN(3) == 0 {
		return time.Duration(k.dice.ExpFloat64() * float64(10*time.Millisecond))
	}
	return time.Duration(k.dice.ExpFloat64() * float64(k.pause))
}

// look updates the killer's view of the job.
func (k *killer) look() error {
	events, err := k.events.Next()
	if err != nil {
		return err
	}
	for _, e := range events {
		switch e.Name {
		case "worker_started":
			k.alive = append(k.alive, e.PID)
		case "worker_exited":
			k.alive = slices.DeleteFunc(k.alive, func(pid int) bool { return pid == e.PID })
		}
	}
	k.alive = slices.DeleteFunc(k.alive, func(pid int) bool { return k.seen[pid] })
	lines, err := k.steplog.Next()
	if err != nil {
		return err
	}
	for _, l := range lines {
		if l.Generation > k.generation {
			k.generation = l.Generation
			clear(k.ranks)
		}
		if l.Generation == k.generation {
			k.ranks[l.PID] = l.Rank
		}
		k.step = max(k.step, l.Step)
	}
	return nil
}

// strike kills one worker, or asks it to leave, if another one with the state remains: a member of
// the newest world that has begun to train.
func (k *killer) strike() {
	var holders []int
	for _, pid := range k.alive {
		if _, ok := k.ranks[pid]; ok {
			holders = append(holders, pid)
		}
	}
	if k.step == 0 || len(holders) == 0 {
		return
	}
	spared := holders[k.dice.IntN(len(holders))]
	victims := slices.DeleteFunc(slices.Clone(k.alive), func(pid int) bool { return pid == spared })
	if len(victims) == 0 {
		return
	}
	pid := victims[k.dice.IntN(len(victims))]
	rank, ok := k.ranks[pid]
	if !ok {
		rank = -1
	}
	how := syscall.SIGKILL
	if k.dice.Float64() < k.ask {
		how = syscall.SIGTERM
	}
	at := time.Now()
	if syscall.Kill(pid, how) != nil {
		return // it has just ended
	}
	k.seen[pid] = true
	k.alive = slices.DeleteFunc(k.alive, func(p int) bool { return p == pid })
	if how == syscall.SIGTERM {
		k.asked++
		return
	}
	k.kills = append(k.kills, kill{at, pid, rank, k.generation})
}

// recoveries returns, for each kill of a member, the time until any worker completed a step in a
// later world.
func recoveries(kills []kill, lines []steplog.Line) e2e.Spread {
	var s e2e.Spread
	for _, k := range kills {
		at, first := k.at.UnixNano(), int64(0)
		for _, l := range lines {
			if l.Event == steplog.Step && l.Generation > k.generation && l.Time > at && (first == 0 || l.Time < first) {
				first = l.Time
			}
		}
		if k.rank >= 0 && first > 0 {
			s = append(s, time.Duration(first-at))
		}
	}
	return s
}
