package discovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/plan"
)

var errDown = errors.New("the source is down")

// answer is a source's answer: a list of hosts or an error.
type answer struct {
	hosts string
	err   error
}

// asked gives one answer after the other, then the last one repeatedly, and records when it was
// asked.
type asked struct {
	answers []answer
	took    time.Duration // for each answer
	times   []time.Duration
	started time.Time
}

func (a *asked) Discover(ctx context.Context) ([]plan.Host, error) {
	a.times = append(a.times, time.Since(a.started))
	now := a.answers[0]
	if len(a.answers) > 1 {
		a.answers = a.answers[1:]
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(a.took):
	}
	return toHosts(now)
}

func toHosts(a answer) (list, error) {
	if a.err != nil {
		return nil, a.err
	}
	hosts := list{}
	for item := range strings.FieldsSeq(a.hosts) {
		hosts = append(hosts, hostList(item)...)
	}
	return hosts, nil
}

// toText is the reverse of toHosts.
func toText(hosts list) string {
	var items []string
	for _, h := range hosts {
		items = append(items, h.String())
	}
	return strings.Join(items, " ")
}

// heard records what a Poll has passed on, with times since its start.
type heard struct {
	lists    []string
	listed   []time.Duration
	failures []error
	ages     []time.Duration
	result   error
	ended    time.Duration
	stale    bool // the last call was Failed, not Stands
	log      *logtest.Hook
}

// messages returns the messages of the log at this level.
func (h *heard) messages(level logrus.Level) (messages []string) {
	for _, e := range h.log.AllEntries() {
		if e.Level == level {
			messages = append(messages, e.Message)
		}
	}
	return messages
}

var errStop = errors.New("the test has seen enough")

// poll runs p for this length of virtual time and returns what it has passed on. It must be called
// in a bubble.
func poll(p Poll, length time.Duration) *heard {
	started := time.Now()
	log, hook := logtest.NewNullLogger()
	h := &heard{log: hook}
	p.Log = log
	p.Failed = func(err error, age time.Duration) {
		h.failures, h.ages = append(h.failures, err), append(h.ages, age)
		h.stale = true
	}
	p.Stands = func() { h.stale = false }
	ctx, cancel := context.WithTimeoutCause(context.Background(), length, errStop)
	defer cancel()
	h.result = p.Run(ctx, func(hosts list) {
		h.lists, h.listed = append(h.lists, toText(hosts)), append(h.listed, time.Since(started))
		slices.Reverse(hosts) // the callee owns the list: changing it must not confuse Poll
	})
	h.ended = time.Since(started)
	return h
}

func TestDRV14FirstDiscoveryFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := poll(Poll{Source: &asked{answers: []answer{{err: errDown}, {hosts: "a:1"}}}}, time.Hour)
		var first *FirstError
		if !errors.As(h.result, &first) || !errors.Is(h.result, errDown) || h.ended != 0 {
			t.Errorf("after %v: %v; want the failure, at once", h.ended, h.result)
		}
		if len(h.lists)+len(h.failures) != 0 {
			t.Errorf("told %v, %v besides", h.lists, h.failures)
		}
	})
}

func TestPollTellsOnlyNews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &asked{started: time.Now(), took: 100 * time.Millisecond, answers: []answer{{hosts: "a:1"}, {hosts: "a:1"},
			{hosts: "a:1 b:1"}, {hosts: "b:1 a:1"}, {hosts: "b:1 a:2"}, {hosts: ""}, {hosts: ""}, {hosts: "a:1"}}}
		h := poll(Poll{Source: source}, time.Minute)
		if want := []string{"a:1", "a:1 b:1", "b:1 a:1", "b:1 a:2", "", "a:1"}; !slices.Equal(h.lists, want) {
			t.Errorf("told %q, want %q", h.lists, want)
		}
		// The default pause of a second begins when the source has answered.
		for i, got := range source.times {
			if want := time.Duration(i) * 1100 * time.Millisecond; got != want {
				t.Fatalf("question %d came at %v, want %v", i+1, got, want)
			}
		}
		if h.result != errStop || h.ended != time.Minute || len(source.times) < 50 {
			t.Errorf("ended with %v at %v after %d questions", h.result, h.ended, len(source.times))
		}
	})
}

func TestPollFirstListMayBeEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := poll(Poll{Source: Fixed(nil)}, time.Minute)
		if !slices.Equal(h.lists, []string{""}) || h.result != errStop {
			t.Errorf("told %q, ended with %v", h.lists, h.result)
		}
	})
}

func TestPollInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &asked{started: time.Now(), answers: []answer{{hosts: "a:1"}}}
		poll(Poll{Source: source, Interval: 7 * time.Second}, 30*time.Second)
		if want := []time.Duration{0, 7e9, 14e9, 21e9, 28e9}; !slices.Equal(source.times, want) {
			t.Errorf("asked at %v", source.times)
		}
	})
}

func TestPollLaterFailureKeepsTheList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &asked{answers: []answer{{hosts: "a:1"}, {hosts: "a:1"}, {err: errDown}, {err: errDown},
			{hosts: "a:1"}, {err: errDown}, {hosts: "b:1"}}}
		h := poll(Poll{Source: source}, 10*time.Second+time.Millisecond)
		if !slices.Equal(h.lists, []string{"a:1", "b:1"}) || !slices.Equal(h.listed, []time.Duration{0, 6 * time.Second}) {
			t.Errorf("told %q at %v", h.lists, h.listed)
		}
		if want := []time.Duration{time.Second, 2 * time.Second, time.Second}; !slices.Equal(h.ages, want) {
			t.Errorf("ages %v, want %v", h.ages, want)
		}
		for _, err := range h.failures {
			if !errors.Is(err, errDown) {
				t.Errorf("Failed was told %v", err)
			}
		}
		if got := h.messages(logrus.WarnLevel); len(got) != 3 {
			t.Errorf("warnings: %q", got)
		}
		if got := h.messages(logrus.InfoLevel); len(got) != 2 || !strings.Contains(got[0], "answers again") {
			t.Errorf("recoveries: %q", got)
		}
		second := h.log.AllEntries()[1]
		if second.Data["age"] != 2*time.Second || second.Data["failures"] != 2 ||
			!errors.Is(second.Data[logrus.ErrorKey].(error), errDown) {
			t.Errorf("the second warning says %v", second.Data)
		}
	})
}

// TestPollLogsALastingFailureEverMoreSeldom: a failure that lasts is logged at growing intervals;
// another failure is logged at once.
func TestPollLogsALastingFailureEverMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := []answer{{hosts: "a:1"}}
		for i := range 1000 {
			answers = append(answers, answer{err: fmt.Errorf("connection %d refused", i)})
		}
		answers = append(answers, answer{err: errDown}, answer{err: errDown})
		h := poll(Poll{Source: &asked{answers: answers}}, 1002500*time.Millisecond)
		if got := h.messages(logrus.WarnLevel); len(h.failures) != 1002 || len(got) != 10+1 {
			t.Errorf("%d failures, %d lines: %q", len(h.failures), len(got), got)
		}
		if last := h.log.LastEntry().Data; last["failures"] != 1001 || !errors.Is(last[logrus.ErrorKey].(error), errDown) {
			t.Errorf("the last line says %v", last)
		}
	})
}

func TestPollWarnsOfNamesThatDifferInCase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &asked{answers: []answer{{hosts: "gpu02:1 b:1 GPU02:1"}, {hosts: "gpu02:1 b:1 GPU02:1"}, {hosts: "b:1"}}}
		h := poll(Poll{Source: source}, 10*time.Second)
		if got := h.messages(logrus.WarnLevel); len(got) != 1 || !strings.Contains(got[0], "gpu02 and GPU02 differ in case") {
			t.Errorf("warnings: %q", got)
		}
	})
}

func TestPollNeedsNobodyToHearOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, _ := logtest.NewNullLogger()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		p := Poll{Source: &asked{answers: []answer{{hosts: "a:1"}, {err: errDown}}}, Log: log}
		if err := p.Run(ctx, func(list) {}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}

