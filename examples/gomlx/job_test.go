package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// programs builds hvdrun and this example once and returns their folder.
var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "fashion-")
	if err != nil {
		return "", err
	}
	for _, build := range []*exec.Cmd{
		{Dir: "../..", Args: []string{"go", "build", "-o", dir + "/hvdrun", "./cmd/hvdrun"}},
		{Dir: ".", Args: []string{"go", "build", "-o", dir + "/fashion", "."}},
	} {
		// Training under the race detector, if GOFLAGS enable it, takes ten times as long and tests
		// no code of this repository.
		build.Env = append(os.Environ(), "GOFLAGS=", "CGO_ENABLED=0")
		if build.Path, err = exec.LookPath("go"); err != nil {
			return dir, err
		}
		if out, err := build.CombinedOutput(); err != nil {
			return dir, fmt.Errorf("%v: %w\n%s", build.Args, err, out)
		}
	}
	return dir, nil
})

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

// outcome is the parsed output of a job.
type outcome struct {
	step       int              // last reported
	generation int              // of the last world
	size       int              // of the last world
	pids       map[int]int      // of the last world's ranks
	worlds     int              // entered
	digests    map[string][]int // of the variables at the end, with the ranks that print them
	accuracy   float64
}

var (
	worldLine    = regexp.MustCompile(`^\[\d+\]<stdout>:generation (\d+): rank (\d+) of (\d+), pid (\d+)$`)
	stepLine     = regexp.MustCompile(`^\[\d+\]<stdout>:epoch \d+  step (\d+)  loss .* size \d+$`)
	digestLine   = regexp.MustCompile(`^\[(\d+)\]<stdout>:digest ([0-9a-f]{16})$`)
	accuracyLine = regexp.MustCompile(`^\[0\]<stdout>:held-out accuracy (\d\.\d+)$`)
)

func number(s string) int {
	n, _ := strconv.Atoi(s) // the expression matches digits only
	return n
}

func (o *outcome) see(line string) {
	if m := worldLine.FindStringSubmatch(line); m != nil {
		if g := number(m[1]); g > o.generation {
			o.generation, o.size, o.pids = g, number(m[3]), map[int]int{}
			o.worlds++
		}
		if number(m[1]) == o.generation { // lines of different workers can be reordered
			o.pids[number(m[2])] = number(m[4])
		}
	} else if m := stepLine.FindStringSubmatch(line); m != nil {
		o.step = number(m[1])
	} else if m := digestLine.FindStringSubmatch(line); m != nil {
		o.digests[m[2]] = append(o.digests[m[2]], number(m[1]))
	} else if m := accuracyLine.FindStringSubmatch(line); m != nil {
		o.accuracy, _ = strconv.ParseFloat(m[1], 64)
	}
}

// act is executed when the job has reported the step.
type act struct {
	step int
	do   func(t *testing.T, o *outcome)
}

