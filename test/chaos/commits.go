package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// beyond is how long after the usual end of a commit a worker may be killed, as a share of its
// duration.
const beyond = 0.25

// strikeCommits has workers killed during commits until there were so many attempts or the kills of
// this job are over.
func (k *killer) strikeCommits(ctx context.Context, tries int) (made int, err error) {
	for made < tries {
		if err := k.job.Look(); err != nil {
			return made, err
		}
		if k.job.Step >= k.until {
			return made, nil
		}
		victims := k.victims()
		for _, pid := range victims {
			if err := k.mark(pid); err != nil {
				return made, err
			}
		}
		if len(victims) > 0 {
			made++
			if err := k.awaitGone(ctx, victims); err != nil {
				return made, err
			}
		}
		if k.job.Over() {
			return made, nil
		}
		if err := follow.Sleep(ctx, time.Duration(k.dice.ExpFloat64()*float64(k.pause))); err != nil {
			return made, err
		}
	}
	return made, nil
}

// victims selects one or two members of the newest world, of which at least one survives. Every
// other time rank 0 is one of them.
func (k *killer) victims() []int {
	holders := k.spare(k.job.Holders())
	if k.job.Step == 0 || len(holders) < 2 {
		return nil
	}
	k.dice.Shuffle(len(holders), func(i, j int) { holders[i], holders[j] = holders[j], holders[i] })
	if k.dice.IntN(2) == 0 {
		if at := slices.IndexFunc(holders, func(pid int) bool { return k.job.Ranks[pid] == 0 }); at > 0 {
			holders[0], holders[at] = holders[at], holders[0]
		}
	}
	n := 1
	if len(holders) > 2 && k.dice.IntN(5) == 0 {
		n = 2
	}
	return holders[:n]
}

// mark tells a worker when to kill itself.
func (k *killer) mark(pid int) error {
	path := filepath.Join(k.job.Dir, fmt.Sprintf("strike.%d", pid))
	when := fmt.Append(nil, k.dice.Float64()*(1+beyond))
	if k.dice.IntN(2) == 0 {
		when = append(when, " shortest"...)
	}
	if err := os.WriteFile(path+".new", when, 0o666); err != nil {
		return err
	}
	k.struck[pid] = true
	k.kills = append(k.kills, kill{time.Now(), pid, k.job.Ranks[pid], k.job.Generation})
	return os.Rename(path+".new", path)
}

// awaitGone blocks until hvdrun has reported the end of the workers, or has ended.
func (k *killer) awaitGone(ctx context.Context, pids []int) error {
	return k.job.Until(ctx, "the ends of the killed workers", func() bool {
		return k.job.Over() || !slices.ContainsFunc(pids, func(pid int) bool { return slices.Contains(k.job.Alive, pid) })
	})
}

// strikes counts the kills of a run by the worker's activity and by the outcome of the commit.
type strikes struct {
	tries, zeros int
	moments      map[steplog.Moment]int
	made         map[string]int
}

// The outcomes of a commit in which a worker dies.
const (
	madeByAll  = "by all survivors"
	madeBySome = "by some of the survivors"
	madeByNone = "by none of them"
)

// readStrikes adds the kills that the workers and the steplog of a run have recorded.
func (k *killer) readStrikes(lines []steplog.Line, s *strikes) error {
	s.moments, s.made = make(map[steplog.Moment]int), make(map[string]int)
	all, err := steplog.Follow[steplog.Strike](filepath.Join(k.job.Dir, "strikes")).Next()
	if err != nil {
		return err
	}
	type place struct {
		pid, step  int
		generation uint64
	}
	struck := make(map[place]bool)
	for _, x := range all {
		struck[place{x.PID, x.Step, x.Generation}] = true
	}
	for _, x := range all {
		s.moments[x.Moment]++
		if x.Rank == 0 {
			s.zeros++
		}
		made, not := 0, 0
		for _, l := range lines {
			if l.Event != steplog.Step || l.Generation != x.Generation || l.Step != x.Step || struck[place{l.PID, l.Step, l.Generation}] {
				continue
			}
			switch l.Outcome {
			case steplog.OK, steplog.Updated:
				made++
			case steplog.Aborted:
				not++
			}
		}
		switch {
		case made > 0 && not > 0:
			s.made[madeBySome]++
		case made > 0:
			s.made[madeByAll]++
		default:
			s.made[madeByNone]++
		}
	}
	return nil
}

func (s *strikes) add(o strikes) {
	if s.moments == nil {
		s.moments, s.made = make(map[steplog.Moment]int), make(map[string]int)
	}
	s.tries += o.tries
	s.zeros += o.zeros
	for m, n := range o.moments {
		s.moments[m] += n
	}
	for m, n := range o.made {
		s.made[m] += n
	}
}

func (s *strikes) report() string {
	if s.tries == 0 {
		return ""
	}
	return fmt.Sprintf("\n%d attempts; %d of the killed were rank 0\nkilled while %s\ntheir last commit was made %s\n", s.tries, s.zeros,
		counted(s.moments), counted(s.made))
}

func counted[K ~string](counts map[K]int) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(counts)) {
		all = append(all, fmt.Sprintf("%s: %d", k, counts[k]))
	}
	return strings.Join(all, ", ")
}
