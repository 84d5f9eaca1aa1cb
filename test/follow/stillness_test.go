package follow

import (
	"testing"
	"time"
)

// TestStillness: a job that makes progress never counts as hung, however slow; time without
// observation does not count.
func TestStillness(t *testing.T) {
	s := stillness{limit: time.Second}
	for n := range int64(100) {
		for range 9 {
			if s.hung(n+1, 100*time.Millisecond) {
				t.Fatalf("hung at %d, after %v", n, s.still)
			}
		}
	}
	s = stillness{limit: time.Second}
	for n := range 4 {
		if s.hung(0, time.Hour) {
			t.Fatalf("hung after %d looks", n+1)
		}
	}
	if !s.hung(0, time.Hour) {
		t.Error("not hung though nothing moved in five looks")
	}
}
