package collective

import (
	"testing"

	"github.com/hvdrun/hvdrun/collective/internal/operation"
)

// TestAheadOfOneReceived: a message that the receiver has, and of which the sender does not know
// that yet, takes no room of those that are sent ahead.
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
