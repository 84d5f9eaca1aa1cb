package operate

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/job"
)

var Update = flag.Bool("update", false, "rewrite what is expected with what there is now")

// statuses returns the status of a job at several moments, by name.
func statuses(t *testing.T) map[string]job.Status {
	t.Helper()
	now := time.Date(2026, 3, 9, 12, 0, 0, 0, time.UTC)
	at := func(after time.Duration) *time.Time { return new(now.Add(after)) }
	event := func(text string) json.RawMessage {
		if !json.Valid([]byte(text)) {
			t.Fatalf("%s is not JSON", text)
		}
		return json.RawMessage(text)
	}
	running := job.Status{
		Job: "4be1c0ffee5151ab", Time: now, Driver: 4711, State: job.Running, Since: now.Add(-83 * time.Second),
		Begun: now.Add(-time.Hour), Last: now.Add(-time.Second), Generation: 7, Size: 3, NP: 4, MinNP: 2, MaxNP: 8, Elastic: true, Resets: 6,
		Goodput: job.Goodput{Seconds: 3600, Parts: []job.Spent{{Part: job.PartTraining, Seconds: 3351.6}, {Part: job.PartRecovering, Seconds: 72}, {Part: job.PartStalled, Seconds: 176.4}},
			StalledBy: []job.StalledBy{{Host: "node1", Slot: 3, Seconds: 176.4}}},
		Hosts: []job.Host{
			{Host: "node1", Listed: true, Slots: []job.Slot{
				{Slot: 0, State: job.SlotTraining, Rank: new(0), PID: 100, Commits: new(uint64(12345)),
					Usage: &job.Usage{Processors: 1.5, Resident: 3 << 30, Used: 31 << 30, Limit: 32 << 30}, Figures: []job.Figure{{Name: "loss", Value: 0.25}}},
				{Slot: 1, State: job.SlotTraining, Out: job.SlotDrained, Rank: new(1), PID: 101, Commits: new(uint64(12345)), What: "AllReduce for 7s"},
				{Slot: 2, State: job.SlotExcluded, Out: job.SlotExcluded, Until: at(43 * time.Second), Failures: 3},
				{Slot: 3, State: job.SlotStopping, Out: job.SlotExcluded, Until: at(36 * time.Hour), PID: 103, Failures: 1, What: "did not join within 30s of its start"},
			}},
			{Host: "a-node-with-a-long-name.example.org", Listed: true, Draining: true, Slots: []job.Slot{
				{Slot: 0, State: job.SlotReady, PID: 200, Commits: new(uint64(0)), What: "waits for the next world"},
				{Slot: 1, State: job.SlotExcluded, Out: job.SlotExcluded, Failures: 1},
			}},
			{Host: "fe80::1", Listed: true, Slots: []job.Slot{{Slot: 0, State: job.SlotHeld, Out: job.SlotHeld}}},
			{Host: "empty", Listed: true},
			{Host: "gone", Slots: []job.Slot{{Slot: 0, State: job.SlotLeaving, Rank: new(2), PID: 300, Commits: new(uint64(12340))}}},
		},
		Waits: []job.Wait{{For: "node1:3 to end", Until: *at(4200 * time.Millisecond)}, {For: "2 slots, 1 there", Until: *at(9 * time.Minute)}},
		Events: []json.RawMessage{
			event(`{"time":"2026-03-09T11:00:00.000000001Z","event":"hosts_found","hosts":[{"host":"node1","slots":4},{"host":"x","slots":1,"draining":true}]}`),
			event(`{"time":"2026-03-09T11:58:37.25Z","event":"world_published","generation":7,"size":3,"root":0,"slots":[{"rank":0,"host":"node1","slot":0,"pid":100}]}`),
			event(`{"time":"2026-03-09T11:59:01Z","event":"worker_exited","host":"node1","slot":2,"pid":102,"rank":3,"code":1,"signal":null,"cause":"failed"}`),
			event(`{"time":"2026-03-09T11:59:01Z","event":"excluded","host":"node1","slot":2,"until":"2026-03-09T12:00:43Z"}`),
			event(`{"time":"2026-03-09T11:59:59Z","event":"discovery_failed","error":"exit status 1: no \"hosts\""}`),
		},
	}
	waiting := job.Status{
		Job: "4be1c0ffee5151ab", Time: now, Driver: 4711, State: job.Waiting, Since: now.Add(-2 * time.Second), Begun: now,
		NP: 4, MinNP: 4, MaxNP: 0, Elastic: true, Waits: []job.Wait{{For: "4 slots, 0 there", Until: *at(598 * time.Second)}},
	}
	dead := running
	dead.Driver, dead.Hosts, dead.Events = 0, dead.Hosts[:1], dead.Events[:1]
	failed := dead
	failed.State, failed.Message, failed.Hosts = job.Failed, "state lost: the last worker that had it has left", nil
	stopped := failed
	stopped.Message, stopped.Stopped = "stopped by signal: terminated", true
	return map[string]job.Status{"running": running, "waiting": waiting, "dead": dead, "failed": failed, "stopped": stopped}
}

// TestStatusPicture: the text for people equals the files in testdata/status.
func TestStatusPicture(t *testing.T) {
	local := time.Local
	time.Local = time.UTC
	defer func() { time.Local = local }()
	d := &jobdir.Dir{About: jobdir.File{Command: []string{"./train", "--epochs", "3"}, Keys: t.TempDir()}}
	if err := os.WriteFile(filepath.Join(d.About.Keys, jobdir.CopiedKey), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, s := range statuses(t) {
		path := filepath.Join("testdata", "status", name+".txt")
		got := picture(d, s)
		if *Update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s: the picture is now\n%s", name, got)
		}
	}
}

// TestStatusNames: users rely on the names in the JSON.
func TestStatusNames(t *testing.T) {
	path := filepath.Join("testdata", "status", "running.json")
	got, err := json.MarshalIndent(statuses(t)["running"], "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if *Update {
		if err := os.WriteFile(path, append(got, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || strings.TrimSpace(string(want)) != string(got) {
		t.Errorf("%v; the JSON is now\n%s", err, got)
	}
}

// TestStatusLines: each event is printed once.
func TestStatusLines(t *testing.T) {
	var out strings.Builder
	s := statuses(t)["running"]
	all := s.Events
	lines := &statusLines{out: &out}
	for _, part := range [][]json.RawMessage{all[:2], all[:2], all[1:4], all[4:]} {
		s.Events = part
		if err := lines.show(s); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"hosts_found", "world_published", "worker_exited", "  excluded ", "discovery_failed", "not shown", "job 4be1"} {
		if n := strings.Count(out.String(), name); n != 1 {
			t.Errorf("%s is told %d times:\n%s", name, n, &out)
		}
	}
}

func TestParsePlace(t *testing.T) {
	for text, want := range map[string]string{
		"a": "a", "a:0": "a 0", "a.b-c:17": "a.b-c 17", "127.0.0.1:2": "127.0.0.1 2", "::1": "::1", "fe80::1": "fe80::1",
		"[::1]": "::1", "[::1]:3": "::1 3",
		"": "", ":1": "", "a:": "", "a:x": "", "a:-1": "", "a:99999": "", "[::1": "", "[::1]3": "", "[]:1": "",
	} {
		host, slot, err := parsePlace(text)
		got := host
		if slot != nil {
			got += " " + string('0'+rune(*slot%10))
			if *slot == 17 {
				got = host + " 17"
			}
		}
		if got != want || (err != nil) != (want == "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}
