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
		{`{"time":"2026-01-02T03:04:05Z","event":"res`, nil},
		{"et\"}\n{\"time\":\"2026-01-02T03:04:05Z\",\"event\":\"job_done\"}\n", []string{"reset", "job_done"}},
		{"{\"time\":\"2026-01-02T03:04:05Z\",\"event\":\"hosts_found\",\"hosts\":[{\"host\":\"a\",\"slots\":2}]}\n{", []string{"hosts_found"}},
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
			got = append(got, string(e.Name))
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
	events, _, err := parseEvents([]byte("{\"time\":\"2026-01-02T03:04:05Z\",\"event\":\"reset\"}\nno JSON\n"))
	if len(events) != 1 || err == nil || !strings.Contains(err.Error(), `"no JSON"`) {
		t.Errorf("%d events, error %v", len(events), err)
	}
}
