// Command scale measures a driver of many workers.
//
//	go run ./test/scale -sizes 100,300,1000
//
// The driver is real, with a journal on disk, in its own process. Its workers are goroutines of
// another process: they have credentials, join through the rendezvous client over TLS and run the
// notification service, but compute nothing and are not connected to each other: all leave a world
// together when each has received an update, or when some of them die. Both processes run on this
// machine, so times include the workers' share; the driver's memory and CPU time are reported
// separately.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if role := os.Getenv(roleVariable); role != "" {
		err = play(ctx, role)
	} else {
		err = measure(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		stop()
		os.Exit(1)
	}
}

// The processes of a job run this program, with their role in the environment.
const (
	roleVariable = "HVDRUN_CROWD_ROLE"
	roleDriver   = "driver"
	roleWorkers  = "workers"
)

// workersMemory is the heap size, in bytes, at which the workers' process begins to collect
// garbage.
const workersMemory = 2 << 30

// play runs the role of a process of a job.
func play(ctx context.Context, role string) error {
	switch role {
	case roleDriver:
		var sc scenario
		if err := json.NewDecoder(os.Stdin).Decode(&sc); err != nil {
			return err
		}
		s, err := sc.run(ctx)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(s)
	case roleWorkers:
		// A real worker collects only its own garbage. The shared heap of all workers would be
		// scanned again and again, at the expense of the driver's CPU time.
		debug.SetGCPercent(-1)
		debug.SetMemoryLimit(workersMemory)
		return serveWorkers(ctx, os.Stdin, os.Stdout)
	}
	return fmt.Errorf("the role %q is unknown", role)
}

func measure(ctx context.Context) error {
	list := flag.String("sizes", "100,300,1000", "numbers of workers")
	rounds := flag.Int("rounds", 3, "how often each is measured; medians are printed")
	var sc scenario
	flag.StringVar(&sc.Profile, "profile", "", "file for a profile of the driver's processor, of the last job")
	flag.BoolVar(&sc.Verbose, "verbose", false, "print the driver's log")
	flag.Parse()
	var sizes []int
	for _, text := range strings.Split(*list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 10 {
			return fmt.Errorf("%q is not a number of workers of at least 10", text)
		}
		sizes = append(sizes, n)
	}
	slices.Sort(sizes)
	rows := make([]sample, len(sizes))
	for i, n := range sizes {
		sc.Workers = n
		var samples []sample
		for range *rounds {
			s, err := job(ctx, sc)
			if err != nil {
				return fmt.Errorf("%d workers: %w", n, err)
			}
			samples = append(samples, s)
		}
		rows[i] = median(samples)
	}
	write(os.Stdout, sizes, rows)
	return nil
}

// job runs a job in a separate process.
func job(ctx context.Context, sc scenario) (s sample, err error) {
	cmd, err := self(ctx, roleDriver)
	if err != nil {
		return s, err
	}
	text, err := json.Marshal(sc)
	if err != nil {
		return s, err
	}
	cmd.Stdin = bytes.NewReader(text)
	out, err := cmd.Output()
	if err != nil {
		return s, fmt.Errorf("the driver's process: %w", err)
	}
	return s, json.Unmarshal(out, &s)
}

// self returns a command that runs this program in another role; it ends with ctx.
func self(ctx context.Context, role string) (*exec.Cmd, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return ignoreDone(cmd.Process.Signal(syscall.SIGTERM)) }
	return cmd, nil
}

func ignoreDone(err error) error {
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}
