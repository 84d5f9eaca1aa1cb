package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// step is a part of check besides the tests: a command that must succeed. A silent step also fails
// if it prints something.
type step struct {
	name   string
	env    []string
	args   []string
	silent bool
}

// pure is the environment for everything that is not compiled for the race detector, so that each
// package is compiled at most twice.
var pure = []string{"CGO_ENABLED=0"}

// noDWARF makes compiling for the race detector cheaper. All that is compiled for it has this flag,
// because other flags would compile it once more.
const noDWARF = "-gcflags=all=-dwarf=false"

// modules are the modules that repeat requirements of the main module.
var modules = []string{"examples/discovery-plugin", "plugins/kubernetes", "test/browser", "frameworks/gomlx", "examples/gomlx"}

// before returns the steps that run first: they take seconds, and compile what the tests need.
func before() []step {
	steps := []step{{name: "gofmt", args: []string{"gofmt", "-l", "."}, silent: true}}
	for _, dir := range modules {
		steps = append(steps, step{name: "go mod tidy of " + dir, args: []string{"go", "-C", dir, "mod", "tidy", "-diff"}})
	}
	return append(steps,
		step{name: "go vet", env: pure, args: []string{"go", "vet", "./..."}},
		step{name: "staticcheck", env: pure, args: []string{"go", "tool", "staticcheck", "./..."}},
		step{name: "go vet for arm64, of what differs", env: append([]string{"GOARCH=arm64"}, pure...),
			args: []string{"go", "vet", "-gcflags=all=-N -l", "./internal/kernel", "./collective/internal/shm"}},
	)
}

// after returns the steps that run while tests wait: other modules, generated files, and a few
// cases of the proving grounds.
func after() []step {
	return []step{
		{name: "go vet of plugins/kubernetes", env: pure, args: []string{"go", "-C", "plugins/kubernetes", "vet", "."}},
		// What needs cgo is compiled only for the race detector: the tests have compiled much of it
		// already.
		{name: "go vet of libhvdrun", env: []string{"CGO_ENABLED=1"}, args: []string{"go", "vet", "-race", noDWARF, "./cmd/libhvdrun"}},
		{name: "tests of plugins/kubernetes", env: pure,
			args: []string{"go", "-C", "plugins/kubernetes", "test", "-vet=off", "-count=1", "-short", "-ldflags=-w", "."}},
		{name: "jobs in trouble", env: pure, args: []string{"go", "run", "./test/prove/jobs", "-small", "-cases", "3", "-seed", "2"}},
		{name: "random programs of collectives", env: pure,
			args: []string{"go", "run", "./test/prove/collectives", "-cases", "10", "-seed", "1"}},
	}
}

