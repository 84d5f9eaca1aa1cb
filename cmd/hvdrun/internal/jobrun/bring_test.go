package jobrun

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// bringing is a source that notes what it is asked for, and fails as often as it should.
type bringing struct {
	discovery.Fixed
	asked  []string
	answer error
}

func (b *bringing) Scale(_ context.Context, least, most int) error {
	if ask := fmt.Sprint(least, " ", most); len(b.asked) == 0 || b.asked[len(b.asked)-1] != ask {
		b.asked = append(b.asked, ask)
	}
	return b.answer
}

// TestBring: a source is asked for what the job has use for, again when the bounds change, and
// gives all back when the job is over, but not when another driver may go on.
func TestBring(t *testing.T) {
	for _, over := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			source := &bringing{Fixed: discovery.Fixed{plan.Host{Name: "a", Slots: 1}}, answer: errors.New("the server is away")}
			log, logged := test.NewNullLogger()
			b := bring(t.Context(), source, job.Size{NP: 4, Min: 2, Max: 8, Spares: 1, Elastic: true}, log)
			<-time.After(time.Minute) // of the bubble
			if n := len(logged.AllEntries()); n != 0 {
				t.Errorf("%d messages before the source has listed hosts: %s", n, logged.LastEntry().Message)
			}
			b.hear(job.Event{Name: job.HostsFound})
			<-time.After(time.Minute)
			if n := len(logged.AllEntries()); n != 1 {
				t.Errorf("%d messages about a failure that lasts, want 1", n)
			}
			b.hear(job.Event{Name: job.Scaled, Fields: []job.Field{{Key: "min_np", Value: 1}, {Key: "max_np", Value: any(nil)}}})
			synctest.Wait()
			b.hear(job.Event{Name: job.Scaled, Fields: []job.Field{{Key: "min_np", Value: 1.0}, {Key: "max_np", Value: 6.0}}})
			synctest.Wait()
			b.end(over)
			want := []string{"2 9", "1 5", "1 7"}
			if over {
				want = append(want, "0 0")
			}
			if !slices.Equal(source.asked, want) {
				t.Errorf("over %v: asked for %q, want %q", over, source.asked, want)
			}
		})
	}
}

// TestNothingIsBrought: where a source fails before it has listed any host, the job's error is all
// that is said.
func TestNothingIsBrought(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, logged := test.NewNullLogger()
		source := &bringing{answer: errors.New("path is missing")}
		b := bring(t.Context(), source, job.Size{NP: 1, Elastic: true}, log)
		<-time.After(time.Minute)
		b.end(true)
		if n := len(logged.AllEntries()); n != 0 || !slices.Equal(source.asked, []string{"1 1", "0 0"}) {
			t.Errorf("%d messages; asked for %q", n, source.asked)
		}
	})
}

// TestNothingBrings: a source that cannot bring hosts is not asked for long, nor is one for a job
// that cannot grow.
func TestNothingBrings(t *testing.T) {
	log, logged := test.NewNullLogger()
	if b := bring(t.Context(), discovery.Fixed{}, job.Size{NP: 1, Elastic: true}, log); b != nil {
		t.Error("a source that is no Scaler is asked")
	}
	source := &bringing{answer: fmt.Errorf("plugin: %w", discovery.ErrNoScale)}
	if b := bring(t.Context(), source, job.Size{NP: 1}, log); b != nil {
		t.Error("a job that is not elastic asks")
	}
	b := bring(t.Context(), source, job.Size{NP: 1, Elastic: true}, log)
	b.asking.Wait()
	b.end(true)
	if len(logged.AllEntries()) != 0 {
		t.Errorf("logged %v", logged.LastEntry().Message)
	}
}
