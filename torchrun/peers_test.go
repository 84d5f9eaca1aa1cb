package torchrun

import (
	"context"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// TestStoreThatIsFull: a warning says that the store refuses a worker's value; a failed connection
// causes none.
func TestStoreThatIsFull(t *testing.T) {
	log, logged := test.NewNullLogger()
	for _, c := range []struct {
		err   error
		warns int
	}{
		{nil, 0}, {io.ErrUnexpectedEOF, 0}, {&net.OpError{Op: "read", Err: syscall.ECONNRESET}, 0},
		{fmt.Errorf("set: %w", tcpstore.ErrFull), 1},
	} {
		logged.Reset()
		logServed(log, "a connection", c.err)
		warns := 0
		for _, e := range logged.AllEntries() {
			if e.Level == logrus.WarnLevel {
				warns++
			}
		}
		if warns != c.warns {
			t.Errorf("%v: %d warnings", c.err, warns)
		}
	}
}

// TestStoreEndsBeforeItIsReached: a worker whose node does not answer does not delay the end of the
// round.
func TestStoreEndsBeforeItIsReached(t *testing.T) {
	log, logged := test.NewNullLogger()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	peers, err := NewPeers(make([]byte, 32), "test", "", log)
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	defer peers.Close(over)
	s, err := ForwardStore(silent.Addr().String(), 0, peers, log)
	if err != nil {
		t.Fatal(err)
	}
	worker, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Close()
	far, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	s.Close()
	for _, e := range logged.AllEntries() {
		if e.Level <= logrus.WarnLevel {
			t.Errorf("it has waited: %s", e.Message)
		}
	}
}
