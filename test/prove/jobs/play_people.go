package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/follow"
)

// playInterrupt sends SIGINT once or twice at random moments.
func playInterrupt(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.job()
	if err != nil {
		return err
	}
	j.flag("--drain-timeout", "2s")
	if t.How == "stubborn" {
		j.worker("-stubborn")
	}
	// Before this, hvdrun has not installed its signal handlers: the signal would end it at once,
	// before it has started anything.
	if err := j.start(); err != nil {
		return err
	}
	if err := follow.Sleep(ctx, t.After); err != nil {
		return err
	}
	for range t.Times {
		j.signal(syscall.SIGINT)
		if err := follow.Sleep(ctx, time.Duration(t.dice.IntN(500))*time.Millisecond); err != nil {
			return err
		}
	}
	return j.end(ctx, interrupted)
}

// playCommands runs a series of commands and sometimes kills a worker.
func playCommands(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.begin(ctx, "--drain-timeout", "5s")
	if err != nil {
		return err
	}
	for range t.Times {
		slot := t.slot(t.dice.IntN(t.Workers))
		words := pick(t.dice, []string{"status"}, []string{"jobs"}, []string{"drain", slot}, []string{"readmit", slot},
			[]string{"exclude", slot}, []string{"scale", "--max-np", fmt.Sprint(1 + t.dice.IntN(t.Workers))},
			[]string{"scale", "--max-np", "none"}, []string{"kill"})
		if words[0] == "kill" {
			if err := j.Look(); err != nil {
				return err
			}
			if members := j.Holders(); len(members) > 1 && j.Generation == j.World.Generation {
				j.strike(members[t.dice.IntN(len(members))], syscall.SIGKILL) // it may have ended
			}
			continue
		}
		out, status, err := j.ask(ctx, words...)
		if err != nil {
			return err
		}
		if asks := words[0] == "status" || words[0] == "jobs"; asks && status != 0 {
			return fmt.Errorf("hvdrun %s: status %d: %s", words[0], status, out)
		}
		if err := follow.Sleep(ctx, time.Duration(t.dice.IntN(200))*time.Millisecond); err != nil {
			return err
		}
	}
	if _, err := j.must(ctx, "scale", "--max-np", "none"); err != nil {
		return err
	}
	for i := range t.Workers {
		if _, _, err := j.ask(ctx, "readmit", t.slot(i)); err != nil {
			return err
		}
	}
	if err := j.Look(); err != nil {
		return err
	}
	if err := errors.Join(j.full(ctx, j.Generation-1), j.trained(ctx, 5)); err != nil {
		return err
	}
	if _, err := j.must(ctx, "stop"); err != nil {
		return err
	}
	return j.end(ctx, terminated)
}

// playDriver kills hvdrun.
func playDriver(ctx context.Context, t *trial) error {
	t.Steps = 0
	j, err := t.job()
	if err != nil {
		return err
	}
	orphans := 15 * time.Second
	if t.How == "orphans" {
		j.flag("--orphan-timeout", orphans.String(), "--drain-timeout", "10m")
		j.worker("-stubborn")
	}
	if err := j.train(ctx, 5); err != nil {
		return err
	}
	if t.How == "resume" {
		if err := j.resume(ctx, t.After); err != nil {
			return err
		}
		if _, err := j.must(ctx, "status"); err != nil {
			return err
		}
		return j.stop(ctx)
	}
	j.KillDriver()
	folder, err := j.Folder()
	if err != nil {
		return err
	}
	switch t.How {
	case "orphans":
		if left := j.AwaitGone(follow.Patience); len(left) > 0 {
			return fmt.Errorf("--orphan-timeout %v, and processes are left after the end of hvdrun: %q", orphans, left)
		}
		return j.end(ctx, killed)
	case "damaged":
		if err := damage(filepath.Join(folder, "journal")); err != nil {
			return err
		}
	}
	if _, err := j.must(ctx, "stop"); err != nil {
		return err
	}
	if left := j.AwaitGone(follow.Patience); len(left) > 0 {
		return fmt.Errorf("hvdrun stop has said that all is well, and processes are left: %q", left)
	}
	return j.end(ctx, killed)
}

