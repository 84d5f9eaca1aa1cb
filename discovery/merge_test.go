package discovery

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/plan"
)

// twin merges lists as documented, host by host: it records when each host was first listed, and
// sorts.
type twin struct {
	round int
	since map[string][3]int // round, source, place in the source's list
}

func (w *twin) merge(lists []list) list {
	w.round++
	var whole list
	since := map[string][3]int{}
	for s, hosts := range lists {
		for place, h := range hosts {
			if _, listed := since[h.Name]; listed {
				continue
			}
			since[h.Name] = [3]int{w.round, s, place}
			if before, was := w.since[h.Name]; was {
				since[h.Name] = before
			}
			for _, others := range lists {
				h.Draining = h.Draining ||
					slices.ContainsFunc(others, func(o plan.Host) bool { return o.Name == h.Name && o.Draining })
			}
			whole = append(whole, h)
		}
	}
	w.since = since
	slices.SortFunc(whole, func(a, b plan.Host) int {
		x, y := since[a.Name], since[b.Name]
		return cmp.Or(cmp.Compare(x[0], y[0]), cmp.Compare(x[1], y[1]), cmp.Compare(x[2], y[2]))
	})
	return whole
}

func TestMergeAgainstTheTwin(t *testing.T) {
	someHosts := rapid.Custom(func(t *rapid.T) list {
		var hosts list
		for _, name := range rapid.SliceOfNDistinct(someName, 0, 4, rapid.ID).Draw(t, "names") {
			hosts = append(hosts, plan.Host{Name: name, Slots: rapid.IntRange(0, 3).Draw(t, "slots"),
				Draining: rapid.IntRange(0, 3).Draw(t, "draining") == 0})
		}
		return hosts
	})
	rapid.Check(t, func(t *rapid.T) {
		sources := make([]Named, rapid.IntRange(1, 3).Draw(t, "sources"))
		lists := make([]list, len(sources))
		for i := range sources {
			sources[i].Source = discoverFunc(func(context.Context) (list, error) { return slices.Clone(lists[i]), nil })
		}
		m, w := Merge(sources...), &twin{}
		for range rapid.IntRange(1, 10).Draw(t, "rounds") {
			for i := range lists {
				if rapid.Bool().Draw(t, "changes") {
					lists[i] = someHosts.Draw(t, "hosts")
				}
			}
			got, err := m.Discover(t.Context())
			if want := w.merge(lists); err != nil || !slices.Equal(got, want) {
				t.Fatalf("%v make %v, %v; want %v", lists, got, err, want)
			}
		}
	})
}

func TestMergeFailsAsAWhole(t *testing.T) {
	m := Merge(Named{"--a", Fixed(hostList("a:1"))},
		Named{"--b", discoverFunc(func(context.Context) (list, error) { return nil, errDown })},
		Named{"--c", discoverFunc(func(context.Context) (list, error) { return list{{Name: "a b"}}, nil })})
	got, err := m.Discover(t.Context())
	if got != nil || !errors.Is(err, errDown) || !strings.Contains(err.Error(), "--b: the source is down") ||
		!strings.Contains(err.Error(), "--c: discovery: the list is not valid") {
		t.Errorf("got %v, %v", got, err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errStop)
	if got, err := Merge(Named{"--a", Fixed(nil)}).Discover(ctx); got != nil || !errors.Is(err, errStop) {
		t.Errorf("after the end: %v, %v", got, err)
	}
}

func TestMergeOfNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if h := poll(Poll{Source: Merge()}, time.Minute); !slices.Equal(h.lists, []string{""}) || h.result != errStop {
			t.Errorf("told %q, ended with %v", h.lists, h.result)
		}
	})
}

