package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTailReadsWholeLinesOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events")
	tail := &tail{path: path}
	defer tail.close()
	if events, err := tail.read(); len(events) != 0 || err != nil {
		t.Fatalf("before there is a file: %v, %v", events, err)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, c := range []struct {
		write string
		want  []string
	}{
		{"", nil},
		{`{"event":"res`, nil},
		{"et\"}\n{\"event\":\"job_done\"}\n", []string{"reset", "job_done"}},
		{"{\"event\":\"hosts_found\",\"hosts\":[{\"host\":\"a\",\"slots\":2}]}\n{", []string{"hosts_found"}},
	} {
		if _, err := f.WriteString(c.write); err != nil {
			t.Fatal(err)
		}
		events, err := tail.read()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range events {
			got = append(got, e.Name)
		}
		if strings.Join(got, " ") != strings.Join(c.want, " ") {
			t.Errorf("after writing %q: events %q, want %q", c.write, got, c.want)
		}
	}
	if string(tail.rest) != "{" {
		t.Errorf("rest %q, want the beginning of a line", tail.rest)
	}
}

func TestParseEventsShowsABadLine(t *testing.T) {
	events, _, err := parseEvents([]byte("{\"event\":\"reset\"}\nno JSON\n"))
	if len(events) != 1 || err == nil || !strings.Contains(err.Error(), `"no JSON"`) {
		t.Errorf("%d events, error %v", len(events), err)
	}
}

func TestEventsInWords(t *testing.T) {
	for line, want := range map[string]string{
		`{"event":"hosts_found","hosts":[{"host":"a","slots":2},{"host":"b","slots":1}]}`:                      "hosts found: a:2 b:1",
		`{"event":"hosts_found","hosts":[]}`:                                                                   "no hosts found",
		`{"event":"discovery_failed","error":"it broke"}`:                                                      "discovery failed: it broke",
		`{"event":"worker_started","host":"a","slot":1,"pid":7}`:                                               "worker started on a slot 1, pid 7",
		`{"event":"worker_ready","host":"a","slot":0}`:                                                         "worker on a slot 0 is ready",
		`{"event":"hosts_updated","seq":3,"change":"mixed"}`:                                                   "workers told of a change of hosts: mixed",
		`{"event":"first_commit","generation":4,"commits":9}`:                                                  "generation 4 has completed its first step",
		`{"event":"excluded","host":"a","slot":null,"until":null}`:                                             "host a is excluded for a while",
		`{"event":"returned","host":"a","slot":1}`:                                                             "a slot 1 may be used again",
		`{"event":"job_done","status":3,"message":"m"}`:                                                        "job done, status 3",
		`{"event":"reset","count":1}`:                                                                          "reset 1: the workers leave their world for the next",
		`{"event":"world_published","generation":2,"size":1,"slots":[{"rank":0,"host":"a","slot":1,"pid":7}]}`: "generation 2, size 1: 0=a:1",
		`{"event":"worker_dying","host":"a","slot":1,"pid":7,"rank":2,"signal":9,"what":"is killed"}`:          "worker on a slot 1 (rank 2) is lost, and its process is ending",
		`{"event":"worker_exited","host":"a","slot":1,"pid":7,"rank":2,"code":-1,"signal":9,"cause":"failed"}`: "worker on a slot 1 (rank 2) ended by signal 9: failed",
		`{"event":"worker_exited","host":"a","slot":1,"pid":7,"rank":2,"code":0,"signal":null,"cause":"left"}`: "worker on a slot 1 (rank 2) exited with 0: left",
	} {
		events, _, err := parseEvents([]byte(line + "\n"))
		if err != nil || len(events) != 1 {
			t.Fatalf("%s: %d events, error %v", line, len(events), err)
		}
		if got := events[0].String(); got != want {
			t.Errorf("%s\nis told as %q, want %q", line, got, want)
		}
	}
}
