package scaler

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

// CheckAddress returns an error if the address of a scheduler is not valid.
func CheckAddress(address string) error {
	_, _, err := zmtp.Split(address)
	return err
}

// Probe returns whether a scheduler of Scaler 1.7.14 answers at an address within a time: it joins
// as a worker, and leaves.
func Probe(ctx context.Context, address string, within time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("it does not answer as Scaler 1.7.14 does within %v", within))
	defer cancel()
	identity := newIdentity("probe")
	socket, err := dial(ctx, address, identity, 1<<20)
	if err != nil {
		return fmt.Errorf("scaler: no scheduler at %s: %w", address, err)
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, func() { socket.Close() })()
	for _, m := range []Message{&Heartbeat{Processors: []Processor{{Initialized: true}}}, &DisconnectRequest{identity}} {
		if err == nil {
			err = socket.Send(Encode(m))
		}
	}
	for err == nil {
		var frames [][]byte
		if frames, err = socket.Recv(); err != nil {
			break
		}
		if m, bad := Decode(frames); bad == nil {
			switch m.(type) {
			case *HeartbeatEcho, *DisconnectResponse:
				return nil
			}
		}
	}
	switch cause := context.Cause(ctx); {
	case cause != nil:
		err = cause
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		err = fmt.Errorf("%w: it may be Scaler 1.8 or later, which ends at such a message; 1.7.14 is wanted", err)
	}
	return fmt.Errorf("scaler: no scheduler at %s: %w", address, err)
}
