package discover

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/plan"
)

// hostsOf parses "a:1 b:2!"; ! marks a draining host.
func hostsOf(t *testing.T, text string) []plan.Host {
	t.Helper()
	words := strings.Fields(text)
	hosts, err := plan.ParseHosts(strings.ReplaceAll(strings.Join(words, "\n"), "!", ""), -1)
	if err != nil {
		t.Fatal(err)
	}
	for i, word := range words {
		hosts[i].Draining = strings.HasSuffix(word, "!")
	}
	return hosts
}

func TestChanges(t *testing.T) {
	for _, c := range []struct{ before, after, want string }{
		{"", "", ""},
		{"", "a:1 b:2!", "added a:1; added b:2; draining b"},
		{"a:1 b:1", "a:1 b:1", ""},
		{"a:1 b:1", "b:1", "removed a"},
		{"a:1 b:1", "c:1 b:1", "added c:1; removed a"},
		{"a:1 b:1", "a:1! b:2", "draining a; slots b:2, before 1"},
		{"a:1! b:1", "a:1 b:1", "staying a, not draining any more"},
		{"a:1 b:1 c:1", "d:1 c:1 a:1", "added d:1; removed b; order c a, before a c"},
	} {
		var got []string
		for _, x := range changes(hostsOf(t, c.before), hostsOf(t, c.after)) {
			got = append(got, x.what+" "+x.how)
		}
		if strings.Join(got, "; ") != c.want {
			t.Errorf("%q to %q: %q, want %q", c.before, c.after, strings.Join(got, "; "), c.want)
		}
	}
}

func TestWatchPrinter(t *testing.T) {
	for asJSON, want := range map[bool]string{
		false: `12:30:01.500  added     a:1
12:30:01.500  added     localhost:2
12:30:01.500  draining  localhost
12:30:01.500  hosts     2, slots: 3
12:30:01.500  failed    down (the last list, 3s old, stays)
12:30:01.500  removed   a
12:30:01.500  hosts     1, slots: 2
`,
		true: `{"time":"2026-01-02T12:30:01.500000000Z","event":"hosts_found","hosts":[{"host":"a","slots":1,"local":false},{"host":"localhost","slots":2,"local":true,"draining":true}],"slots":3,"changes":{"added":["a:1","localhost:2"],"draining":["localhost"]}}
{"time":"2026-01-02T12:30:01.500000000Z","event":"discovery_failed","error":"down","age":3}
{"time":"2026-01-02T12:30:01.500000000Z","event":"hosts_found","hosts":[{"host":"localhost","slots":2,"local":true,"draining":true}],"slots":2,"changes":{"removed":["a"]}}
`,
	} {
		var out strings.Builder
		w := &watchPrinter{out: &out, asJSON: asJSON, understand: func(hosts []plan.Host) (understood, error) {
			return understand(t.Context(), &settings.Settings{}, hosts)
		},
			now: func() time.Time { return time.Date(2026, 1, 2, 12, 30, 1, 5e8, time.UTC) }}
		w.found(hostsOf(t, "a:1 localhost:2!"))
		w.failed(errors.New("down"), 3*time.Second)
		w.found(hostsOf(t, "localhost:2!"))
		if out.String() != want {
			t.Errorf("got:\n%swant:\n%s", &out, want)
		}
	}
}