// TestMergeWatchesAndPolls: pushes count at once, other sources are asked at the interval, and no
// list is passed on twice.
func TestMergeWatchesAndPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		script := &asked{started: time.Now(), took: 500 * time.Millisecond, answers: []answer{
			{hosts: "a:1"}, {hosts: "a:1"}, {hosts: "a:1 b:1"}}} // answers at 0.5, 11, 21.5
		plugin := &pushed{sessions: []session{{lists: []string{"c:1", "c:1 a:7", "d:1 c:1"}}}} // pushes at 0, 1, 2
		h := poll(Poll{Source: Merge(Named{"--script", script}, Named{"--plugin", plugin}), Interval: 10 * time.Second}, time.Minute)
		if want := []string{"a:1 c:1", "a:1 c:1 d:1", "a:1 c:1 d:1 b:1"}; !slices.Equal(h.lists, want) {
			t.Errorf("told %q, want %q", h.lists, want)
		}
		if want := []time.Duration{500e6, 2e9, 21500e6}; !slices.Equal(h.listed, want) {
			t.Errorf("told at %v, want %v", h.listed, want)
		}
		if h.result != errStop || h.ended != time.Minute || len(h.failures) != 0 {
			t.Errorf("ended with %v at %v, failures %v", h.result, h.ended, h.failures)
		}
	})
}

func TestMergeNeedsEveryFirstList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &asked{took: time.Hour, answers: []answer{{hosts: "a:1"}}}
		down := &asked{took: time.Second, answers: []answer{{err: errDown}}}
		h := poll(Poll{Source: Merge(Named{"--slow", slow}, Named{"--fixed", Fixed(nil)}, Named{"--down", down})}, time.Hour)
		var first *FirstError
		if !errors.As(h.result, &first) || !errors.Is(h.result, errDown) || !strings.Contains(h.result.Error(), "--down: ") {
			t.Errorf("ended with %v", h.result)
		}
		if h.ended != time.Second || len(h.lists)+len(h.failures) != 0 {
			t.Errorf("ended at %v; told %q, %v", h.ended, h.lists, h.failures)
		}
	})
}

func TestMergeKeepsTheListOfOneThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		down := &asked{answers: []answer{{hosts: "a:1"}, {err: errDown}, {err: errDown}, {hosts: "e:1"}}} // at 0, 1, 2, 3
		plugin := &pushed{sessions: []session{
			{lists: []string{"b:1", "c:1", "d:1"}, err: errDown}, // pushes at 0, 1, 2, fails at 3
			{lists: []string{"d:2"}},                             // pushes at 4
		}}
		h := poll(Poll{Source: Merge(Named{"--down", down}, Named{"--plugin", plugin})}, 10*time.Second)
		want := []string{"a:1 b:1", "a:1 c:1", "a:1 d:1", "d:1 e:1", "d:2 e:1"}
		if !slices.Equal(h.lists, want) || h.result != errStop {
			t.Errorf("told %q, want %q; ended with %v", h.lists, want, h.result)
		}
		if want := []time.Duration{time.Second, 2 * time.Second, 0}; !slices.Equal(h.ages, want) {
			t.Errorf("ages %v, want %v", h.ages, want)
		}
		for i, name := range []string{"--down: ", "--down: ", "--plugin: "} {
			if err := h.failures[i]; !errors.Is(err, errDown) || !strings.HasPrefix(err.Error(), name) {
				t.Errorf("failure %d: %v", i+1, err)
			}
		}
		warning := h.log.AllEntries()[0]
		if warning.Level != logrus.WarnLevel || warning.Data["source"] != "--down" || warning.Data["age"] != time.Second {
			t.Errorf("the first warning: %v %v", warning.Message, warning.Data)
		}
	})
}

// TestMergeOfTooMuch: a merged list that is not valid is refused, although each part is valid, and
// the source is watched again.
func TestMergeOfTooMuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var half list
		for i := range 12 {
			half = append(half, plan.Host{Name: string(rune('a' + i)), Slots: plan.MaxSlots})
		}
		plugin := &pushed{sessions: []session{{lists: []string{"x:1"}, refuse: rename(half)}, {lists: []string{"y:1"}}}}
		h := poll(Poll{Source: Merge(Named{"--fixed", Fixed(half)}, Named{"--plugin", plugin})}, 10*time.Second)
		if len(h.lists) != 2 || !strings.HasSuffix(h.lists[0], " x:1") || !strings.HasSuffix(h.lists[1], " y:1") {
			t.Errorf("told %q", h.lists)
		}
		if len(h.failures) != 1 || !strings.Contains(h.failures[0].Error(), "the list is not valid") {
			t.Errorf("failures %v", h.failures)
		}
	})
}

func rename(hosts list) list {
	renamed := slices.Clone(hosts)
	for i := range renamed {
		renamed[i].Name = "other-" + renamed[i].Name
	}
	return renamed
}

var someName = rapid.SampledFrom([]string{"a", "b", "c", "d"})
