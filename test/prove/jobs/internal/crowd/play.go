// Package crowd measures a driver with many workers.
//
// The driver is real, with a journal on disk, in its own process. Each host is a process with a
// real job agent at its own loopback address; the driver reaches it like an agent on another
// machine. The workers are goroutines that the agent starts in its process. Like real workers, they
// have credentials, call the driver through the agent over their sockets and receive notifications,
// but they compute nothing and are not connected to each other: all leave a world together when
// each has received an update, or when some of them die. All processes run on this machine, so
// times include the share of agents and workers; the driver's memory and CPU time are reported
// separately.
package crowd

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
)

// The processes of a job run the same program as the one that starts them. It must call [Play] if
// Role is in its environment.
const (
	Role   = "HVDRUN_CROWD_ROLE"
	Driver = "driver" // with the arguments --events-file FILE --scenario JSON
	host   = "host"   // with the bytes of its memory
)

// The heap size, in bytes, at which a host's process begins to collect garbage: for each, and for
// all together.
const (
	hostMemory = 2 << 30
	allMemory  = 12 << 30
)

// Play runs the role of a process of a job.
func Play(ctx context.Context, role string, args []string) error {
	switch role {
	case Driver:
		return playDriver(ctx, args)
	case host:
		// A real worker collects only its own garbage. The shared heap of all workers would be
		// scanned again and again, at the expense of the driver's CPU time.
		memory, err := strconv.ParseInt(strings.Join(args, " "), 10, 64)
		if err != nil {
			return fmt.Errorf("crowd: %w", err)
		}
		debug.SetGCPercent(-1)
		debug.SetMemoryLimit(memory)
		conn, err := connOf(os.Stdin)
		if err != nil {
			return fmt.Errorf("crowd: %w", err)
		}
		return serveHost(ctx, conn)
	}
	return fmt.Errorf("crowd: the role %q is unknown", role)
}

func playDriver(ctx context.Context, args []string) error {
	f := flag.NewFlagSet(Driver, flag.ContinueOnError)
	path := f.String("events-file", "", "file for the driver's events")
	text := f.String("scenario", "", "the job in JSON")
	if err := f.Parse(args); err != nil {
		return err
	}
	var sc Scenario
	if err := json.Unmarshal([]byte(*text), &sc); err != nil {
		return fmt.Errorf("crowd: %w", err)
	}
	events, err := os.Create(*path)
	if err != nil {
		return err
	}
	s, err := sc.run(ctx, events)
	if err = errors.Join(err, events.Close()); err != nil {
		return err
	}
	result, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return os.WriteFile(sc.Result, result, 0o666)
}

// self returns a command that runs this program as one of this number of hosts, with one end of a
// connection. It ends with this process.
func self(conn *os.File, hosts int) (*exec.Cmd, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe, strconv.Itoa(min(hostMemory, allMemory/hosts)))
	cmd.Env = append(os.Environ(), Role+"="+host)
	cmd.Stdin, cmd.Stderr = conn, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, nil
}
