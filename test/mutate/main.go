// Command mutate measures what tests notice: it changes random places of packages, one at a time,
// and reports the changes (mutants) with which all tests still pass.
//
//	go run ./test/mutate -packages ./driver/decide,./elastic -n 12 -seed 1
//	go run ./test/mutate -packages ./elastic -tests ./elastic/elastictest
//
// A mutant is compiled through an overlay: no file of the tree is touched. The package's own tests
// run with -short until the first fails, then those of -tests. A mutant is killed if a test fails,
// hangs, or takes much more processor time than without it; it has survived otherwise, and its
// change is printed as a diff. A mutant that does not compile does not count, and another one is
// drawn for it.
//
// The choice depends on the seed and, for each place, on its function alone: changes elsewhere in
// the package leave it as it is. Exit status: 0 done, with or without survivors; 1 the tests fail
// without a mutant, or cannot be run; 2 invalid flags.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/report"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func main() {
	runtime.LockOSThread() // the tests are killed when this thread ends, and it ends last
	os.Exit(start())
}

func start() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var r run
	packages := flag.String("packages", "", "packages to change, separated by commas")
	tests := flag.String("tests", "", "packages whose tests are run besides those of the changed package, separated by commas")
	flag.IntVar(&r.count, "n", 12, "mutants of each package")
	flag.Uint64Var(&r.seed, "seed", 1, "seed of the choice")
	flag.DurationVar(&r.limit, "timeout", 2*time.Minute, "wall time after which the tests of a package count as hanging")
	flag.Parse()
	if *packages == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "mutate: -packages is needed, and nothing but flags")
		return 2
	}
	leave, err := sandbox.Enter()
	if err == nil {
		err = errors.Join(r.all(ctx, list(*packages), list(*tests)), leave())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		return 1
	}
	return 0
}

func list(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

// run is the flags of a run and its table.
type run struct {
	count int
	seed  uint64
	limit time.Duration
	dir   string // of the overlay and the tests' programs
}

// verdicts counts the mutants of a package.
type verdicts struct {
	killed, survived, broken int
	used                     time.Duration // of the processor
}

// all changes one package after the other and prints the table.
func (r *run) all(ctx context.Context, packages, tests []string) (err error) {
	if r.dir, err = os.MkdirTemp("", "mutate-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	var table report.Table
	table.Add("package", "killed", "survived", "not compiled", "processor seconds")
	for _, name := range packages {
		v, err := r.one(ctx, name, tests)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		table.Add(name, v.killed, v.survived, v.broken, fmt.Sprintf("%.1f", v.used.Seconds()))
	}
	fmt.Print("\n", table.Text())
	return nil
}

// one changes one package.
func (r *run) one(ctx context.Context, name string, tests []string) (v verdicts, err error) {
	p, err := load(ctx, name)
	if err != nil {
		return v, err
	}
	suites := []*suite{{pkg: *p}}
	for _, test := range tests {
		q, err := load(ctx, test)
		if err != nil {
			return v, err
		}
		suites = append(suites, &suite{pkg: *q})
	}
	for _, s := range suites {
		if err := r.calibrate(ctx, s); err != nil {
			return v, err
		}
		v.used += s.used
	}
	all, err := p.mutants()
	if err != nil {
		return v, err
	}
	choose(all, r.seed)
	for _, m := range all {
		if v.killed+v.survived == r.count {
			break
		}
		o, err := r.try(ctx, m, suites)
		if err != nil {
			return v, err
		}
		v.used += o.used
		switch {
		case !o.compiles:
			v.broken++
			continue
		case o.killer != "":
			v.killed++
			fmt.Printf("killed   %s by %s, %.1f s\n", m, o.killer, o.used.Seconds())
		default:
			v.survived++
			fmt.Printf("SURVIVED %s, %.1f s\n%s", m, o.used.Seconds(), m.diff())
		}
	}
	return v, nil
}
