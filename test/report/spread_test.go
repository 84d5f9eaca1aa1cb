package report

import (
	"strings"
	"testing"
	"time"
)

func TestSpread(t *testing.T) {
	var s Spread
	if s.Quantile(0.5) != 0 || s.histogram() != "" {
		t.Error("nothing has a median or a histogram")
	}
	for i := 100; i >= 1; i-- {
		s = append(s, time.Duration(i)*time.Millisecond)
	}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 50, 0.9: 90, 0.99: 99, 1: 100} {
		if got := s.Quantile(q); got != want*time.Millisecond {
			t.Errorf("quantile %v is %v, want %v", q, got, want*time.Millisecond)
		}
	}
	if got, want := s.row("x"), "x                                       100     1.0    50.0    90.0    99.0   100.0"; got != want {
		t.Errorf("got row  %q\nwant row %q", got, want)
	}
	if got := (Spread{1500 * time.Microsecond, 1600 * time.Microsecond, 3 * time.Millisecond}).histogram(); got !=
		"     1.4 to     2.0 ms     2 "+strings.Repeat("#", 50)+"\n"+
			"     2.0 to     2.8 ms     0 \n"+
			"     2.8 to     4.0 ms     1 "+strings.Repeat("#", 25)+"\n" {
		t.Errorf("got histogram\n%s", got)
	}
}
