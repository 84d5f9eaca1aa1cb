package sockets

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

// TestJudge: before the first operation, the end of a control channel proves nothing if a lower
// rank can have broken off its dial. It ends the group if the peer's host does not answer.
func TestJudge(t *testing.T) {
	for _, test := range []struct {
		rank int // rank of this side
		err  error
		lost bool
	}{
		{1, io.EOF, false},
		{1, io.ErrUnexpectedEOF, false},
		{1, syscall.ECONNRESET, false},
		{1, syscall.ETIMEDOUT, true},
		{1, syscall.EHOSTUNREACH, true},
		{1, frame.Err, true},
		{0, io.EOF, true}, // a higher rank does not dial this channel
	} {
		t.Run(fmt.Sprint("rank ", test.rank, " ", test.err), func(t *testing.T) {
			p := alone(test.rank)
			peer := 1 - test.rank
			p.links[peer].judge(fmt.Errorf("read: %w", test.err))
			fails := p.group.(*group).fails
			if (len(fails) > 0) != test.lost {
				t.Fatalf("the group has failed with %v", fails)
			}
			if test.lost && (len(fails[0].Dead) != 1 || fails[0].Dead[0] != peer) {
				t.Errorf("%v is named", fails[0].Dead)
			}
			p.Release() // also stops the timer
			if got := p.links[peer].silent; !test.lost && !errors.Is(got, test.err) {
				t.Errorf("%v is kept for the verdict", got)
			}
		})
	}
}

// TestReleaseOfFailing: while another goroutine notifies the ranks of a failure, Release closes no
// connection.
func TestReleaseOfFailing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := alone(0)
		own, peer := net.Pipe()
		defer peer.Close()
		p.links[1].control = &conn{Conn: own, raw: own}
		g := p.group.(*group)
		g.over = true
		go p.Release()
		synctest.Wait()
		notice := frame.Gone(io.EOF, 1)
		go p.Flood(&notice)
		if n, err := io.ReadFull(peer, make([]byte, frame.HeaderSize)); err != nil {
			t.Errorf("the peer receives %d bytes of the notice: %v", n, err)
		}
		peer.Close()
		close(g.failed)
		synctest.Wait()
		if !p.over() {
			t.Error("the connections are not released after every rank has been notified")
		}
	})
}