func TestPollEndsPromptly(t *testing.T) {
	for name, source := range map[string]Discoverer{
		"in the pause":  Fixed(nil),
		"in a question": &asked{answers: []answer{{hosts: "a:1"}}, took: time.Hour},
		"in a watch":    &pushed{sessions: []session{{}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := poll(Poll{Source: source, Interval: time.Hour}, 3*time.Second)
				if h.result != errStop || h.ended != 3*time.Second {
					t.Errorf("ended with %v at %v", h.result, h.ended)
				}
			})
		})
	}
}

// TestPollEndIsNoFailure: an error of a source after the context has ended is not a failure.
func TestPollEndIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := poll(Poll{Source: &asked{answers: []answer{{hosts: "a:1"}}, took: 2 * time.Second}}, time.Second)
		var first *FirstError
		if errors.As(h.result, &first) || h.result != errStop {
			t.Errorf("the first question: %v", h.result)
		}
		h = poll(Poll{Source: &asked{answers: []answer{{hosts: "a:1"}}, took: 2 * time.Second}}, 4*time.Second)
		if len(h.failures) != 0 || h.log.LastEntry() != nil {
			t.Errorf("the second question: told %v, logged %v", h.failures, h.log.LastEntry())
		}
	})
}

func TestPollRefusesWhatCannotBe(t *testing.T) {
	twice := discoverFunc(func(context.Context) (list, error) { return append(hostList("a:1"), hostList("a:1")...), nil })
	synctest.Test(t, func(t *testing.T) {
		h := poll(Poll{Source: twice}, time.Second)
		var first *FirstError
		if !errors.As(h.result, &first) || !strings.Contains(h.result.Error(), "listed before") {
			t.Errorf("a host twice: %v", h.result)
		}
		if h := poll(Poll{}, time.Second); !errors.As(h.result, &first) || !strings.Contains(h.result.Error(), "no source") {
			t.Errorf("no source: %v", h.result)
		}
	})
}

type discoverFunc func(context.Context) (list, error)

func (f discoverFunc) Discover(ctx context.Context) ([]plan.Host, error) { return f(ctx) }

// pushed is a Watcher. Each session pushes its lists, one a second, and ends with its error, or
// else with its context.
type pushed struct {
	sessions []session
	found    []func(list) // of all sessions
}

type session struct {
	lists  []string
	err    error
	ends   bool
	refuse list // pushed after lists
}

func (p *pushed) Discover(context.Context) ([]plan.Host, error) {
	return nil, errors.New("a Watcher is not asked")
}

func (p *pushed) Watch(ctx context.Context, found func([]plan.Host)) error {
	p.found = append(p.found, found)
	s := p.sessions[0]
	if len(p.sessions) > 1 {
		p.sessions = p.sessions[1:]
	}
	for _, text := range s.lists {
		hosts, _ := toHosts(answer{hosts: text})
		found(hosts)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
	if s.refuse != nil {
		found(s.refuse)
	}
	if s.err != nil || s.ends {
		return s.err
	}
	<-ctx.Done()
	return ctx.Err()
}

func TestPollWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &pushed{sessions: []session{{lists: []string{"a:1", "a:1 b:1", "a:1 b:1", "b:1"}}}}
		h := poll(Poll{Source: source, Interval: time.Hour}, time.Minute)
		if !slices.Equal(h.lists, []string{"a:1", "a:1 b:1", "b:1"}) ||
			!slices.Equal(h.listed, []time.Duration{0, 1e9, 3e9}) {
			t.Errorf("told %q at %v; want each push at once, and only news", h.lists, h.listed)
		}
		if h.result != errStop || len(h.failures) != 0 || len(source.found) != 1 {
			t.Errorf("ended with %v, failed with %v, watched %d times", h.result, h.failures, len(source.found))
		}
		source.found[0](hostList("late:1")) // after the end
		if len(h.lists) != 3 {
			t.Errorf("told %q after the end", h.lists[3])
		}
	})
}

