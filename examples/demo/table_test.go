package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	driverjob "github.com/hvdrun/hvdrun/job"
)

func readEvents(t *testing.T, path string) []event {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	events, rest, err := parseEvents(text)
	if err != nil || len(rest) > 0 {
		t.Fatalf("rest %q, error %v", rest, err)
	}
	return events
}

func TestTableOfTheDemo(t *testing.T) {
	rows := table(readEvents(t, "testdata/events.jsonl"))
	var out strings.Builder
	if err := writeTable(&out, rows); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/table.txt")
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("table:\n%swant:\n%s", out.String(), want)
	}
}

// at returns an event the given number of milliseconds after the beginning.
func at(ms int, name driverjob.EventName, e event) event {
	e.Time, e.Name = time.UnixMilli(int64(1000+ms)), name
	return e
}

func TestTable(t *testing.T) {
	const ms = time.Millisecond
	one, two := []host{{Host: "a", Slots: 2}}, []host{{Host: "a", Slots: 2}, {Host: "b", Slots: 2}}
	begin := []event{at(0, "hosts_found", event{Hosts: one}), at(5, "world_published", event{Generation: 1, Size: 2}),
		at(7, "first_commit", event{Generation: 1})}
	start := row{1, 2, "start", 7 * ms, 0}
	slot := 1
	for _, c := range []struct {
		name string
		then []event
		want []row
	}{
		{"nothing more", nil, nil},
		{"a generation that ends before its first step", []event{
			at(10, "worker_exited", event{Signal: 9, Cause: "failed"}),
			at(11, "world_published", event{Generation: 2, Size: 1}),
			at(20, "worker_exited", event{Code: 3, Cause: "failed"}),
			at(21, "world_published", event{Generation: 3, Size: 1}),
			at(25, "first_commit", event{Generation: 3}),
		}, []row{{2, 1, "worker killed", 0, 0}, {3, 1, "worker failed", 5 * ms, 5 * ms}}},
		{"a worker that is given up before it has ended", []event{
			at(10, "worker_dying", event{PID: 7, Signal: 9}),
			at(11, "world_published", event{Generation: 2, Size: 2}),
			at(14, "worker_exited", event{PID: 7, Signal: 9, Cause: "failed"}),
			at(15, "first_commit", event{Generation: 2}),
			at(20, "worker_exited", event{PID: 8, Signal: 9, Cause: "failed"}),
			at(21, "world_published", event{Generation: 3, Size: 1}),
		}, []row{{2, 2, "worker killed", 5 * ms, 5 * ms}, {3, 1, "worker killed", 0, 0}}},
		{"two causes of one generation", []event{
			at(10, "hosts_found", event{Hosts: two}),
			at(12, "worker_exited", event{Signal: 9, Cause: "failed"}),
			at(13, "worker_exited", event{Signal: 9, Cause: "failed"}),
			at(20, "world_published", event{Generation: 2, Size: 3}),
			at(25, "first_commit", event{Generation: 2}),
		}, []row{{2, 3, "host added, worker killed", 15 * ms, 13 * ms}}},
		{"what is told twice is timed from the first", []event{
			at(10, "hosts_found", event{Hosts: []host{{Host: "a", Slots: 3}}}),
			at(14, "hosts_updated", event{Change: "added"}),
			at(16, "hosts_updated", event{Change: "added"}),
			at(20, "world_published", event{Generation: 2, Size: 3}),
			at(25, "first_commit", event{Generation: 2}),
		}, []row{{2, 3, "slots changed", 15 * ms, 11 * ms}}},
		{"returns", []event{
			at(10, "returned", event{Host: "a", Slot: &slot}),
			at(11, "returned", event{Host: "b"}),
			at(20, "world_published", event{Generation: 2, Size: 4}),
			at(21, "first_commit", event{Generation: 2}),
		}, []row{{2, 4, "slot returned, host returned", 11 * ms, 0}}},
		{"workers that end as they should are no cause", []event{
			at(10, "worker_exited", event{Cause: "left"}),
			at(11, "worker_exited", event{Signal: 15, Cause: "stopped"}),
			at(12, "worker_exited", event{Cause: "done"}),
			at(20, "world_published", event{Generation: 2, Size: 1}),
		}, []row{{2, 1, "", 0, 0}}},
		{"no hosts, then hosts", []event{
			at(10, "hosts_found", event{}),
			at(11, "world_published", event{Generation: 2, Size: 1}),
			at(12, "hosts_found", event{Hosts: one}),
			at(14, "world_published", event{Generation: 3, Size: 2}),
			at(15, "first_commit", event{Generation: 3}),
		}, []row{{2, 1, "host removed", 0, 0}, {3, 2, "host added", 3 * ms, 0}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := table(slices.Concat(begin, c.then))
			if want := slices.Concat([]row{start}, c.want); !slices.Equal(got, want) {
				t.Errorf("rows %+v, want %+v", got, want)
			}
		})
	}
}
