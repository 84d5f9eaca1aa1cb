package discovery

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
)

// TestPollRemovals: an empty list removes hosts only after two in a row, and a host is removed
// after it was missing from RemovalAfter lists.
func TestPollRemovals(t *testing.T) {
	for _, c := range []struct {
		name  string
		after int
		said  string // lists, one a second; "-" is an empty one
		want  string // what is passed on, and in which second
	}{
		{"one empty list", 0, "a:1,-,a:1", "0 a:1"},
		{"two empty lists", 0, "a:1,-,-", "0 a:1,2 -"},
		{"two that are not in a row", 0, "a:1,-,a:1,-,a:1", "0 a:1"},
		{"an empty one, and one without a", 0, "a:1 b:1,-,b:1", "0 a:1 b:1,2 b:1"},
		{"empty from the start", 0, "-,a:1", "0 -,1 a:1"},
		{"a host", 0, "a:1 b:1,b:1", "0 a:1 b:1,1 b:1"},
		{"a host, after three lists", 3, "a:1 b:1,b:1,b:1,b:1", "0 a:1 b:1,1 b:1 a:1,3 b:1"},
		{"a host that is back in time", 3, "a:1 b:1,b:1,b:1,a:1 b:1,b:1,b:1,a:1 b:1", "0 a:1 b:1,1 b:1 a:1,3 a:1 b:1,4 b:1 a:1,6 a:1 b:1"},
		{"each host has its own count", 2, "a:1 b:1,b:1,c:1,c:1", "0 a:1 b:1,1 b:1 a:1,2 c:1 b:1,3 c:1"},
		{"empty lists count for each", 3, "a:1,-,-,b:1", "0 a:1,3 b:1"},
		{"other slots count at once", 3, "a:1,a:2", "0 a:1,1 a:2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source := &asked{started: time.Now()}
				for text := range strings.SplitSeq(c.said, ",") {
					source.answers = append(source.answers, answer{hosts: strings.Trim(text, "-")})
				}
				h := poll(Poll{Source: source, RemovalAfter: c.after}, time.Duration(len(source.answers))*time.Second-1)
				h.checkTold(t, c.want)
			})
		})
	}
}

// TestPollRemovalsOfWatchers: if a source pushes only changes, its silence confirms its list once
// an interval.
func TestPollRemovalsOfWatchers(t *testing.T) {
	for _, c := range []struct {
		name  string
		after int
		lists string // pushed one a second
		want  string
	}{
		{"one empty list and nothing more", 0, "a:1,-", "0 a:1,11 -"},
		{"one that is taken back", 0, "a:1,-,a:1", "0 a:1"},
		{"two empty lists", 0, "a:1,-,-", "0 a:1,2 -"},
		{"a host, after three lists", 3, "a:1 b:1,b:1", "0 a:1 b:1,1 b:1 a:1,21 b:1"},
		{"a host that comes meanwhile", 3, "a:1,b:1,b:1 c:1", "0 a:1,1 b:1 a:1,2 b:1 c:1 a:1,12 b:1 c:1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source := &pushed{sessions: []session{{lists: strings.Split(strings.ReplaceAll(c.lists, "-", ""), ",")}}}
				h := poll(Poll{Source: source, Interval: 10 * time.Second, RemovalAfter: c.after}, time.Minute)
				h.checkTold(t, c.want)
				if n := len(h.messages(logrus.InfoLevel)); n == 0 {
					t.Error("it is not said that hosts are missing")
				}
			})
		})
	}
}

// TestPollRemovalWhileAWatchFails: while a watch fails, its last list is not confirmed.
func TestPollRemovalWhileAWatchFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &pushed{sessions: []session{{lists: []string{"a:1", ""}, err: errDown}, {lists: []string{"a:1"}}}}
		poll(Poll{Source: source, Interval: 10 * time.Second}, time.Minute).checkTold(t, "0 a:1")
	})
}

// TestPollRemovalsOfMerged: each of several sources has its own count.
func TestPollRemovalsOfMerged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		flaky := &asked{started: time.Now(), answers: []answer{{hosts: "a:1"}, {}, {hosts: "a:1"}, {}, {}}}
		poll(Poll{Source: Merge(Named{"--flaky", flaky}, Named{"--fixed", Fixed(hostList("b:1"))})}, 10*time.Second).
			checkTold(t, "0 a:1 b:1,4 b:1")
	})
}

// TestPollKnowsHosts: the list of an earlier Poll counts like a list of this one, for one source
// and for several.
func TestPollKnowsHosts(t *testing.T) {
	for _, c := range []struct {
		name     string
		first    answer
		failures int
	}{
		{"the first list is empty", answer{}, 0},
		{"the first question fails", answer{err: errDown}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source := func() Discoverer {
					return &asked{started: time.Now(), answers: []answer{c.first, {hosts: "a:1"}}}
				}
				one := poll(Poll{Source: source(), Known: hostList("a:1")}, 5*time.Second)
				several := poll(Poll{Source: Merge(Named{"--first", source()}, Named{"--fixed", Fixed(hostList("b:1"))}),
					Known: hostList("a:1,b:1")}, 5*time.Second)
				for _, h := range []*heard{one, several} {
					if len(h.failures) != c.failures || h.result != errStop || h.stale {
						t.Errorf("failures %v, ended with %v, stale: %v", h.failures, h.result, h.stale)
					}
				}
				one.checkTold(t, fmt.Sprintf("%d a:1", c.failures))
				several.checkTold(t, fmt.Sprintf("%d a:1 b:1", c.failures))
			})
		})
	}
}

// TestPollStale: the list of several sources is current once each source that failed has given its
// own list again, even the same one.
func TestPollStale(t *testing.T) {
	for _, c := range []struct {
		name          string
		first, second []answer
		stale         bool
	}{
		{"one failure passes", []answer{{hosts: "a:1"}, {err: errDown}, {hosts: "a:1"}}, []answer{{hosts: "b:1"}}, false},
		{"another source goes on", []answer{{hosts: "a:1"}, {err: errDown}}, []answer{{hosts: "b:1"}, {hosts: "b:1"}, {hosts: "c:1"}}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := poll(Poll{Source: Merge(Named{"--first", &asked{answers: c.first}}, Named{"--second", &asked{answers: c.second}})}, time.Minute)
				if h.stale != c.stale {
					t.Errorf("stale: %v after %d failures", h.stale, len(h.failures))
				}
			})
		})
	}
}

// checkTold compares the lists that were passed on, with their seconds.
func (h *heard) checkTold(t *testing.T, want string) {
	t.Helper()
	var told []string
	for i, l := range h.lists {
		if l == "" {
			l = "-"
		}
		told = append(told, fmt.Sprintf("%d %s", h.listed[i]/time.Second, l))
	}
	if !slices.Equal(told, strings.Split(want, ",")) {
		t.Errorf("told %q, want %q", told, want)
	}
}