// kill kills the worker of the rank.
func kill(rank int) func(*testing.T, *outcome) {
	return func(t *testing.T, o *outcome) {
		pid := o.pids[rank]
		if pid == 0 {
			t.Errorf("rank %d is not there to be killed: %v", rank, o.pids)
			return
		}
		t.Logf("step %d: SIGKILL for rank %d", o.step, rank)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
}

// list is the path of a file with a list of hosts.
type list string

// set replaces the list atomically.
func (l list) set(lines ...string) error {
	fresh := string(l) + ".new"
	if err := os.WriteFile(fresh, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		return err
	}
	return os.Rename(fresh, string(l))
}

// becomes returns an act that replaces the list.
func (l list) becomes(lines ...string) func(*testing.T, *outcome) {
	return func(t *testing.T, o *outcome) {
		t.Logf("step %d: hosts are now %v", o.step, lines)
		if err := l.set(lines...); err != nil {
			t.Error(err)
		}
	}
}

// runJob runs hvdrun with the example until it ends, and executes the acts meanwhile.
func runJob(t *testing.T, limit time.Duration, acts []act, hvdrunFlags, flags []string) *outcome {
	t.Helper()
	dir, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	args := append([]string{"--blacklist-cooldown-range", "0.1,0.5", "--discovery-interval", "50ms", "--job-dir", filepath.Join(t.TempDir(), "job")}, hvdrunFlags...)
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "hvdrun"), append(append(args, "--", filepath.Join(dir, "fashion")), flags...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	output, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	cmd.Stdout, cmd.Stderr = write, write
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	write.Close()
	o := &outcome{digests: map[string][]int{}}
	var all strings.Builder
	for lines := bufio.NewScanner(io.TeeReader(output, &all)); lines.Scan(); {
		if testing.Verbose() {
			t.Log(lines.Text())
		}
		o.see(lines.Text())
		for len(acts) > 0 && o.step >= acts[0].step && len(o.pids) == o.size {
			acts[0].do(t, o)
			acts = acts[1:]
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("hvdrun: %v\n%s", err, &all)
	}
	if len(acts) > 0 {
		t.Errorf("the job was done before %d of the acts", len(acts))
	}
	if len(o.digests) != 1 || len(o.digests[o.digest()]) != o.size {
		t.Errorf("digests of the ranks' variables: %v, want one of all %d\n%s", o.digests, o.size, &all)
	}
	return o
}

// digest returns the digest of any rank.
func (o *outcome) digest() string {
	for d := range o.digests {
		return d
	}
	return ""
}

// alone are hvdrun's flags for the job that the others are compared with: one worker that nothing
// disturbs.
var alone = []string{"-np", "1", "-H", "localhost:1"}

// same fails the test unless both jobs have the same variables at the end, bit by bit, and have
// learned.
func (o *outcome) same(t *testing.T, undisturbed *outcome, accuracy float64) {
	t.Helper()
	if got, want := o.digest(), undisturbed.digest(); got != want {
		t.Errorf("variables have the digest %s, undisturbed %s", got, want)
	}
	if o.accuracy < accuracy {
		t.Errorf("held-out accuracy %.4f", o.accuracy)
	}
}

// TestDeath: a worker dies and is replaced before the others continue.
func TestDeath(t *testing.T) {
	data := write(t, stripes(320, 1), stripes(100, 2))
	epochs, ranks, accuracy := "10", 2, 0.9
	if testing.Short() {
		epochs, ranks, accuracy = "3", 1, 0
	}
	flags := []string{"-data", data, "-epochs", epochs, "-microbatches", "2", "-batch", "8", "-lr", "0.001", "-report-every", "10"}
	undisturbed := runJob(t, 10*time.Minute, nil, alone, flags)
	for rank := range ranks {
		t.Run(fmt.Sprintf("rank %d", rank), func(t *testing.T) {
			o := runJob(t, 10*time.Minute, []act{{20, kill(rank)}}, []string{"-np", "2", "--min-np", "2", "-H", "localhost:2"},
				append(flags, "-step-time", "3ms"))
			if o.worlds < 2 {
				t.Error("nobody has died")
			}
			o.same(t, undisturbed, accuracy)
		})
	}
}

// TestResizes: hosts are added and removed, and workers die, in a job that continues with the
// remaining workers. The last microbatch of an epoch is smaller.
func TestResizes(t *testing.T) {
	hosts := list(filepath.Join(t.TempDir(), "hosts"))
	if err := hosts.set("localhost:1"); err != nil {
		t.Fatal(err)
	}
	data := write(t, stripes(317, 1), stripes(100, 2))
	flags := []string{"-data", data, "-epochs", "12", "-microbatches", "4", "-batch", "2", "-report-every", "10"}
	undisturbed := runJob(t, 10*time.Minute, nil, alone, flags)
	o := runJob(t, 10*time.Minute, []act{
		{20, hosts.becomes("localhost:1", "127.0.0.2:2")},
		{100, kill(0)},
		{160, hosts.becomes("127.0.0.2:1")},
	}, []string{"-np", "1", "--min-np", "1", "--host-discovery-script", "cat " + string(hosts)}, append(flags, "-step-time", "20ms"))
	if o.worlds < 4 {
		t.Errorf("the job went through %d worlds", o.worlds)
	}
	o.same(t, undisturbed, 0.9)
}
