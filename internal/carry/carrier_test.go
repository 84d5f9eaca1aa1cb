package carry

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/internal/wire/carrypb"
)

// made is a call of a worker, and its end.
type made struct {
	reply string
	err   error
}

// makes has a worker make a call, and waits until the carrier has it.
func (c *Carrier) makes(ctx context.Context, request string) <-chan made {
	before := c.calls()
	ended := make(chan made, 1)
	go func() {
		encoded, err := c.call(ctx, "/m", []byte(request))
		ended <- made{string(encoded.Materialize()), err}
	}()
	for c.calls() == before {
		<-c.wake
	}
	return ended
}

// calls returns how many calls there were.
func (c *Carrier) calls() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// TestCarrier: a call that no driver has answered is made at the next one, and one that its worker
// has given up is not.
func TestCarrier(t *testing.T) {
	c := NewCarrier()
	ctx, cancel := context.WithCancel(t.Context())
	kept := c.makes(t.Context(), "kept")
	told := c.makes(ctx, "given up")
	first := c.next()
	if len(first.GetCalls()) != 2 || c.next() != nil {
		t.Fatalf("%v", first)
	}
	unsent := c.makes(ctx, "given up before it was sent")
	cancel()
	for _, of := range []<-chan made{told, unsent} {
		if m := <-of; status.Code(m.err) != codes.Canceled {
			t.Error(m.err)
		}
	}
	second := c.next()
	if len(second.GetCalls()) > 0 || len(second.GetGivenUp()) != 1 {
		t.Errorf("%v", second)
	}
	c.restart() // by another stream
	third := c.next()
	if len(third.GetCalls()) != 1 || string(third.GetCalls()[0].GetRequest()) != "kept" || len(third.GetGivenUp()) > 0 {
		t.Fatalf("%v", third)
	}
	number := third.GetCalls()[0].GetNumber()
	replies := &carrypb.CarriedReplies{Replies: []*carrypb.CarriedReply{{Number: 999}, {Number: number, Own: []byte("own, ")}}, Shared: []byte("shared")}
	c.answer(replies)
	c.answer(replies)
	if m := <-kept; m.err != nil || m.reply != "own, shared" {
		t.Errorf("%q, %v", m.reply, m.err)
	}
	failed := c.makes(t.Context(), "fails")
	c.answer(&carrypb.CarriedReplies{Replies: []*carrypb.CarriedReply{{Number: c.last, Code: uint32(codes.Aborted), Error: "why"}}})
	if m := <-failed; status.Code(m.err) != codes.Aborted || !strings.Contains(m.err.Error(), "why") {
		t.Error(m.err)
	}
	if len(c.waiting)+len(c.unsent)+len(c.givenUp) > 0 {
		t.Errorf("%v, %v and %v remain", c.waiting, c.unsent, c.givenUp)
	}
}

// TestMessages: messages to the driver have the length that it takes.
func TestMessages(t *testing.T) {
	c := NewCarrier()
	if _, err := c.call(t.Context(), "/m", make([]byte, mostCalls)); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	const count = 40
	request := strings.Repeat("x", 64<<10)
	var calls []<-chan made
	for range count {
		calls = append(calls, c.makes(ctx, request))
	}
	messages, told := 0, 0
	for m := c.next(); m != nil; m = c.next() {
		messages++
		told += len(m.GetCalls())
		if size := proto.Size(m); size > wire.MaxMessage {
			t.Errorf("a message of %d bytes", size)
		}
	}
	if told != count || messages < count/8 {
		t.Errorf("%d calls in %d messages", told, messages)
	}
	cancel()
	for _, of := range calls {
		<-of
	}
	c.givenUp = make([]uint64, 2*mostGivenUp+1)
	for _, want := range []int{mostGivenUp, mostGivenUp, 1} {
		if m := c.next(); len(m.GetGivenUp()) != want {
			t.Errorf("%d numbers, not %d", len(m.GetGivenUp()), want)
		}
	}
}

// TestNobodyCalls: where no worker calls, as when all have ended before their driver, the driver is
// not called. The end of a session ends calls that wait, and those that come later.
func TestNobodyCalls(t *testing.T) {
	c := NewCarrier()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		c.carryTo(ctx, nil, nil) // a call would panic
	}()
	cancel()
	<-ended
	waiting := c.makes(t.Context(), "")
	c.close()
	_, err := c.call(t.Context(), "/m", nil)
	for _, err := range []error{err, (<-waiting).err} {
		if status.Code(err) != codes.Unavailable {
			t.Error(err)
		}
	}
	if err := c.Aim("127.0.0.1:1", "credentials", nil); err != nil || c.Aimed() {
		t.Errorf("%v", err)
	}
}
