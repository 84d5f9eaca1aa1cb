package collective

import (
	"testing"
	"testing/synctest"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// TestAheadOfOneReceived: a message that the receiver has taken does not count towards the limit of
// messages sent ahead, even before the sender knows that.
func TestAheadOfOneReceived(t *testing.T) {
	p := &point{busy: true}
	if !p.sendAhead(message{do: operation.Send, data: make([]byte, 1)}) {
		t.Fatal("the first message is refused")
	}
	p.busy = false
	if p.next(nil) == nil {
		t.Fatal("no message is under way")
	}
	for i := range mostAhead / sentAhead {
		if !p.sendAhead(message{do: operation.Send, data: make([]byte, sentAhead)}) {
			t.Fatalf("message %d is refused", i)
		}
	}
	if p.sendAhead(message{do: operation.Send, data: make([]byte, 1)}) {
		t.Error("the bound is exceeded")
	}
}

// TestAheadIsFullMeanwhile: a message begins on an idle lane, but others have meanwhile used all
// memory for copies. It waits for the receiver.
func TestAheadIsFullMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		groups := Local(2)
		p, err := groups[0].point(pointKey{peer: 1, out: true})
		if err != nil {
			t.Fatal(err)
		}
		p.ahead = mostAhead
		received := make(chan error)
		got := []byte{0}
		go func() { received <- Recv(t.Context(), groups[1], got, 0) }()
		if err := Send(t.Context(), groups[0], []byte{7}, 1); err != nil {
			t.Error(err)
		}
		if err := <-received; err != nil || got[0] != 7 {
			t.Errorf("%v, %v", got, err)
		}
		go groups[1].Close()
		if err := groups[0].Close(); err != nil {
			t.Error(err)
		}
	})
}
