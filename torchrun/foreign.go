package torchrun

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

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
// is there. It asks at the first failure of each kind, and then ever more seldom.
func (s *strangers) who(ctx context.Context, addr string, err error) (found error, torch bool) {
	if isRefused(err) || ctx.Err() != nil || !s.failed.Failed(time.Now(), err) || !isTorchStore(ctx, addr) {
		return err, false
	}
	return fmt.Errorf("torchrun: %s: %w", addr, errTorch), true
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
