package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/test/report"
)

// part is a part of check all: a target of the Makefile.
type part struct {
	name string
	args []string // of make
	what string
	// lacks returns the reason why the part cannot run here, or "". If nil, the part can run
	// anywhere.
	lacks func() string
}

// parts are the parts of check all, the quick ones first.
var parts = []part{
	{"fresh", []string{"fresh"}, "generated code and the list of licences are what their generators write", nil},
	{"costs", []string{"check-costs"}, "what every change must pass, and no package's tests are over their limit", nil},
	{"cross", []string{"cross"}, "everything compiles for arm64, and without cgo", nil},
	{"tests", []string{"test"}, "all tests, all rounds, under the race detector where goroutines meet", nil},
	{"frameworks", []string{"frameworks"}, "the modules of frameworks and their examples", nil},
	{"kubernetes-plugin", []string{"kubernetes"}, "the plugin for Kubernetes, all rounds", nil},
	{"calls", []string{"check-calls"}, "jobs to which the kernel refuses a system call", nil},
	{"net", []string{"check-net"}, "jobs over hosts that are network namespaces", needsNamespaces},
	{"torch", []string{"check-torch"}, "PyTorch programs, with this Debian's torch", needsRoot},
	{"torch-trixie", []string{"check-torch", "SUITE=trixie"}, "the same with torch 2.6 of Debian trixie", needsRoot},
	{"torch-sid", []string{"check-torch", "SUITE=sid"}, "the same with the newest torch of Debian sid", needsRoot},
	{"slurm", []string{"check-slurm"}, "jobs that ask a real Slurm for nodes", needsRoot},
	{"metrics", []string{"check-metrics"}, "a real Prometheus scrapes a job", needsRoot},
	{"page", []string{"check-page"}, "the page in a browser", needsRoot},
	{"kubernetes", []string{"check-kubernetes"}, "jobs on a real API server, with Kueue", needsRoot},
	{"release", []string{"check-release"}, "the files of a release, where there is no Go", needsRoot},
	{"deb", []string{"check-deb"}, "the Debian package, in a fresh Debian", needsRoot},
	{"systemd", []string{"check-systemd"}, "the package's units, under systemd", needsRoot},
	{"container", []string{"check-container"}, "the container's image", needsRoot},
	{"drivers", []string{"chaos-drivers"}, "a job whose driver is killed 100 times", nil},
	{"commits", []string{"chaos-commits"}, "workers killed at 500 moments of a commit", nil},
	{"steps", []string{"chaos-steps"}, "workers, spares and hvdrun killed in 50 jobs", nil},
	{"prove", []string{"prove"}, "random jobs and programs of collectives, PROVE of each", nil},
	{"recovery", []string{"bench-recovery"}, "recovery from deaths, and growth, measured", nil},
	{"scale", []string{"bench-scale"}, "a driver with 100, 300 and 1,000 workers", nil},
	// A number of inputs, since go test may report the end of a time as a failure.
	{"fuzz", []string{"fuzz", "FUZZTIME=20000x"}, "parsers of foreign bytes, 20,000 inputs each", nil},
	{"gpu", []string{"gpu-check"}, "collectives on GPUs", needsGPU},
}

func needsRoot() string {
	if os.Geteuid() != 0 {
		return "needs root, to install packages"
	}
	return ""
}

func needsNamespaces() string {
	if err := exec.Command("unshare", "--net", "true").Run(); err != nil {
		return "network namespaces cannot be made here"
	}
	return ""
}

func needsGPU() string {
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		return "there is no GPU here"
	}
	return ""
}

// all runs the named parts, or all of them if names is empty. It prints a line for each and a table
// at the end. It continues after a failure.
func all(ctx context.Context, names []string) error {
	chosen, err := choose(names)
	if err != nil {
		return err
	}
	logs := filepath.Join("bin", "check-all")
	if err := os.MkdirAll(logs, 0o777); err != nil {
		return err
	}
	table := report.Table{{"part", "verdict", "wall s", "processor s", "what"}}
	failed := 0
	for _, p := range chosen {
		verdict, wall, processor := p.run(ctx, filepath.Join(logs, p.name+".txt"))
		if strings.HasPrefix(verdict, "FAILED") {
			failed++
		}
		fmt.Printf("%-18s %s: %.0f s, %.0f processor seconds\n", p.name, verdict, wall.Seconds(), processor.Seconds())
		table.Add(p.name, verdict, int(wall.Seconds()), int(processor.Seconds()), p.what)
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Printf("\n%s\n", table.Text())
	if failed > 0 {
		return fmt.Errorf("%d parts failed; their outputs are in %s", failed, logs)
	}
	return ctx.Err()
}

func choose(names []string) ([]part, error) {
	if len(names) == 0 {
		return parts, nil
	}
	var chosen []part
	for _, name := range names {
		i := slices.IndexFunc(parts, func(p part) bool { return p.name == name })
		if i < 0 {
			return nil, fmt.Errorf("there is no part %q; go run ./test/check parts lists them", name)
		}
		chosen = append(chosen, parts[i])
	}
	return chosen, nil
}

// run runs a part and writes its output to a file. If the part fails, run prints the end of that
// file.
func (p part) run(ctx context.Context, path string) (verdict string, wall, processor time.Duration) {
	if p.lacks != nil {
		if why := p.lacks(); why != "" {
			return "left out: " + why, 0, 0
		}
	}
	start, before := time.Now(), processorTime()
	err := p.write(ctx, path)
	wall, processor = time.Since(start), processorTime()-before
	if err == nil {
		return "ok", wall, processor
	}
	if text, readErr := os.ReadFile(path); readErr == nil {
		lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
		fmt.Printf("\n== FAILED: %s\n%s\nto repeat it:\n    make %s\nits output: %s\n\n", p.name,
			strings.Join(lines[max(0, len(lines)-40):], "\n"), strings.Join(p.args, " "), path)
	}
	return fmt.Sprintf("FAILED (%v)", err), wall, processor
}

func (p part) write(ctx context.Context, path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	cmd := command(ctx, "make", append([]string{"--no-print-directory"}, p.args...)...)
	// This program runs without cgo; parts run under the race detector, which needs it.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "CGO_ENABLED=") || strings.HasPrefix(v, "GOFLAGS=")
	})
	cmd.Stdout, cmd.Stderr = f, f
	cmd.WaitDelay = time.Minute // a part that has ended leaves no process that still writes
	err = cmd.Run()
	if state := cmd.ProcessState; state != nil && state.Sys().(syscall.WaitStatus).Signaled() && ctx.Err() != nil {
		err = ctx.Err()
	}
	return errors.Join(err, f.Close())
}
