// Command jobs proves whole jobs at real size: it makes cases from seeds, each a job of real
// processes to which something happens, and checks after each what must always hold. [kinds] lists
// the kinds of cases.
//
//	go run ./internal/prove/jobs -for 30m             cases of as many seeds as fit in that time
//	go run ./internal/prove/jobs -for 5m -seed 17     those of the seeds 17, 18 …
//	go run ./internal/prove/jobs -seed 17 -one        the case of seed 17 alone
//	go run ./internal/prove/jobs -for 5m -kind disk   those of a kind
//	go run ./internal/prove/jobs -for 1m -small       cheap ones
//
// A case follows from its seed alone, but for the moments at which processes happen to run. After
// each, these must hold: the job has ended with the right status, or has gone on making steps;
// nobody hangs, where time counts from the last step, event or byte of output; no commit is lost
// and no step left out (see diary.Check); of the job's processes none is left, nor of those that
// they have started; every command has answered.
//
// What needs root, namespaces or cgroups is left out where there is none. A case that fails is told
// with its seed, the end of its log and its events, and the command that repeats it; its files are
// kept, with the stacks of its processes. The program goes on with the next, and exits with 1 in
// the end. At SIGINT or SIGTERM it ends all that it has started, and gives back what it has of the
// machine: mounts are in a namespace of its own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/e2e"
	"github.com/hvdrun/hvdrun/internal/prove"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	var p prover
	p.Flags(flag.CommandLine)
	flag.StringVar(&p.kind, "kind", "", "cases of this kind alone")
	flag.BoolVar(&p.small, "small", false, "cheap cases alone")
	flag.BoolVar(&p.list, "list", false, "print the kinds, and the cases that would be tried first")
	unshared := flag.Bool("unshared", false, "the process has a mount namespace of its own already")
	flag.Parse()
	if p.can = look(); p.can.root && !*unshared && !p.list {
		if err := unshare(); err != nil {
			fmt.Fprintln(os.Stderr, "jobs: without a mount namespace:", err)
		}
	}
	if err := p.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "jobs:", err)
		stop()
		os.Exit(1)
	}
}

// unshare has this program begin again with mounts of its own, which end with it however it ends.
func unshare() error {
	path, err := exec.LookPath("unshare")
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return syscall.Exec(path, slices.Concat([]string{path, "--mount", self, "-unshared"}, os.Args[1:]), os.Environ())
}

// prover is the flags, and what all cases have in common.
type prover struct {
	prove.Run
	kind     string
	small    bool
	list     bool
	can      can
	programs e2e.Binaries
	help     string
	dir      string
	tally    tally
}

// wants tells whether a case is one of those to be tried.
func (p *prover) wants(s setup) bool {
	return (p.kind == "" || p.kind == s.Kind) && (!p.small || s.small())
}

func (p *prover) run(ctx context.Context) error {
	if p.kind != "" && !slices.ContainsFunc(kinds, func(k kind) bool { return k.name == p.kind }) {
		return fmt.Errorf("%q is no kind of case; there are: %s", p.kind, names())
	}
	if p.list {
		p.print()
		return nil
	}
	var err error
	if p.dir, err = os.MkdirTemp("", "hvdrun-prove-jobs-"); err != nil {
		return err
	}
	if p.programs, err = e2e.Build(ctx, p.dir); err != nil {
		return errors.Join(err, os.RemoveAll(p.dir))
	}
	help, err := exec.CommandContext(ctx, p.programs.Hvdrun, "--help").CombinedOutput()
	if err != nil {
		return errors.Join(fmt.Errorf("hvdrun --help: %w: %s", err, help), os.RemoveAll(p.dir))
	}
	p.help = string(help)
	p.tally.began = time.Now()
	p.tryAll(ctx)
	fmt.Print(p.tally.String())
	if n := p.tally.failed(); n > 0 {
		return fmt.Errorf("%d cases went wrong; their files are in %s", n, p.dir)
	}
	return errors.Join(context.Cause(ctx), os.RemoveAll(p.dir))
}

// tryAll tries the cases that are wanted until the time is over, or with -one the first of them.
func (p *prover) tryAll(ctx context.Context) {
	seed := p.Seed
	for n := 0; p.More(n, time.Since(p.tally.began)) && ctx.Err() == nil; n++ {
		s, k := draw(seed)
		for !p.wants(s) && !p.One {
			seed++
			s, k = draw(seed)
		}
		seed++
		if k.needs == nil || k.needs(p.can) {
			p.try(ctx, s, k)
		} else {
			p.tally.skip(s)
		}
	}
}

// try tries a case and prints what became of it.
func (p *prover) try(ctx context.Context, s setup, k kind) {
	t := &trial{setup: s, can: p.can, programs: p.programs, help: p.help, dir: filepath.Join(p.dir, fmt.Sprint(s.Seed))}
	began := time.Now()
	err := t.try(ctx, k)
	if ctx.Err() != nil {
		return // what it left undone is no fault
	}
	took := time.Since(began)
	p.tally.add(s, took, t.jobs, err)
	verdict := "ok"
	if err != nil {
		verdict = "FAILED"
	}
	fmt.Printf("%-6s seed %-5d %-10s %6.1f s  %s%s\n", verdict, s.Seed, s.Kind, took.Seconds(), s, t.notes)
	if err == nil {
		return
	}
	fmt.Printf("  %s\n", strings.ReplaceAll(err.Error(), "\n", "\n  "))
	for _, j := range t.jobs {
		fmt.Printf("  the end of %s:\n%s\n", j.outputPath(), j.log)
		for _, e := range j.happened[max(0, len(j.happened)-20):] {
			fmt.Printf("  %s %s\n", e.Time.Format("15:04:05.000"), e)
		}
	}
	fmt.Printf("  its files are in %s; go run ./internal/prove/jobs -seed %d -one repeats it\n", t.dir, s.Seed)
}

func names() string {
	var all []string
	for _, k := range kinds {
		all = append(all, k.name)
	}
	return strings.Join(all, ", ")
}

// print lists the kinds, and some cases.
func (p *prover) print() {
	for _, k := range kinds {
		fmt.Printf("%-10s %s\n", k.name, k.about)
	}
	for seed := p.Seed; seed < p.Seed+uint64(3*len(kinds)); seed++ {
		if s, _ := draw(seed); p.wants(s) {
			fmt.Printf("seed %-5d %-10s %s\n", seed, s.Kind, s)
		}
	}
}
