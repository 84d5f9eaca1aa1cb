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
	"github.com/hvdrun/hvdrun/internal/wake"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// bringing is a source that records the requests for hosts, and answers them with an error if one
// is set.
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

// TestBring: a source is asked for the hosts that the job can use, and again when the bounds
// change. When the job is over, all are returned, but not if another driver may continue the job.
func TestBring(t *testing.T) {
	for _, over := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			source := &bringing{Fixed: discovery.Fixed{plan.Host{Name: "a", Slots: 1}}, answer: errors.New("the server is away")}
			log, logged := test.NewNullLogger()
			b := bring(t.Context(), source, job.Size{NP: 4, Min: 2, Max: 8, Spares: 1, Elastic: true}, log)
			<-time.After(time.Minute) // virtual
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
			b.end(nil, over)
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

// TestNothingIsBrought: if a source fails before it has listed any host, only the job's error
// reports it.
func TestNothingIsBrought(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, logged := test.NewNullLogger()
		source := &bringing{answer: errors.New("path is missing")}
		b := bring(t.Context(), source, job.Size{NP: 1, Elastic: true}, log)
		<-time.After(time.Minute)
		b.end(nil, true)
		if n := len(logged.AllEntries()); n != 0 || !slices.Equal(source.asked, []string{"1 1", "0 0"}) {
			t.Errorf("%d messages; asked for %q", n, source.asked)
		}
	})
}

// TestNothingBrings: a source that cannot provide hosts is not asked for long, and none is asked
// for a job that cannot grow.
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
	b.end(nil, true)
	if len(logged.AllEntries()) != 0 {
		t.Errorf("logged %v", logged.LastEntry().Message)
	}
	if !slices.Equal(source.asked, []string{"1 1"}) {
		t.Errorf("asked for %q: the end of the job waits for a source that brought nothing", source.asked)
	}
}

// waiting is a source that answers no request.
type waiting struct{ discovery.Fixed }

func (waiting) Scale(ctx context.Context, _, _ int) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

// TestReturnIsBounded: the end of a job waits for a source that does not answer until the user asks
// again, and not for long if the source has never answered.
func TestReturnIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		listed, asks bool
		least, most  time.Duration
		messages     int
	}{
		"never answered": {false, false, 0, unlistedTimeout, 0},
		"has listed":     {true, false, returnTimeout, returnTimeout, 1},
		"asked again":    {true, true, 0, 0, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			log, logged := test.NewNullLogger()
			b := bring(t.Context(), waiting{}, job.Size{NP: 1, Elastic: true}, log)
			if c.listed {
				b.hear(job.Event{Name: job.HostsFound})
			}
			again := wake.New()
			if c.asks {
				again.Set()
			}
			begun := time.Now()
			b.end(again, true)
			if took := time.Since(begun); took < c.least || took > c.most {
				t.Errorf("%s: %v", name, took)
			}
			if n := len(logged.AllEntries()); n != c.messages {
				t.Errorf("%s: %d messages", name, n)
			}
		})
	}
}
