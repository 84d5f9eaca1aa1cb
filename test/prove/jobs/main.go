// Command jobs tests whole jobs at real size: it generates cases from seeds, each a job of real
// processes with disturbances, and checks the invariants after each. [kinds] lists the kinds of
// cases.
//
//	go run ./test/prove/jobs -for 30m             as many seeds as fit in that time
//	go run ./test/prove/jobs -for 5m -seed 17     the seeds 17, 18 …
//	go run ./test/prove/jobs -seed 17 -one        only seed 17
//	go run ./test/prove/jobs -for 5m -kind disk   only cases of a kind
//	go run ./test/prove/jobs -cases 3 -small      three cases, only cheap ones
//
// A seed determines its case, except the scheduling of processes. After each case, these must hold:
// the job has ended with the right status, or has continued to train; nothing hangs, measured from
// the last step, event or output; no commit is lost and no step left out (steplog.Check); none of
// the job's processes, or of processes that they started, remains; every command has answered.
//
// Cases that need root, namespaces or cgroups are skipped if these are not available. A failed case
// is reported with its seed, its errors, the end of its output, and the command that repeats it;
// its files and the stacks of its processes are kept. The program continues with the next case. At
// the end it prints a table and the times that cases have measured, and exits with 1 if a case
// failed; no case fails because of its times. Jobs have their own home, runtime folder and folder
// for temporary files, which are removed at the end, and get no variables of other jobs. On SIGINT
// or SIGTERM the program ends all processes that it has started and releases its resources; its
// mounts are in its own namespace.
//
// Flags replace what a seed determines. With many repetitions, a kind is a measurement:
//
//	go run ./test/prove/jobs -kind recovery -cases 1 -kills 200 -joins 40
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

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/prove"
	"github.com/hvdrun/hvdrun/test/prove/jobs/internal/crowd"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func main() {
	if err := start(); err != nil {
		fmt.Fprintln(os.Stderr, "jobs:", err)
		os.Exit(1)
	}
}

func start() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if role := os.Getenv(crowd.Role); role != "" {
		return crowd.Play(ctx, role, os.Args[1:])
	}
	var p prover
	p.Flags(flag.CommandLine)
	p.given.define(flag.CommandLine)
	flag.StringVar(&p.kind, "kind", "", "only cases of this kind")
	flag.BoolVar(&p.small, "small", false, "only cheap cases")
	flag.BoolVar(&p.list, "list", false, "print the kinds, and the cases that would be tried first")
	flag.BoolVar(&p.keep, "keep", false, "keep the files of all cases")
	flag.StringVar(&p.built, "programs", "", "folder of hvdrun, trainer and tasker, so that trees can be measured in turns; empty: built from this tree")
	flag.StringVar(&p.tsv, "tsv", "", "file for all times that cases have measured")
	unshared := flag.Bool("unshared", false, "the process already has its own mount namespace")
	flag.Parse()
	if p.can = look(); p.can.root && !*unshared && !p.list {
		if err := unshare(); err != nil {
			fmt.Fprintln(os.Stderr, "jobs: without a mount namespace:", err)
		}
	}
	return p.run(ctx)
}

// unshare re-executes this program in its own mount namespace, whose mounts end with it.
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

// prover has the flags and the state that all cases share.
type prover struct {
	prove.Run
	kind     string
	small    bool
	list     bool
	keep     bool
	built    string
	tsv      string
	given    setup // the fields whose flags are given
	can      can
	programs follow.Programs
	help     string
	dir      string
	tally    tally
}

// wants reports whether a case is selected.
func (p *prover) wants(s setup) bool {
	return (p.kind == "" || p.kind == s.Kind) && (!p.small || s.small())
}