func TestPollFirstWatchFails(t *testing.T) {
	for _, s := range []session{{err: errDown}, {ends: true}, {refuse: list{{Name: "a b"}}}} {
		synctest.Test(t, func(t *testing.T) {
			h := poll(Poll{Source: &pushed{sessions: []session{s}}}, time.Hour)
			var first *FirstError
			if !errors.As(h.result, &first) || h.ended != 0 || len(h.lists) != 0 {
				t.Errorf("%+v: ended with %v at %v", s, h.result, h.ended)
			}
		})
	}
}

func TestPollWatchesAgainAfterAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &pushed{sessions: []session{
			{lists: []string{"a:1", "b:1"}, err: errDown}, // pushes at 0 and 1, fails at 2
			{err: errDown}, // fails at 12
			{lists: []string{"b:1", "c:1"}, ends: true},        // pushes at 22 and 23, ends at 24
			{lists: []string{"d:1"}, refuse: list{{Slots: 1}}}, // pushes at 34, and an invalid list at 35
			{lists: []string{"d:1", "e:1"}},                    // pushes at 45 and 46
		}}
		h := poll(Poll{Source: source, Interval: 10 * time.Second}, time.Minute)
		if want := []string{"a:1", "b:1", "c:1", "d:1", "e:1"}; !slices.Equal(h.lists, want) {
			t.Errorf("told %q, want %q", h.lists, want)
		}
		if want := []time.Duration{0, 1e9, 23e9, 34e9, 46e9}; !slices.Equal(h.listed, want) {
			t.Errorf("told at %v, want %v", h.listed, want)
		}
		// While a source watches, its list counts as current.
		if want := []time.Duration{0, 10e9, 0, 0}; !slices.Equal(h.ages, want) {
			t.Errorf("ages %v, want %v", h.ages, want)
		}
		if len(h.failures) == 4 && (!errors.Is(h.failures[1], errDown) || !errors.Is(h.failures[2], errWatchEnded) ||
			!strings.Contains(h.failures[3].Error(), "no name")) {
			t.Errorf("failures %v", h.failures)
		}
		if got := h.messages(logrus.InfoLevel); len(got) != 3 {
			t.Errorf("recoveries: %q", got)
		}
		source.found[0](hostList("late:1")) // a session that has ended
		if len(h.lists) != 5 {
			t.Errorf("told %q by a session that is over", h.lists[5])
		}
	})
}

// TestPollAsksWhatCannotPush: a source that cannot push is polled instead, at once and from then
// on.
func TestPollAsksWhatCannotPush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		watches := 0
		source := struct {
			*asked
			watchFunc
		}{
			&asked{started: time.Now(), answers: []answer{{hosts: "a:1"}, {hosts: "b:1"}, {err: errDown}, {hosts: "c:1"}}},
			func(context.Context, func(list)) error {
				watches++
				return fmt.Errorf("plugin p: %w", ErrNoWatch)
			},
		}
		h := poll(Poll{Source: source}, 10*time.Second)
		if !slices.Equal(h.lists, []string{"a:1", "b:1", "c:1"}) || !slices.Equal(h.listed, []time.Duration{0, 1e9, 3e9}) {
			t.Errorf("told %q at %v", h.lists, h.listed)
		}
		if watches != 1 || len(h.failures) != 1 || !errors.Is(h.failures[0], errDown) {
			t.Errorf("watched %d times, failures %v", watches, h.failures)
		}
		source.answers = []answer{{err: errDown}}
		var first *FirstError
		if h := poll(Poll{Source: source}, time.Second); !errors.As(h.result, &first) || !errors.Is(h.result, errDown) {
			t.Errorf("the first answer failed: %v", h.result)
		}
	})
}

type watchFunc func(ctx context.Context, found func(list)) error

func (f watchFunc) Watch(ctx context.Context, found func(list)) error { return f(ctx, found) }

type list = []plan.Host

// hostList parses a list such as "a:2,b:1".
func hostList(text string) list {
	hosts, err := plan.ParseHostList(text, -1)
	if err != nil {
		panic(err)
	}
	return hosts
}
