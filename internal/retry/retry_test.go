package retry_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
)

func TestRow(t *testing.T) {
	begin := time.Unix(1, 0)
	for _, c := range []struct {
		least time.Duration
		err   func(i int) error
		want  string
	}{
		{0, func(int) error { return errors.New("refused") }, "[1 2 4 8 16 32]"},
		{0, func(i int) error { return fmt.Errorf("port %d refused", i) }, "[1 2 4 8 16 32]"},
		{5 * time.Second, func(int) error { return errors.New("refused") }, "[1 6 12 24]"},
		{5 * time.Second, func(i int) error { return fmt.Errorf("refused by %c", 'a'+i/10) }, "[1 6 10 20 30]"},
	} {
		row, told := retry.Row{Least: c.least}, []int{}
		for i := 1; i <= 39; i++ {
			if row.Failed(begin.Add(time.Duration(i)*time.Second), c.err(i)) {
				told = append(told, i)
			}
		}
		if fmt.Sprint(told) != c.want {
			t.Errorf("told of %v, not of %s", told, c.want)
		}
		if n, d := row.Failures(), row.For(begin.Add(40*time.Second)); n != 39 || d != 39*time.Second {
			t.Errorf("%d failures in %v", n, d)
		}
		if n := row.Ended(); n != 39 || row.Failures() != 0 || row.For(begin) != 0 || row.Least != c.least {
			t.Errorf("%d failures have ended; %+v", n, row)
		}
		if !row.Failed(begin, c.err(39)) {
			t.Error("the first of a new row is not told")
		}
	}
}

func TestBackoff(t *testing.T) {
	for _, c := range []struct {
		backoff retry.Backoff
		want    string // after 0 to 6 failures
	}{
		{retry.Backoff{First: 5, Most: 40}, "[0s 5ns 10ns 20ns 40ns 40ns 40ns]"},
		{retry.Backoff{First: 5, Most: 25}, "[0s 5ns 10ns 20ns 25ns 25ns 25ns]"},
		{retry.Backoff{First: 5, Most: 3}, "[0s 3ns 3ns 3ns 3ns 3ns 3ns]"},
		{retry.Backoff{First: 5}, "[0s 5ns 10ns 20ns 40ns 80ns 160ns]"},
		{retry.Backoff{}, "[0s 0s 0s 0s 0s 0s 0s]"},
	} {
		var after []time.Duration
		for failures := range 7 {
			after = append(after, c.backoff.After(failures))
		}
		if got := fmt.Sprint(after); got != c.want {
			t.Errorf("%+v: %s, want %s", c.backoff, got, c.want)
		}
		if last, next := after[3], after[4]; c.backoff.Next(last) != next {
			t.Errorf("%+v: %v follows %v, want %v", c.backoff, c.backoff.Next(last), last, next)
		}
	}
	if got := (retry.Backoff{First: time.Hour}).After(math.MaxInt); got != math.MaxInt64 {
		t.Errorf("without a bound, %v", got)
	}
	if got := (retry.Backoff{First: time.Hour, Most: 24 * time.Hour}).After(-1); got != 0 {
		t.Errorf("after no failure, %v", got)
	}
}

type lines []string

func (l *lines) Warnf(format string, args ...any) { *l = append(*l, fmt.Sprintf(format, args...)) }

func TestWarn(t *testing.T) {
	begin, err := time.Unix(1, 0), errors.New("refused")
	for quiet, want := range map[time.Duration]string{
		0:               `["door, trying again: refused" "door, 3 failures in 2s, trying again: refused" "door, 6 failures in 5s, trying again: refused"]`,
		5 * time.Second: `["door, 6 failures in 5s, trying again: refused"]`,
	} {
		row, said := retry.Row{Least: 2 * time.Second, Quiet: quiet}, lines{}
		for i := range 10 {
			row.Warn(&said, begin.Add(time.Duration(i)*time.Second), "door", err)
		}
		if got := fmt.Sprintf("%q", said); got != want {
			t.Errorf("quiet for %v: %s, want %s", quiet, got, want)
		}
		if row.Ended(); row.Quiet != quiet {
			t.Errorf("a new row is quiet for %v", row.Quiet)
		}
	}
}

// TestGate: of a hundred failures per second, one is reported every 5 s.
func TestGate(t *testing.T) {
	var g retry.Gate
	var told []string
	for second := range 12 {
		for range 100 {
			if more, tell := g.Pass(time.Unix(int64(second), 0)); tell {
				told = append(told, fmt.Sprint(second, more))
			}
		}
	}
	want := []string{"0", "5; and 499 more such failures in 5s", "10; and 499 more such failures in 5s"}
	if !slices.Equal(told, want) {
		t.Errorf("told are %q, want %q", told, want)
	}
}