// damage changes a byte in the middle of a file.
func damage(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	b[len(b)/2] ^= 0x55
	return os.WriteFile(path, b, 0o600)
}

// playRemoval makes discovery return an empty list once, or replace all hosts.
func playRemoval(ctx context.Context, t *trial) error {
	j, err := t.job()
	if err != nil {
		return err
	}
	path, err := t.script("discover", fmt.Sprintf(`cd '%s' || exit 1
echo >>asked
if [ -e replaced ]; then printf '127.0.0.3:2\n127.0.0.4:2\n'
elif [ -e empty ]; then mv empty was
else printf '127.0.0.1:2\n127.0.0.2:2\n'; fi
`, t.dir))
	if err != nil {
		return err
	}
	j.source("--max-np", "4", "--discovery-interval", "0.2s", "--host-discovery-script", path)
	if err := j.train(ctx, 3); err != nil {
		return err
	}
	generation := j.Generation
	if err := os.WriteFile(filepath.Join(t.dir, t.How), nil, 0o666); err != nil {
		return err
	}
	if t.How == "replaced" {
		err = j.Until(ctx, "a world on the new hosts", func() bool {
			at := slices.IndexFunc(j.Events, func(e follow.Event) bool {
				return e.Name == "world_published" && e.Size == 4 && !slices.ContainsFunc(e.Slots, func(s follow.Slot) bool {
					return s.Host == "127.0.0.1" || s.Host == "127.0.0.2"
				})
			})
			return at >= 0 && j.Generation >= j.Events[at].Generation
		})
	} else {
		// By then the script has run five more times.
		asked := func() int64 { fi, _ := os.Stat(filepath.Join(t.dir, "asked")); return fi.Size() }
		since := asked()
		err = j.Until(ctx, "five more lists of hosts", func() bool { return asked() >= since+6 })
		if _, serr := os.Stat(filepath.Join(t.dir, "was")); err == nil && serr != nil {
			err = serr
		}
	}
	if err := errors.Join(err, j.trained(ctx, 10)); err != nil {
		return err
	}
	for _, e := range j.Events {
		if e.Name == "world_published" && e.Size > 4 {
			return fmt.Errorf("generation %d has %d workers, more than --max-np 4", e.Generation, e.Size)
		}
	}
	if t.How == "empty" && j.Generation != generation {
		return fmt.Errorf("one empty list took the job from generation %d to %d", generation, j.Generation)
	}
	return j.stop(ctx)
}

// playList lists many unusable hosts: ssh to them fails at once.
func playList(ctx context.Context, t *trial) error {
	var list strings.Builder
	if t.How == "some work" {
		fmt.Fprintln(&list, strings.ReplaceAll(t.hostList(), ",", "\n"))
	}
	for i := range t.Listed {
		fmt.Fprintf(&list, "10.250.%d.%d:%d\n", i/250, 1+i%250, 1+i%8)
	}
	path := filepath.Join(t.dir, "hosts")
	if err := os.WriteFile(path, []byte(list.String()), 0o666); err != nil {
		return err
	}
	j, err := t.job()
	if err != nil {
		return err
	}
	j.source("--host-discovery-script", "cat "+path, "--ssh-command", "false",
		"--log-level", "error", "--elastic-timeout", "8s")
	if t.How == "some work" {
		j.flag("--max-np", fmt.Sprint(t.Workers))
	}
	if err := j.start(); err != nil {
		return err
	}
	statuses := []int{0}
	switch t.How {
	case "none works": // 1: every slot has failed before the timeout
		statuses = []int{1, 3}
	case "interrupted":
		if err := follow.Sleep(ctx, time.Second+t.After); err != nil {
			return err
		}
		j.signal(syscall.SIGINT)
		if statuses = []int{interrupted}; t.Listed <= 100 {
			statuses = append(statuses, 1) // a few slots may all have failed by then
		}
	}
	most := int64(0)
	if err := j.Until(ctx, "the end", func() bool { most = max(most, peak(j.PID)); return j.Over() }); err != nil {
		return err
	}
	t.note("hvdrun took %d MiB", most>>20)
	if most > memoryOfDriver {
		return fmt.Errorf("hvdrun took %d MiB of memory, more than %d", most>>20, memoryOfDriver>>20)
	}
	return j.end(ctx, statuses...)
}
