package queue

import (
	"runtime/debug"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
	"unsafe"
)

// TestLongChain: when the first task of a long chain fails, the errors of all others share one
// text, which names the first task, and finishing them takes little stack.
func TestLongChain(t *testing.T) {
	defer debug.SetMaxStack(debug.SetMaxStack(1 << 20))
	const length = 100_000
	q, now := New(Config{}), time.Unix(1000, 0)
	g := q.Group("fail@1", MakeDemand(map[string]int64{"cpu": Unit}))
	q.Submit(now, Task{ID: ID{1, 1}, Group: g})
	for n := uint64(2); n <= length; n++ {
		q.Submit(now, Task{ID: ID{1, n}, Group: g, Options: &Options{Needs: []ID{{1, n - 1}}}})
	}
	w := Worker{ID: 9, Functions: map[string]bool{"fail@1": true}, Offers: map[string]int64{"cpu": Unit}}
	q.Join(now, w, nil)
	q.Granted(now, 9, g)
	var attempt uint64
	for _, a := range q.Out {
		if a.What == Push {
			attempt = a.Attempt
		}
	}
	q.Done(now, 9, Held{ID{1, 1}, attempt}, Result{State: Failed, Failure: ByUser, Text: "no disk " + strings.Repeat("x", 70_000)}, time.Second)
	second, _ := q.Result(ID{1, 2})
	if want := "task 1 of fail, on which it depends, has failed: no disk xx"; !strings.HasPrefix(second.Text, want) || len(second.Text) > 2*maxRoot {
		t.Fatalf("the second task has failed with %.100q, of %d bytes", second.Text, len(second.Text))
	}
	for n := uint64(3); n <= length; n++ {
		r, _ := q.Result(ID{1, n})
		if r.State != Failed || r.Failure != Dependency || unsafe.StringData(r.Text) != unsafe.StringData(second.Text) {
			t.Fatalf("task %d is %v (%v) with a text of its own, %.100q", n, r.State, r.Failure, r.Text)
		}
	}
	if n := len(q.Over); n != length {
		t.Fatalf("%d of %d tasks are over", n, length)
	}
}

// TestRestoredTextsAreShared: equal texts from a journal are in memory once.
func TestRestoredTextsAreShared(t *testing.T) {
	q, now := New(Config{}), time.Unix(1000, 0)
	g := q.Group("f@1", nil)
	for n := uint64(1); n <= 3; n++ {
		q.Restore(Task{ID: ID{1, n}, Group: g, Options: &Options{Needs: []ID{{1, n - 1}}}})
	}
	for n := uint64(1); n <= 3; n++ {
		q.RestoreOver(now, ID{1, n}, Result{State: Failed, Failure: Dependency, Text: strings.Clone("task 0 has failed")})
	}
	first, _ := q.Result(ID{1, 1})
	if last, _ := q.Result(ID{1, 3}); unsafe.StringData(last.Text) != unsafe.StringData(first.Text) {
		t.Error("a text is in memory twice")
	}
}

// TestCut: a cut text says how many bytes are missing and remains valid UTF-8.
func TestCut(t *testing.T) {
	if got := Cut("short", 5); got != "short" {
		t.Errorf("a short text becomes %q", got)
	}
	long := strings.Repeat("a", 59) + "é" + strings.Repeat("b", 60)
	got := Cut(long, 100)
	if want := long[:59] + "… (62 bytes more)"; got != want {
		t.Errorf("a long text becomes %q", got)
	}
	if Cut(got, 100) != got {
		t.Errorf("a text that is cut twice becomes %q", Cut(got, 100))
	}
	for _, n := range []int{1, 1000} {
		if got := Cut(strings.Repeat("\x80", n), 100); !utf8.ValidString(got) || len(got) > 100 {
			t.Errorf("bytes that are no text become %q", got)
		}
	}
}
