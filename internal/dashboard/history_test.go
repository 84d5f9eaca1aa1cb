package dashboard

import (
	"math"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
)

// TestFigures: curves of what rank 0 reports have at most maxPoints, which reach to the end, and
// leave out what is no number.
func TestFigures(t *testing.T) {
	h := newHistory()
	now := time.Unix(1000, 0)
	const looks = 5 * maxPoints
	for i := range looks {
		value := float64(i)
		if i%7 == 0 {
			value = math.NaN()
		}
		h.report(now.Add(time.Duration(i)*time.Second), []job.Figure{{Name: "loss", Value: value}})
	}
	points := h.figures["loss"].points
	if n := len(points); n < maxPoints/2 || n > maxPoints {
		t.Fatalf("%d points", n)
	}
	if last := points[len(points)-1]; last.Rate < looks-40 || now.Add(looks*time.Second).Sub(last.Time) > 40*time.Second {
		t.Errorf("the last point is %v", last)
	}
	for i, p := range points {
		if math.IsNaN(p.Rate) || i > 0 && p.Rate <= points[i-1].Rate {
			t.Errorf("point %d is %v", i, p)
		}
	}
	for i := range 2 * maxFigures {
		h.report(now, []job.Figure{{Name: string(rune('a' + i)), Value: 1}})
	}
	if len(h.figures) != maxFigures {
		t.Errorf("%d curves", len(h.figures))
	}
}
