// Command collectives tests package collective with random programs of collective operations, run
// by real processes on several hosts of this machine and disturbed.
//
//	go run ./test/prove/collectives -for 10m
//	go run ./test/prove/collectives -cases 20
//	go run ./test/prove/collectives -seed 17 -one
//
// A seed determines a program (generate.go): hosts (addresses 127.0.0.1, 127.0.0.2, …), ranks,
// their connections, the steps of all ranks, and disturbances: small socket buffers, busy loops,
// suspended processes, late ranks, ranks that end the groups and write to their tensors at once.
// Results are compared bit by bit with those of one process (reference.go); invalid calls must be
// refused on every rank. A program in which no rank makes progress (ticks.go) hangs: each rank's
// activity, connections and stacks are reported, and the program is shrunk (shrink.go) to one that
// can be repeated with -program.
//
// Exit status: 0 success; 1 a program failed; 2 invalid flags; 130 interrupted.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/prove"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// Bounds on shrinking.
const (
	shrinkTime  = 4 * time.Minute
	shrinkTries = 3 // runs of a program that may fail intermittently
	shrunkCases = 3 // failures shrunk in a run; later ones are reported as they are
)

func main() { os.Exit(start()) }

func start() int {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "rank":
			if err := asRank(); err != nil {
				fmt.Fprintln(os.Stderr, "rank:", err)
				return 1
			}
			return 0
		case "busy":
			for spins := uint64(0); ; spins++ {
			}
		}
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	g := trials{}
	g.run.Flags(flag.CommandLine)
	file := flag.String("program", "", "file of a program in JSON, as it is printed, to do in place of those of seeds")
	times := flag.Int("times", 1, "how often the program of the file is done")
	flag.BoolVar(&g.keep, "whole", false, "do not shrink programs that fail")
	flag.BoolVar(&g.show, "show", false, "print the programs of the seeds in place of doing them")
	flag.BoolVar(&g.verbose, "v", false, "print a line for each program")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "collectives: nothing but flags")
		return 2
	}
	g.temp = os.TempDir()
	leave, err := sandbox.Enter()
	if err != nil {
		fmt.Fprintln(os.Stderr, "collectives:", err)
		return 1
	}
	if *file != "" {
		err = g.doFile(ctx, *file, *times)
	} else {
		err = g.doSeeds(ctx)
	}
	err = errors.Join(err, leave())
	g.tally.Print(os.Stdout)
	switch {
	case errors.Is(err, context.Canceled):
		return 128 + int(syscall.SIGINT)
	case err != nil:
		fmt.Fprintln(os.Stderr, "collectives:", err)
		return 1
	case g.tally.Failures() > 0:
		return 1
	}
	return 0
}

// trials is a run of cases.
type trials struct {
	run                 prove.Run
	keep, show, verbose bool
	tally               prove.Tally
	temp                string // for the files of failures, which outlive the sandbox
	narrowTold          bool
}

