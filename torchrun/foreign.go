package torchrun

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// errTorch means that the program at the other end is PyTorch's torchrun.
var errTorch = errors.New("PyTorch's torchrun is there, whose agents speak another protocol: start all nodes of the job " +
	"by hvdrun torchrun, or all by torchrun")

// refused returns the reason why a connection is refused if its first bytes were not those of an
// agent: err or errTorch.
func refused(err error) error {
	if plain, is := errors.AsType[tls.RecordHeaderError](err); is && tcpstore.IsQuery(plain.RecordHeader[:]) {
		return errTorch
	}
	return err
}

// reach calls try, which uses the agent at addr, until it succeeds or returns ErrClosed, or ctx
// ends. It logs failures once they have lasted for a while, and then less and less often; what
// names the agent. If it finds that PyTorch's torchrun or another program of this machine is at the
// address, it returns an error that says so.
func (p *Peers) reach(ctx context.Context, addr, what string, try func() error) error {
	if err := inUse(ctx, addr); err != nil {
		return err
	}
	failures := retry.Row{Least: retryTell, Quiet: retryQuiet}
	var others strangers
	for {
		err := try()
		if err == nil || errors.Is(err, ErrClosed) {
			return err
		}
		err, final := others.who(ctx, addr, err)
		switch cause := context.Cause(ctx); {
		case final, cause != nil && errors.Is(err, cause):
			return err
		case errors.Is(err, errSilentStore):
			err = errOtherProgram
		}
		if errors.Is(err, errOtherProgram) {
			failures.Quiet = 0
		}
		if ctx.Err() == nil {
			failures.Warn(p.log, time.Now(), "torchrun: "+what+" is not reached at "+addr, err)
		}
		if cause := retry.Pause(ctx, retryPause); cause != nil {
			return fmt.Errorf("%w; the last attempt: %w", cause, err)
		}
	}
}

const (
	// retryPause is the pause between two attempts to reach another agent.
	retryPause = 200 * time.Millisecond
	// Failures to reach another agent are logged once they have lasted for retryQuiet, and at most
	// every retryTell.
	retryQuiet = 2 * time.Second
	retryTell  = 10 * time.Second
)

// strangers finds out which program answers at an address at which no agent of hvdrun answers. The
// zero value is ready to use.
type strangers struct{ failed retry.Row }

// who examines an attempt to reach an agent that has failed with err. It returns err or, if it
// finds that PyTorch's torchrun or another program of this machine is at the address, an error that
// says so and is final. It examines the first failure of each kind, and later failures less and
// less often.
func (s *strangers) who(ctx context.Context, addr string, err error) (found error, final bool) {
	if isRefused(err) || ctx.Err() != nil || !s.failed.Failed(time.Now(), err) {
		return err, false
	}
	at, here := hereAt(ctx, addr)
	pid, program := 0, ""
	if here {
		pid, program = proc.Listener(at)
	}
	agent := pid != 0 && mayBeAgent(program) // it may be an agent of this job
	switch {
	case (pid == 0 || agent || mayBeTorch(program)) && isTorchStore(ctx, addr):
		return fmt.Errorf("torchrun: %s: %w", addr, errTorch), true
	case agent:
		return err, false
	case pid != 0:
		return inUseBy(addr, pid, program), true
	case here && ctx.Err() == nil && isOther(err):
		return fmt.Errorf("torchrun: %s %w of this machine: %w", addr, errInUse, err), true
	}
	return err, false
}

// errInUse is the error for a port that another program uses.
var errInUse = errors.New("is in use by another program")

func inUseBy(addr string, pid int, program string) error {
	return fmt.Errorf("torchrun: %s %w of this machine, process %d (%s): choose another port, for all nodes", addr, errInUse, pid, program)
}

// inUse returns an error if a program of this machine that is not an agent listens at the address,
// as far as this process can see that.
func inUse(ctx context.Context, addr string) error {
	at, here := hereAt(ctx, addr)
	if !here {
		return nil
	}
	pid, program := proc.Listener(at)
	if pid == 0 || mayBeAgent(program) || mayBeTorch(program) {
		return nil // the first connection shows more
	}
	return inUseBy(addr, pid, program)
}

// hereAt returns the address that host:port resolves to, if it belongs to this machine.
func hereAt(ctx context.Context, addr string) (at netip.AddrPort, here bool) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return at, false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return at, false
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil || len(all) == 0 || !identity.IsOwn(all[0].Unmap()) {
		return at, false
	}
	return netip.AddrPortFrom(all[0].Unmap(), uint16(n)), true
}

// mayBeAgent reports whether a program with the given name may be an agent: another build of
// hvdrun, or the program that this process runs.
func mayBeAgent(program string) bool {
	return strings.HasPrefix(program, "hvdrun") || program == proc.Program(os.Getpid())
}

// mayBeTorch reports whether a program with the given name may be PyTorch's torchrun, which runs in
// a Python interpreter.
func mayBeTorch(program string) bool { return strings.HasPrefix(program, "python") }

// isOther reports whether the error cannot come from an agent: the other end does not speak TLS, or
// accepts the connection and does not answer.
func isOther(err error) bool {
	_, plain := errors.AsType[tls.RecordHeaderError](err)
	return plain || errors.Is(err, errOtherProgram) || errors.Is(err, errSilentStore)
}

// isTorchStore reports whether a TCPStore of PyTorch answers at an address.
func isTorchStore(ctx context.Context, addr string) bool {
	for _, older := range []bool{false, true} {
		if asksTorchStore(ctx, addr, older) == nil {
			return true
		}
	}
	return false
}

func asksTorchStore(ctx context.Context, addr string, older bool) error {
	ctx, cancel := context.WithTimeout(ctx, silentAfter)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	client, err := tcpstore.NewClient(conn, older)
	if err != nil {
		return err
	}
	if older {
		_, err = client.Len(ctx)
		return err
	}
	return client.Ping(ctx)
}
