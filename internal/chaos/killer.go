package main

import (
	"context"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/e2e"
	"github.com/hvdrun/hvdrun/internal/trainee/diary"
)

// kill is one that was done.
type kill struct {
	at         time.Time
	pid        int
	rank       int // -1: it was in no world yet
	generation uint64
}

// killer kills workers of a running job, but always spares one that has the job's state.
type killer struct {
	job     *e2e.Running
	dice    *rand.Rand
	pause   time.Duration
	until   int // the step after which the job is left in peace
	drivers driverKiller
	ask     float64 // share of those who are not killed, but asked to leave

	diary  *diary.Follower[diary.Line]
	events *diary.Follower[e2e.Event]

	alive      []int        // processes that have started and neither exited nor been killed
	ranks      map[int]int  // of the newest world: rank by process
	generation uint64       // its number
	step       int          // the last one seen
	seen       map[int]bool // everybody ever struck
	kills      []kill
	asked      int
}

func newKiller(r *e2e.Running, dice *rand.Rand, pause time.Duration, until int) *killer {
	return &killer{
		job: r, dice: dice, pause: pause, until: until,
		diary:  diary.Follow[diary.Line](r.DiaryPath()),
		events: diary.Follow[e2e.Event](r.EventsPath()),
		ranks:  make(map[int]int), seen: make(map[int]bool),
	}
}

// run kills until the job is to be left in peace, or has ended.
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

// next is the time until the next kill: now and then very short, so that it meets the recovery from
// the last.
func (k *killer) next() time.Duration {
	if k.dice.IntN(3) == 0 {
		return time.Duration(k.dice.ExpFloat64() * float64(10*time.Millisecond))
	}
	return time.Duration(k.dice.ExpFloat64() * float64(k.pause))
}

// look learns who is there.
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
	lines, err := k.diary.Next()
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

// strike kills one worker, or asks it to leave, if somebody with state is left then: a member of
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

// recoveries returns, for each kill of a member, the time until somebody completed a step in a
// later world.
func recoveries(kills []kill, lines []diary.Line) e2e.Spread {
	var s e2e.Spread
	for _, k := range kills {
		at, first := k.at.UnixNano(), int64(0)
		for _, l := range lines {
			if l.Event == diary.Step && l.Generation > k.generation && l.Time > at && (first == 0 || l.Time < first) {
				first = l.Time
			}
		}
		if k.rank >= 0 && first > 0 {
			s = append(s, time.Duration(first-at))
		}
	}
	return s
}