// doSeeds runs the programs of consecutive seeds.
func (g *trials) doSeeds(ctx context.Context) error {
	if !g.run.One {
		fmt.Printf("programs of the seeds from %d on\n", g.run.Seed)
	}
	began := time.Now()
	defer func() { g.tally.Took = time.Since(began) }()
	for number := 0; g.run.More(number, time.Since(began)); number++ {
		p := generate(g.run.Seed + uint64(number))
		if g.show {
			fmt.Printf("seed %d: %s", p.Seed, p)
			continue
		}
		if err := g.do(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// doFile runs the program in a file.
func (g *trials) doFile(ctx context.Context, file string, times int) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	p := new(program)
	if err := json.Unmarshal(text, p); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if len(p.Hosts) == 0 || len(p.Steps) == 0 {
		return fmt.Errorf("%s: a program needs hosts and steps", file)
	}
	p.tidy()
	for range times {
		if err := g.do(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// do runs a program and reports its failure.
func (g *trials) do(ctx context.Context, p *program) error {
	began := time.Now()
	o, err := conduct(ctx, p)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("seed %d: %w", p.Seed, err)
	}
	g.count(p, o)
	if g.verbose {
		fmt.Printf("seed %d: %v, %d ranks, %d MiB, %s\n", p.Seed, time.Since(began).Round(time.Millisecond), p.ranks(), o.bytes>>20, o.Class)
	}
	if o.Class == "" {
		return nil
	}
	g.tally.Fail(p.Seed, o.Class+": "+o.Text)
	files, err := g.write(p, o)
	if err != nil {
		return err
	}
	fmt.Print(prove.Failure{
		Room: "collectives", Seed: p.Seed, Case: fmt.Sprintf("%d ranks, after %v", p.ranks(), time.Since(began).Round(time.Millisecond)),
		What: o.Class + ": " + o.Text, Files: files,
	})
	if !g.keep && g.tally.Failures() <= shrunkCases {
		return g.shrink(ctx, p, o)
	}
	return nil
}

// write writes the program of a failure, and what is known of its ranks, into a new folder.
func (g *trials) write(p *program, o outcome) (folder string, err error) {
	text, err := json.Marshal(p)
	if err != nil {
		return "", err
	}
	if folder, err = os.MkdirTemp(g.temp, fmt.Sprintf("hvdrun-prove-collectives-%d-", p.Seed)); err != nil {
		return "", err
	}
	return folder, errors.Join(os.WriteFile(filepath.Join(folder, "program"), text, 0o666),
		os.WriteFile(filepath.Join(folder, "report"), fmt.Appendf(nil, "%s: %s\n%s%s", o.Class, o.Text, p, o.Details), 0o666))
}

// shrink finds a smaller program that fails in the same way, and reports it.
func (g *trials) shrink(ctx context.Context, p *program, o outcome) error {
	end := time.Now().Add(shrinkTime)
	runs := 0
	last := o
	fails := func(q *program) bool {
		for range shrinkTries {
			runs++
			got, err := conduct(ctx, q)
			if err == nil && got.Class == o.Class {
				last = got
				return true
			}
		}
		return false
	}
	small := shrink(p, o.step, fails, func() bool { return ctx.Err() == nil && time.Now().Before(end) })
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	files, err := g.write(small, last)
	if err != nil {
		return err
	}
	fmt.Printf("  the smallest of %d runs that fails: %s: %s\n  repeat it by:  go run ./test/prove/collectives -program %s/program -times 10\n", runs, last.Class, last.Text, files)
	return nil
}

// count counts a completed program.
func (g *trials) count(p *program, o outcome) {
	t := &g.tally
	t.Cases++
	t.Operations += o.operations
	t.Bytes += o.bytes
	t.Count("hosts", fmt.Sprint(len(p.Hosts)))
	for _, n := range p.Hosts {
		t.Count("ranks of a host", fmt.Sprint(n))
	}
	t.Count("transport", p.transport())
	t.Count("connections", fmt.Sprint(max(1, p.Connections)))
	for i := range p.Steps {
		s := &p.Steps[i]
		t.Count("operation", s.Do)
		t.Count("mode", s.mode())
		t.Count("size", s.sizeClass())
		if s.Alloc {
			t.Count("memory", "allocated")
		}
	}
	for _, d := range p.Disturbed {
		t.Count("disturbed by", d.Kind)
	}
	if p.Busy > 0 {
		t.Count("disturbed by", "busy loops")
	}
	if p.Procs > 0 {
		t.Count("disturbed by", "GOMAXPROCS=1")
	}
	switch {
	case p.Buffers > 0 && o.narrow == nil:
		t.Count("disturbed by", "small buffers")
	case p.Buffers > 0 && !g.narrowTold:
		g.narrowTold = true
		fmt.Printf("NOT done: small socket buffers, they cannot be had here: %v\n", o.narrow)
	}
}
