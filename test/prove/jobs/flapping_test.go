package main

import (
	"fmt"
	"strings"
	"testing"
)

// TestLogged: neither lines of workers nor lines after the stop count; 21 lines within 10 s are too
// many.
func TestLogged(t *testing.T) {
	text := func(lines, pause int) string {
		var b strings.Builder
		for i := range lines {
			fmt.Fprintf(&b, "23:59:%02d.%03d INFO  world %d\n[0]<stdout>:23:59:00.000 INFO  a worker\n", i*pause/1000, i*pause%1000, i)
		}
		return b.String() + "23:59:59.000 WARN  stopped by signal: interrupt\n23:59:59.000 INFO  the job was stopped\n"
	}
	if n, err := logged(text(40, 500)); n != 40 || err != nil {
		t.Errorf("%d lines, %v", n, err)
	}
	if n, err := logged(text(21, 499)); n != 21 || err == nil || !strings.Contains(err.Error(), "world 20") {
		t.Errorf("%d lines, %v", n, err)
	}
}
