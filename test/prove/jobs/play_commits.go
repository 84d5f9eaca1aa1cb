package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// afterCommit is how long after the usual end of a commit a worker can be killed, as a fraction of
// the commit's duration.
const afterCommit = 0.25

// playCommits kills workers while values are encoded, tensors are copied, or the ranks agree on a
// commit, and right after it.
func playCommits(ctx context.Context, t *trial) error {
	for left := t.Commits; left > 0; {
		j, err := t.job()
		if err != nil {
			return err
		}
		if err := j.apart("commits"); err != nil {
			return err
		}
		j.flag("--commit-replicas", "1", "--log-level", "debug")
		j.worker("-struck", fmt.Sprintf("-async=%t", t.dice.IntN(2) == 0), fmt.Sprintf("-local=%t", t.dice.IntN(2) == 0))
		if err := j.start(); err != nil {
			return err
		}
		k := killer{job: j, until: t.Steps * 85 / 100, struck: make(map[int]bool)}
		made, err := k.strikeCommits(ctx, left)
		if err != nil {
			return err
		}
		left -= made
		t.count("attempts", made)
		if err := errors.Join(j.end(ctx), checkResets(j.Events), j.checkEnds(ending{}), k.countStrikes()); err != nil {
			return err
		}
		k.tell()
	}
	return nil
}

// strikeCommits makes workers kill themselves during commits. It returns the number of tries made:
// the given number, or fewer if the kills of this job are over before.
func (k *killer) strikeCommits(ctx context.Context, tries int) (made int, err error) {
	for made < tries {
		if err := k.Look(); err != nil {
			return made, err
		}
		if k.Over() || k.Step >= k.until {
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
		if err := follow.Sleep(ctx, time.Duration(k.trial.dice.ExpFloat64()*float64(k.Pause))); err != nil {
			return made, err
		}
	}
	return made, nil
}

// victims selects one or two members of the newest world, and spares at least one. Every other
// time, rank 0 is one of them.
func (k *killer) victims() []int {
	dice, holders := k.trial.dice, k.spare(k.Holders())
	if k.Step == 0 || len(holders) < 2 {
		return nil
	}
	dice.Shuffle(len(holders), func(i, j int) { holders[i], holders[j] = holders[j], holders[i] })
	if dice.IntN(2) == 0 {
		if at := slices.IndexFunc(holders, func(pid int) bool { return k.Ranks[pid] == 0 }); at > 0 {
			holders[0], holders[at] = holders[at], holders[0]
		}
	}
	n := 1
	if len(holders) > 2 && dice.IntN(5) == 0 {
		n = 2
	}
	return holders[:n]
}

// mark tells a worker when to kill itself.
func (k *killer) mark(pid int) error {
	path := filepath.Join(k.Dir, fmt.Sprintf("strike.%d", pid))
	when := fmt.Append(nil, k.trial.dice.Float64()*(1+afterCommit))
	if k.trial.dice.IntN(2) == 0 {
		when = append(when, " shortest"...)
	}
	if err := os.WriteFile(path+".new", when, 0o666); err != nil {
		return err
	}
	k.struck[pid] = true
	k.kills = append(k.kills, kill{time.Now(), pid, k.Ranks[pid], k.Generation})
	return os.Rename(path+".new", path)
}

// awaitGone blocks until hvdrun has reported the end of the workers, or has ended.
func (k *killer) awaitGone(ctx context.Context, pids []int) error {
	return k.Until(ctx, "the ends of the killed workers", func() bool {
		return k.Over() || !slices.ContainsFunc(pids, func(pid int) bool { return slices.Contains(k.Alive, pid) })
	})
}

// countStrikes counts the kills that the workers have recorded, by the worker's activity and by the
// outcome of the commit.
func (k *killer) countStrikes() error {
	all, err := steplog.Follow[steplog.Strike](filepath.Join(k.Dir, "strikes")).Next()
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
		k.trial.count("killed while "+string(x.Moment), 1)
		made, not := 0, 0
		for _, l := range k.Lines {
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
			k.trial.count("of commits made by some of the survivors", 1)
		case made > 0:
			k.trial.count("of commits made by all survivors", 1)
		default:
			k.trial.count("of commits made by none of them", 1)
		}
	}
	return nil
}
