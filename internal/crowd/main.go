// Command crowd measures how the driver bears many workers.
//
//	go run ./internal/crowd -sizes 100,300,1000
//
// The driver is a real one, with a journal on the disk, in a process of its own. Its workers are
// goroutines of another process: they have credentials, join by the rendezvous' client over TLS and
// run the notification service, but compute nothing and are not connected to each other: all leave
// a world at once when each has heard of an update, or when some of them die. Both processes are on
// this machine, so the times are those of all workers' part too; what the driver's process took of
// memory and processor is told apart.
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
		fmt.Fprintln(os.Stderr, "crowd:", err)
		stop()
		os.Exit(1)
	}
}

// The processes of a job are this program, with its role in the environment.
const (
	roleVariable = "HVDRUN_CROWD_ROLE"
	roleDriver   = "driver"
	roleWorkers  = "workers"
)

// workersMemory is how much the workers' process takes before it collects its garbage, in bytes.
const workersMemory = 2 << 30

// play is what the processes of a job do.
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
		// A worker has a process of its own, whose garbage is that of one. All in one process would
		// be looked through together, again and again, and take the processor from the driver.
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
			return fmt.Errorf("%q is no number of workers, of at least 10", text)
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
	report(os.Stdout, sizes, rows)
	return nil
}

// job runs a job in a process of its own.
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

// self returns a command that is this program in another role; it ends with ctx.
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
