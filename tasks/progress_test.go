package tasks

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

func TestBar(t *testing.T) {
	now := time.Unix(1000, 0)
	var out strings.Builder
	b := &bar{w: &out, terminal: true, name: "f", all: 4, began: now}
	for range 4 {
		now = now.Add(time.Second)
		b.add(now)
		b.add(now)
		b.over--
	}
	b.close(now)
	want := "\rf [#######.......................] 1 of 4, 1/s, 3s left\x1b[K" +
		"\rf [###############...............] 2 of 4, 1/s, 2s left\x1b[K" +
		"\rf [######################........] 3 of 4, 1/s, 1s left\x1b[K" +
		"\rf [##############################] 4 of 4, 1/s, in 4s\x1b[K\n"
	if out.String() != want {
		t.Errorf("%q, not %q", out.String(), want)
	}
	out.Reset()
	b = &bar{w: &out, name: "f", all: 100, began: now}
	for range 100 {
		now = now.Add(time.Second)
		b.add(now)
	}
	b.close(now)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 10 || lines[0] != "f 10 of 100, 1/s, 1m30s left" || lines[9] != "f 100 of 100, 1/s, in 1m40s" {
		t.Errorf("%q", lines)
	}
	if line := (&bar{terminal: true, name: "f"}).line(now); !strings.HasPrefix(line, "f [##############################] 0 of 0") {
		t.Error(line)
	}
}

// TestMapShows: Map shows how far it is where it is asked for.
func TestMapShows(t *testing.T) {
	p := newPlace(t, scheduler.Config{})
	p.serve(ServeConfig{})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	pool := p.connect(ConnectConfig{Progress: w})
	if _, err := Map(t.Context(), pool, double, []int{1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	w.Close()
	text := make([]byte, 1000)
	n, _ := r.Read(text)
	if got := string(text[:n]); !strings.HasPrefix(got, "double/v1 3 of 3, ") || strings.Count(got, "\n") != 1 {
		t.Errorf("%q", got)
	}
	// And what a task waits for is explained.
	f, err := double.With(CPU(1000)).Submit(t.Context(), pool, 1)
	if err != nil {
		t.Fatal(err)
	}
	all, err := pool.Explain(t.Context(), "4")
	if err != nil || len(all) != 1 || !strings.Contains(all[0].Why, "less than cpu=1000") || all[0].By == "" {
		t.Errorf("%+v, %v", all, err)
	}
	if all, err = pool.Explain(t.Context(), "double/v1"); err != nil || len(all) != 1 || all[0].N != 4 {
		t.Errorf("%+v, %v", all, err)
	}
	f.Cancel()
}
