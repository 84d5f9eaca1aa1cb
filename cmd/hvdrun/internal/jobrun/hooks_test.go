package jobrun

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/hvdrun/hvdrun/job"
)

// noted returns a hook that records the calls.
func noted(name string, fail error, all *[]string) hook {
	return func(_ context.Context, r *run) (stop func(), err error) {
		*all = append(*all, "start "+name)
		r.events = append(r.events, func(e job.Event) { *all = append(*all, name+" hears of "+string(e.Name)) })
		if fail != nil {
			return nil, fail
		}
		return func() {
			text := "stop " + name
			if r.result != nil {
				text += ": " + r.result.Error()
			}
			*all = append(*all, text)
		}, nil
	}
}

// idle is a hook that has nothing to stop.
func idle(context.Context, *run) (stop func(), err error) { return nil, nil }

// TestHooks: hooks start in their order, receive events in that order, and stop in the reverse
// order with the job's result. If one fails to start, those after it are not started, and it is not
// stopped.
func TestHooks(t *testing.T) {
	for _, c := range []struct {
		name string
		fail error
		want []string
	}{
		{"all start", nil, []string{"start a", "start b", "start c", "a hears of reset", "b hears of reset", "c hears of reset",
			"stop c: the job has failed", "stop b: the job has failed", "stop a: the job has failed"}},
		{"one fails", errors.New("b: no"), []string{"start a", "start b", "stop a: b: no"}},
	} {
		var got []string
		r := &run{}
		err := r.start(t.Context(), []hook{noted("a", nil, &got), idle, noted("b", c.fail, &got), noted("c", nil, &got)})
		if !errors.Is(err, c.fail) {
			t.Errorf("%s: %v", c.name, err)
		}
		result := err
		if err == nil {
			r.cfg.Events(job.Event{Name: job.Reset})
			result = errors.New("the job has failed")
		}
		r.stop(result)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		if r.cfg.Traces != nil || r.cfg.Replayed != nil {
			t.Errorf("%s: the driver traces and replays, which no hook asks for", c.name)
		}
	}
}
