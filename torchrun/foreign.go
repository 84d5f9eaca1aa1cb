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

// errTorch: another program than hvdrun is at the other end.
var errTorch = errors.New("PyTorch's torchrun is there, whose agents speak another protocol: start all nodes of the job " +
	"by hvdrun torchrun, or all by torchrun")

// refused returns why a connection is refused whose first bytes were not what an agent says: err,
// or errTorch.
func refused(err error) error {
	if plain, is := errors.AsType[tls.RecordHeaderError](err); is && tcpstore.IsQuery(plain.RecordHeader[:]) {
		return errTorch
	}
	return err
}

// strangers finds out who answers at an address where no agent of hvdrun does. The zero value is
// ready.
type strangers struct{ failed retry.Row }

// who returns err, with which an attempt to reach an agent has failed, or that PyTorch's torchrun
// or another program of this machine is there, which is final. It asks at the first failure of each
// kind, and then ever more seldom.
func (s *strangers) who(ctx context.Context, addr string, err error) (found error, final bool) {
	if isRefused(err) || ctx.Err() != nil || !s.failed.Failed(time.Now(), err) {
		return err, false
	}
	at, here := hereAt(ctx, addr)
	pid, program := 0, ""
	if here {
		pid, program = proc.Listener(at)
	}
	agent := pid != 0 && mayBeAgent(program) // which may be of this job
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

// errInUse is of a port that another program has.
var errInUse = errors.New("is in use by another program")

func inUseBy(addr string, pid int, program string) error {
	return fmt.Errorf("torchrun: %s %w of this machine, process %d (%s): choose another port, for all nodes", addr, errInUse, pid, program)
}

// inUse returns an error if another program of this machine than an agent listens at the address,
// as far as this process may look at it.
func inUse(ctx context.Context, addr string) error {
	at, here := hereAt(ctx, addr)
	if !here {
		return nil
	}
	pid, program := proc.Listener(at)
	if pid == 0 || mayBeAgent(program) || mayBeTorch(program) {
		return nil // the first connection tells more
	}
	return inUseBy(addr, pid, program)
}

// hereAt returns the address of host:port where it is one of this machine.
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

// mayBeAgent returns whether a program of that name may be one like this: another build of hvdrun,
// or what this process runs.
func mayBeAgent(program string) bool {
	return strings.HasPrefix(program, "hvdrun") || program == proc.Program(os.Getpid())
}

// mayBeTorch returns whether a program of that name may be PyTorch's torchrun, which a Python
// interpreter runs.
func mayBeTorch(program string) bool { return strings.HasPrefix(program, "python") }

// isOther returns whether an agent would not have failed so: what answers speaks no TLS, or nothing
// answers although the connection is taken.
func isOther(err error) bool {
	_, plain := errors.AsType[tls.RecordHeaderError](err)
	return plain || errors.Is(err, errOtherProgram) || errors.Is(err, errSilentStore)
}

// isTorchStore returns whether a TCPStore of PyTorch answers at an address.
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
