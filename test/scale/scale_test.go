package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		if err := play(context.Background(), role); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// A small job runs all phases: it forms a world, grows, shrinks, loses a tenth at once, and is
// stopped.
func TestSmallCrowd(t *testing.T) {
	s, err := job(t.Context(), scenario{Workers: 50})
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range quantities {
		if *q.of(&s) <= 0 {
			t.Errorf("%s: %v", q.name, *q.of(&s))
		}
	}
}

func TestReport(t *testing.T) {
	few := median([]sample{{Formed: 30}, {Formed: 10}, {Formed: 20}})
	var out bytes.Buffer
	write(&out, []int{100, 1000}, []sample{few, {Formed: 200, Acked: 5}})
	for _, want := range []string{
		"| workers | 100 | 1000 | exponent |\n|---|---|---|---|\n",
		"| from the start until all have the first world, ms | 20 | 200 | 1.00 |\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report has no %q:\n%s", want, out.String())
		}
	}
	if got := exponent(10, 1000, 3, 30); got < 0.499 || got > 0.501 {
		t.Errorf("ten times as much for a hundred times as many: exponent %v", got)
	}
}
