package line

import (
	"errors"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// TestReadLine: lines of any length up to the bound arrive completely, and a line without an end is
// an error.
func TestReadLine(t *testing.T) {
	long := strings.Repeat("x", MostUp-1)
	in := NewReader(strings.NewReader("a\n\n"+long+"\nx"+long+"\n"), MostUp)
	for _, want := range []string{"a", "", long} {
		text, err := in.Line()
		if err != nil || string(text) != want {
			t.Fatalf("%d bytes, %v", len(text), err)
		}
	}
	var tooLong *TooLongError
	if _, err := in.Line(); !errors.As(err, &tooLong) {
		t.Error(err)
	}
	if _, err := NewReader(strings.NewReader("cut"), MostUp).Line(); err == nil {
		t.Error("a line without an end was taken")
	}
}

// TestMessages: messages of the driver are read as they were written, and a tail has its announced
// length.
func TestMessages(t *testing.T) {
	u, l := notify.Update{Seq: 8, Change: plan.Added | plan.Removed, Generation: 4}, notify.Loss{Generation: 4, Ranks: []int{1, 7}}
	text := string(Updated(u)) + "\n" + string(Lost(l)) + "\n" + string(Dismissed(ErrLast)) + "\n" +
		string(Text(Message{Is: "world", Tail: 3})) + "\nabc" + string(Error("a mistake", true)) + "\n" + `{"is":"world","tail":17000000}` + "\n"
	in := NewReader(strings.NewReader(text), mostDown)
	next := func() (Message, []byte) {
		t.Helper()
		m, tail, err := in.Message()
		if err != nil {
			t.Fatal(err)
		}
		return m, tail
	}
	if m, _ := next(); m.Is != "updated" || m.update() != u {
		t.Errorf("%+v", m)
	}
	if m, _ := next(); m.Is != "lost" || m.Generation != 4 || len(m.Ranks) != 2 {
		t.Errorf("%+v", m)
	}
	if m, _ := next(); m.Is != "dismissed" || m.Why != "removed" || !m.Last {
		t.Errorf("%+v", m)
	}
	if m, tail := next(); m.Is != "world" || string(tail) != "abc" {
		t.Errorf("%+v, %q", m, tail)
	}
	if m, _ := next(); m.Text != "a mistake" || !m.Fatal {
		t.Errorf("%+v", m)
	}
	if _, _, err := in.Message(); err == nil {
		t.Error("a tail beyond the bound was taken")
	}
}
