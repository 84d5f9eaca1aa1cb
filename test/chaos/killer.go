package main

import (
	"context"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/steplog"
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
	job     *follow.Running
	dice    *rand.Rand
	pause   time.Duration
	until   int // the step after which nothing is killed
	drivers driverKiller
	ask     float64 // share of workers that are asked to leave instead of killed

	struck map[int]bool // all processes killed or asked to leave so far
	kills  []kill
	asked  int
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
		if err := k.job.Look(); err != nil {
			return err
		}
		if k.job.Step >= k.until {
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

// spare returns the processes that have not been killed.
func (k *killer) spare(pids []int) []int {
	return slices.DeleteFunc(slices.Clone(pids), func(pid int) bool { return k.struck[pid] })
}

// strike kills one worker, or asks it to leave, if another one with the state remains: a member of
// the newest world that has begun to train.
func (k *killer) strike() {
	holders := k.spare(k.job.Holders())
	if k.job.Step == 0 || len(holders) == 0 {
		return
	}
	spared := holders[k.dice.IntN(len(holders))]
	victims := slices.DeleteFunc(k.spare(k.job.Alive), func(pid int) bool { return pid == spared })
	if len(victims) == 0 {
		return
	}
	pid := victims[k.dice.IntN(len(victims))]
	rank, ok := k.job.Ranks[pid]
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
	k.struck[pid] = true
	if how == syscall.SIGTERM {
		k.asked++
		return
	}
	k.kills = append(k.kills, kill{at, pid, rank, k.job.Generation})
}

// recoveries returns, for each kill of a member, the time until any worker completed a step in a
// later world.
func recoveries(kills []kill, lines []steplog.Line) report.Spread {
	var s report.Spread
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
