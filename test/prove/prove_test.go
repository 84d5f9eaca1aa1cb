package prove

import (
	"strings"
	"testing"
	"time"
)

func TestMore(t *testing.T) {
	for _, c := range []struct {
		run    Run
		number int
		passed time.Duration
		want   bool
	}{
		{Run{For: time.Minute}, 5, 59 * time.Second, true},
		{Run{For: time.Minute}, 5, time.Minute, false},
		{Run{}, 5, time.Hour, true},
		{Run{For: time.Minute, One: true}, 0, 0, true},
		{Run{For: time.Minute, One: true}, 1, 0, false},
		{Run{For: time.Minute, Cases: 3}, 2, time.Hour, true},
		{Run{For: time.Minute, Cases: 3}, 3, 0, false},
	} {
		if got := c.run.More(c.number, c.passed); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

func TestFailure(t *testing.T) {
	got := Failure{Room: "jobs", Seed: 9, Case: "scale workers=64", What: "exit status 1\nprocesses are left\n", Files: "/tmp/x/9"}.String()
	want := "FAILED seed 9: scale workers=64\n  exit status 1\n  processes are left\n  repeat it by:  make prove ROOM=jobs SEED=9\n  its files are: /tmp/x/9\n"
	if got != want {
		t.Errorf("%q", got)
	}
	got = Failure{Room: "jobs", Args: []string{"-kills=20", "-joins=0"}}.String()
	if want := "make prove ROOM=jobs SEED=0 ARGS='-kills=20 -joins=0'\n"; !strings.Contains(got, want) {
		t.Errorf("%q has no %q", got, want)
	}
}

func TestTally(t *testing.T) {
	tally := Tally{Cases: 2, Operations: 7, Bytes: 3 << 29, Took: 90 * time.Second}
	tally.Count("hosts", "2")
	tally.Count("hosts", "2")
	tally.Count("hosts", "1")
	tally.Fail(8, "hang")
	var text strings.Builder
	tally.Print(&text)
	want := "2 cases, 7 operations, 1.5 GiB, 1m30s, 1 failed\n  hosts: 1 1, 2 2\nFAILED seed 8: hang\n"
	if text.String() != want || tally.Failures() != 1 {
		t.Errorf("%s", &text)
	}
}