func (p *prover) run(ctx context.Context) (err error) {
	if p.kind != "" && !slices.ContainsFunc(kinds, func(k kind) bool { return k.name == p.kind }) {
		return fmt.Errorf("%q is not a kind of case; the kinds are: %s", p.kind, names())
	}
	if p.list {
		p.print()
		return nil
	}
	// The files of cases that fail outlive the sandbox.
	if p.dir, err = os.MkdirTemp("", "hvdrun-prove-jobs-"); err != nil {
		return err
	}
	leave, err := sandbox.Enter()
	if err != nil {
		return errors.Join(err, os.RemoveAll(p.dir))
	}
	defer func() { err = errors.Join(err, leave()) }()
	if p.programs, err = p.build(ctx); err != nil {
		return errors.Join(err, os.RemoveAll(p.dir))
	}
	help, err := exec.CommandContext(ctx, p.programs.Hvdrun, "help", "flags").CombinedOutput()
	if err != nil {
		return errors.Join(fmt.Errorf("hvdrun help flags: %w: %s", err, help), os.RemoveAll(p.dir))
	}
	p.help = string(help)
	p.tally.began = time.Now()
	p.tryAll(ctx)
	fmt.Print(p.tally.String())
	all := p.tally.all()
	all.print(os.Stdout)
	if p.tsv != "" {
		err = all.write(p.tsv)
	}
	if n := len(all.failed); n > 0 {
		return errors.Join(err, fmt.Errorf("%d cases failed; their files are in %s", n, p.dir))
	}
	if err = errors.Join(err, context.Cause(ctx)); p.keep && err == nil {
		fmt.Println("kept:", p.dir)
		return nil
	}
	return errors.Join(err, os.RemoveAll(p.dir))
}

// build returns the programs of jobs.
func (p *prover) build(ctx context.Context) (follow.Programs, error) {
	if p.built == "" {
		return follow.Build(ctx, p.dir)
	}
	in := func(name string) string { return filepath.Join(p.built, name) }
	return follow.Programs{Hvdrun: in("hvdrun"), Trainer: in("trainer"), Tasker: in("tasker")}, nil
}

// draw returns the case of a seed, with the fields that the flags set.
func (p *prover) draw(seed uint64) (setup, kind) {
	s, k := draw(seed)
	s.replace(flag.CommandLine)
	return s, k
}

// tryAll tries the selected cases until the time is over, or only the first with -one.
func (p *prover) tryAll(ctx context.Context) {
	seed := p.Seed
	for n := 0; p.More(n, time.Since(p.tally.began)) && ctx.Err() == nil; n++ {
		s, k := p.draw(seed)
		for !p.wants(s) && !p.One {
			seed++
			s, k = p.draw(seed)
		}
		seed++
		if k.needs == nil || k.needs(p.can) {
			p.try(ctx, s, k)
		} else {
			p.tally.skip(s)
		}
	}
}

// try tries a case and prints the result.
func (p *prover) try(ctx context.Context, s setup, k kind) {
	t := &trial{setup: s, can: p.can, programs: p.programs, help: p.help, dir: filepath.Join(p.dir, fmt.Sprint(s.Seed)), keep: p.keep}
	began := time.Now()
	err := t.try(ctx, k)
	if ctx.Err() != nil {
		return // an interrupted case is not a failure
	}
	took := time.Since(began)
	p.tally.add(s, took, t.jobs, t.findings, err)
	if len(t.counts) > 0 {
		t.note("%s", &t.findings)
	}
	if err == nil {
		fmt.Printf("%-6s seed %-5d %-10s %6.1f s  %s%s\n%s", "ok", s.Seed, s.Kind, took.Seconds(), s, t.notes, t.table)
		return
	}
	fmt.Print(prove.Failure{
		Room: "jobs", Seed: s.Seed, Args: s.replace(flag.CommandLine), Case: fmt.Sprintf("%s, after %.1f s: %s%s", s.Kind, took.Seconds(), s, t.notes), What: t.story(err), Files: t.dir,
	})
}

// shown is the number of lines of a job's output that a failure shows.
const shown = 10

// story returns the errors of a case and the end of its last job's output before the stacks,
// without audit records.
func (t *trial) story(err error) string {
	words := []string{err.Error()}
	if n := len(t.jobs); n > 0 {
		j := t.jobs[n-1]
		lines := slices.DeleteFunc(strings.Split(strings.TrimSpace(j.Tail), "\n"), func(line string) bool {
			return strings.Contains(line, "audit=") || strings.Contains(line, `"audit":`)
		})
		words = append(words, "the end of "+j.OutputPath()+":")
		for _, line := range lines[max(0, len(lines)-shown):] {
			words = append(words, "  "+line)
		}
	}
	return strings.Join(words, "\n")
}

func names() string {
	var all []string
	for _, k := range kinds {
		all = append(all, k.name)
	}
	return strings.Join(all, ", ")
}

// print lists the kinds and some cases.
func (p *prover) print() {
	for _, k := range kinds {
		fmt.Printf("%-10s %s\n", k.name, k.about)
	}
	for seed := p.Seed; seed < p.Seed+uint64(3*len(kinds)); seed++ {
		if s, _ := p.draw(seed); p.wants(s) {
			fmt.Printf("seed %-5d %-10s %s\n", seed, s.Kind, s)
		}
	}
}
