package torchrun

import (
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// TestStoreThatIsFull: that a store refuses what a worker sends is a warning, and that a connection
// has failed is none.
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
