package main

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/report"
)

// TestSeedsDetermine: a seed determines its case, and consecutive seeds cover all kinds.
func TestSeedsDetermine(t *testing.T) {
	for first := range uint64(50) {
		had := make(map[string]bool)
		for seed := first; seed < first+uint64(len(kinds)); seed++ {
			a, _ := draw(seed)
			b, k := draw(seed)
			if a != b || k.name != a.Kind {
				t.Fatalf("seed %d is %+v, and then %+v of kind %s", seed, a, b, k.name)
			}
			had[a.Kind] = true
		}
		if len(had) != len(kinds) {
			t.Fatalf("seeds from %d have kinds %v", first, had)
		}
	}
}

// TestCasesHaveBounds checks the bounds of many cases.
func TestCasesHaveBounds(t *testing.T) {
	small, most := make(map[string]bool), make(map[int]bool)
	for seed := range uint64(20_000) {
		s, _ := draw(seed)
		if s.memory() > memoryBound || s.State < 1<<10 || s.Workers < 1 || s.Hosts < 1 || s.Hosts > s.Workers {
			t.Fatalf("seed %d: %s", seed, s)
		}
		if s.small() {
			small[s.Kind] = true
		}
		most[s.Workers] = true
	}
	for _, k := range kinds {
		if !small[k.name] {
			t.Errorf("no case of kind %q is small", k.name)
		}
	}
	for _, n := range []int{1, 16, 64, 150, 300, 1000} {
		if !most[n] {
			t.Errorf("no case has %d workers", n)
		}
	}
}

// TestLargeComesSoon: large cases do not depend on chance: each size occurs within six turns, which
// take less than half an hour.
func TestLargeComesSoon(t *testing.T) {
	var text strings.Builder
	for seed := range uint64(6 * len(kinds)) {
		s, _ := draw(seed + 1)
		fmt.Fprintf(&text, "%s %s\n", s.Kind, s)
	}
	for _, want := range []string{"many workers=300", "many workers=150", "many workers=64", "scale workers=1000", "state=2GiB", "listed=10000", "print=",
		"how=job", "how=job without room", "how=checkpoints to the end", "how=events", "how=output", "how=checkpoints", "how=missing", "how=unwritable", "how=empty", "how=replaced",
		"how=resume", "how=stop", "how=damaged", "how=orphans"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("none of the first six turns has %s", want)
		}
	}
}

func TestSlots(t *testing.T) {
	for workers := 1; workers < 20; workers++ {
		for hosts := 1; hosts <= workers; hosts++ {
			s := setup{Workers: workers, Hosts: hosts}
			n, words := 0, strings.Split(s.hostList(), ",")
			for h, word := range words {
				slots := 0
				if _, err := fmt.Sscanf(word, fmt.Sprintf("127.0.0.%d:%%d", h+1), &slots); err != nil || slots < 1 {
					t.Fatalf("%d workers on %d hosts: %s: %v", workers, hosts, s.hostList(), err)
				}
				for i := range slots {
					if got, want := s.slot(n), fmt.Sprintf("127.0.0.%d:%d", h+1, i); got != want {
						t.Fatalf("%d workers on %d hosts: slot %d is %s, want %s", workers, hosts, n, got, want)
					}
					n++
				}
			}
			if n != workers || len(words) != hosts {
				t.Fatalf("%d workers on %d hosts: %s", workers, hosts, s.hostList())
			}
		}
	}
}

func TestSetupInWords(t *testing.T) {
	s := setup{Seed: 3, Kind: "state", Workers: 2, State: 3 << 30, Steps: 1, Async: true}
	if got, want := s.String(), "workers=2 state=3GiB steps=1 async=true"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for n, want := range map[int64]string{1: "1B", 1 << 10: "1KiB", 1<<10 + 1: "1025B", 5 << 20: "5MiB"} {
		if got := size(n); got != want {
			t.Errorf("%d bytes: got %s, want %s", n, got, want)
		}
	}
}

// TestFlagsReplaceFields: flags replace what the seed determines, also by zeros, and are printed in
// a form that can be given again.
func TestFlagsReplaceFields(t *testing.T) {
	var given setup
	f := flag.NewFlagSet("", flag.ContinueOnError)
	given.define(f)
	if err := f.Parse(strings.Fields("-steps 0 -step-time -5ms -state 4096 -how stop -async=true -ask 0.5")); err != nil {
		t.Fatal(err)
	}
	s := setup{Seed: 3, Kind: "state", Workers: 2, Steps: 7}
	words := s.replace(f)
	want := setup{Seed: 3, Kind: "state", Workers: 2, StepTime: -5 * time.Millisecond, State: 4096, How: "stop", Async: true, Ask: 0.5}
	if s != want {
		t.Errorf("got %+v, want %+v", s, want)
	}
	if got := strings.Join(words, " "); got != "-ask=0.5 -async=true -how=stop -state=4096 -step-time=-5ms -steps=0" {
		t.Errorf("the flags are %q", got)
	}
}

// TestPrintedLinesAreCounted: lines that are lost, repeated or out of order are detected.
func TestPrintedLinesAreCounted(t *testing.T) {
	line := func(worker, n int) string { return fmt.Sprintf("[0]<stdout>:print of %d: line %d xxx\n", worker, n) }
	for name, test := range map[string]struct {
		text  string
		twice int
		good  bool
	}{
		"in order":           {line(7, 1) + line(8, 1) + "else\n" + line(7, 2) + "[0]<stdout>:print of 7\n" + line(8, 2), 0, true},
		"lost":               {line(7, 1) + line(7, 3) + line(7, 2), 0, false},
		"repeated":           {line(7, 1) + line(7, 1) + line(7, 2), 0, false},
		"may be repeated":    {line(7, 1) + line(7, 1) + line(7, 2), 1, true},
		"repeated too often": {line(7, 1) + line(7, 1) + line(7, 1) + line(7, 2), 1, false},
		"swapped":            {line(7, 2) + line(7, 1) + line(7, 2), 0, false},
	} {
		read := 0
		lines, err := countLines(strings.NewReader(test.text), "print", test.twice, func(n int) { read += n + len("\n") })
		if (err == nil) != test.good {
			t.Errorf("%s: %v", name, err)
		}
		if lines["7"] != 2 || read != len(test.text) {
			t.Errorf("%s: %v, %d bytes", name, lines, read)
		}
	}
}

// TestTally: cases are counted by kind, and failed seeds are listed.
func TestTally(t *testing.T) {
	var all tally
	s, _ := draw(uint64(rand.IntN(100)))
	var found findings
	found.count("workers killed", 3)
	found.count("resets", 0)
	found.timed("From a death to", report.Row{Name: "report", Spread: report.Spread{time.Millisecond}}).targets = []report.Target{{Name: "median", Limit: time.Second}}
	all.add(s, 0, nil, found, nil)
	all.add(s, 0, nil, found, fmt.Errorf("wrong"))
	all.skip(s)
	if len(all.all().failed) != 1 || !strings.Contains(all.String(), fmt.Sprintf("seeds of failed ones: [%d]", s.Seed)) {
		t.Errorf("%d failed\n%s", len(all.all().failed), all.String())
	}
	if text := all.String(); !strings.Contains(text, s.Kind+": 6 workers killed\n") {
		t.Errorf("the counts are not added:\n%s", text)
	}
	var figures strings.Builder
	if all.all().print(&figures); !strings.Contains(figures.String(), "From a death to") || !strings.Contains(figures.String(), "report                                    2 ") ||
		!strings.Contains(figures.String(), "target median at most 1s: met") {
		t.Errorf("the times are not added:\n%s", &figures)
	}
}