// check runs the checks that every change must pass. A package that takes much more processor time
// than its line allows gets a warning; this is an error only if costs is set, because processor
// time depends on the machine and on what else runs there.
func check(ctx context.Context, costs bool) error {
	start := time.Now()
	temp, err := os.MkdirTemp("", "hvdrun-check-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	c := checker{out: &printer{w: os.Stdout}, temp: temp}
	if c.root, err = os.Getwd(); err != nil {
		return err
	}
	if c.budget, err = parseBudget(budgetText); err != nil {
		return err
	}
	err = c.run(ctx)
	c.out.failures(c.tests.failures)
	all, readErr := readUsage(c.usageFile(), c.root)
	c.out.line("\nThe most expensive packages:\n%s", c.budget.costliest(all, 20))
	over := c.budget.exceeded(all)
	for _, text := range over {
		c.out.line("over its limit: %s", text)
	}
	if costs && len(over) > 0 {
		err = errors.Join(err, fmt.Errorf("%d packages take more processor time than their lines allow", len(over)))
	}
	c.out.line("make check: %.0f s, %.1f processor minutes with compiling", time.Since(start).Seconds(), processorTime().Minutes())
	c.out.line("%d passed, %d failed, %d skipped", c.tests.passed, c.tests.failed, c.tests.skipped)
	return errors.Join(err, readErr)
}

// processorTime returns the processor time of this process and of all processes that it started and
// waited for.
func processorTime() time.Duration {
	var sum time.Duration
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var used syscall.Rusage
		if err := syscall.Getrusage(who, &used); err != nil {
			panic(err) // only a wrong argument makes it fail
		}
		sum += time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	return sum
}

// checker runs check.
type checker struct {
	out    *printer
	temp   string // a folder
	root   string // of the module
	budget budget

	mu    sync.Mutex
	tests outcome
}

func (c *checker) usageFile() string { return filepath.Join(c.temp, "usage") }

func (c *checker) run(ctx context.Context) error {
	// Garbage collection is the largest avoidable cost of the compilers.
	for _, v := range [][2]string{{"GOGC", "400"}, {"GOMEMLIMIT", "2GiB"}, {"GORACE", "atexit_sleep_ms=10"}} {
		if os.Getenv(v[0]) == "" {
			if err := os.Setenv(v[0], v[1]); err != nil {
				return err
			}
		}
	}
	// The caller's flags would compile everything once more. With -trimpath, working trees share
	// what is compiled and analysed: none of it contains the path of its folder.
	if err := os.Setenv("GOFLAGS", "-trimpath"); err != nil {
		return err
	}
	if err := c.steps(ctx, before()); err != nil {
		return err // code that does not compile is not worth testing
	}
	suites, err := c.suites(ctx)
	if err != nil {
		return err
	}
	under, err := c.build(ctx)
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	errs := make([]error, len(suites)+1)
	for i, s := range suites {
		group.Go(func() {
			o, err := s.run(ctx, c.out, under)
			c.mu.Lock()
			defer c.mu.Unlock()
			c.tests.add(o)
			errs[i] = err
		})
	}
	group.Go(func() { errs[len(suites)] = c.steps(ctx, after()) })
	group.Wait()
	err = errors.Join(errs...)
	if c.tests.failed > 0 {
		err = errors.Join(err, fmt.Errorf("%d tests failed", c.tests.failed))
	}
	return err
}

// build builds this program for go test -exec, and returns the value of that flag.
func (c *checker) build(ctx context.Context) (string, error) {
	program := filepath.Join(c.temp, "check")
	cmd := command(ctx, "go", "build", "-o", program, "./test/check")
	cmd.Env = append(os.Environ(), pure...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return program + " under " + c.usageFile(), nil
}

func (c *checker) suites(ctx context.Context) ([]suite, error) {
	tags := ""
	if err := exec.CommandContext(ctx, "unshare", "--net", "true").Run(); err == nil {
		tags = "netns"
	} else {
		c.out.line("hosts in network namespaces are not tested: they cannot be made here (%v)", err)
	}
	dirs, err := packages(ctx, tags)
	if err != nil {
		return nil, err
	}
	byKind, err := c.budget.split(dirs)
	if tags == "" {
		err = nil // the table also has packages that exist only with namespaces
	}
	short := []string{"-short", "-tags=" + tags, "-ldflags=-w"}
	return []suite{
		{kind: plain, args: short, env: pure, dirs: byKind[plain], process: 3},
		{kind: race, args: append([]string{"-race", noDWARF}, short...), env: []string{"CGO_ENABLED=1"},
			dirs: byKind[race], process: 2},
	}, err
}

// steps runs steps one after the other, prints a line for each, and returns all failures.
func (c *checker) steps(ctx context.Context, steps []step) error {
	var errs []error
	for _, s := range steps {
		cmd := command(ctx, s.args[0], s.args[1:]...)
		cmd.Env = append(os.Environ(), s.env...)
		out, err := cmd.CombinedOutput()
		if err == nil && s.silent && len(out) > 0 {
			err = errors.New("it found something")
		}
		if err != nil {
			repeat := strings.Join(append(append([]string(nil), s.env...), s.args...), " ")
			c.out.line("\n== FAILED: %s: %v\n%s\nto repeat it:\n    %s", s.name, err, strings.TrimRight(string(out), "\n"), repeat)
			errs = append(errs, fmt.Errorf("%s: %w", s.name, err))
			continue
		}
		c.out.line("%-8s %s", "ok", s.name)
	}
	return errors.Join(errs...)
}
