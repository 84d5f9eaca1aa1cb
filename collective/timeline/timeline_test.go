package timeline

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/collective"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// together runs body for every rank of a group of n concurrently.
func together(t *testing.T, n int, body func(g *collective.Group)) {
	t.Helper()
	groups := collective.Local(n)
	var wg sync.WaitGroup
	for _, g := range groups {
		wg.Go(func() { body(g) })
	}
	wg.Wait()
	for _, g := range groups {
		g.Close()
	}
}

// read returns the events of a file. It completes the JSON array, which the file leaves open.
func read(t *testing.T, path string) (events []map[string]any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.TrimSpace(string(data))
	if !strings.HasSuffix(text, "]") {
		text = strings.TrimSuffix(text, ",") + "]"
	}
	if err := json.Unmarshal([]byte(text), &events); err != nil {
		t.Fatalf("%s: %v\n%s", path, err, text)
	}
	return events
}

func count(events []map[string]any, name string) (n int) {
	for _, e := range events {
		if e["name"] == name {
			n++
		}
	}
	return n
}

func span(name string, at time.Time) collective.Span {
	return collective.Span{Name: name, Start: at, Duration: 1500 * time.Nanosecond, Generation: 1, Bytes: 4}
}

// record returns a function that records the spans of one rank.
func record(t *testing.T, name string, begun time.Time) func(g *collective.Group) {
	return func(g *collective.Group) {
		r := New(Config{Filename: name, RunID: "run"})
		if err := r.Enter(t.Context(), g); err != nil {
			t.Error(err)
		}
		r.Span(span("AllReduce", begun.Add(time.Second+123*time.Nanosecond)))
		s := span("AllReduce", begun.Add(2*time.Second))
		s.Tensor, s.Phase, s.Lane = `layer "1"`, "queue", 1<<63
		r.Span(s)
		s.Tensor = ""
		r.Span(s)
		r.Close()
		r.Span(s) // is late
		r.Close()
	}
}

// The operations of three ranks are merged into one trace that begins at 0.
func TestRecordAndMerge(t *testing.T) {
	name := filepath.Join(t.TempDir(), "trace.json")
	begun := time.Now()
	together(t, 3, record(t, name, begun))
	files, err := Files(name)
	if err != nil || len(files) != 3 || filepath.Base(files[1]) != "trace.rank.1.json" {
		t.Fatal(files, err)
	}
	for _, f := range files {
		if e := read(t, f); count(e, "AllReduce") != 1 || count(e, "queue") != 2 || count(e, "world 0") != 1 || count(e, "thread_name") != 3 {
			t.Error(e)
		}
	}
	if err := os.WriteFile(files[2], append(must(os.ReadFile(files[2])), `{"name":"half of a l`...), 0o666); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	m, err := Merge(&out, files)
	if err != nil || m.Events != 3*8 || m.Torn != 1 {
		t.Fatal(m, err)
	}
	if err := checkTrace(out.Bytes()); err != nil {
		t.Error(err)
	}
	merged := filepath.Join(t.TempDir(), "merged.json")
	if err := os.WriteFile(merged, out.Bytes(), 0o666); err != nil {
		t.Fatal(err)
	}
	least := 1e18
	for _, e := range read(t, merged) {
		if ts, ok := e["ts"].(float64); ok {
			least = min(least, ts)
			if e["name"] == "AllReduce" && (ts < 0.9e6 || ts > 1.1e6 || e["dur"] != 1.5 || e["args"].(map[string]any)["bytes"] != 4.0) {
				t.Error(e)
			}
		}
	}
	if least != 0 {
		t.Error("begins at", least)
	}
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// Differences between clocks are corrected. If clocks agree, nothing is corrected.
func TestClockOffset(t *testing.T) {
	together(t, 3, func(g *collective.Group) {
		ahead := []time.Duration{time.Hour, 0, time.Hour}[g.Rank()]
		got, err := clockOffset(t.Context(), g, func() int64 { return time.Now().Add(ahead).UnixNano() })
		off := time.Duration(got) - (time.Hour - ahead)
		if err != nil || off.Abs() > time.Second || ahead == time.Hour && got != 0 {
			t.Errorf("rank %d: %v, %v", g.Rank(), time.Duration(got), err)
		}
	})
}

func TestClockOffsetOfDead(t *testing.T) {
	groups := collective.Local(2)
	groups[1].Close()
	if err := New(Config{Filename: filepath.Join(t.TempDir(), "x")}).Enter(t.Context(), groups[0]); err == nil {
		t.Error("a world without rank 1")
	}
	groups[0].Close()
}

// The files of a rank stay below the bound, and contain whole events.
func TestBound(t *testing.T) {
	const bound = 400 << 10
	name := filepath.Join(t.TempDir(), "trace")
	together(t, 1, func(g *collective.Group) {
		r := New(Config{Filename: name, MaxBytes: bound})
		if err := r.Enter(t.Context(), g); err != nil {
			t.Error(err)
		}
		for range 10 {
			for range 1000 {
				r.Span(span("Barrier", time.Now()))
			}
			r.flush()
		}
		r.Close()
	})
	path, old := Path(name, 0)
	total := int64(0)
	for _, p := range []string{path, old} {
		if n := count(read(t, p), "Barrier"); n == 0 {
			t.Errorf("%s has none", p)
		}
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		total += info.Size()
	}
	if total > bound+2*maxBuffered {
		t.Errorf("%d bytes", total)
	}
}

// A later worker of the same rank and run continues the file. Another run truncates it.
func TestRuns(t *testing.T) {
	name := filepath.Join(t.TempDir(), "trace")
	path, old := Path(name, 0)
	for _, c := range []struct {
		run  string
		want int
	}{{"a", 1}, {"a", 2}, {"b", 1}, {"b", 2}} {
		together(t, 1, func(g *collective.Group) {
			r := New(Config{Filename: name, RunID: c.run})
			if err := r.Enter(t.Context(), g); err != nil {
				t.Error(err)
			}
			r.Span(span("Barrier", time.Now()))
			r.Close()
		})
		if n := count(read(t, path), "Barrier"); n != c.want {
			t.Errorf("run %s: %d, want %d", c.run, n, c.want)
		}
		if _, err := os.Stat(old); c.run == "b" && err == nil {
			t.Error("what the run before has moved away is still there")
		}
		if c.run == "a" {
			if err := os.WriteFile(old, []byte("[\n"), 0o666); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestUnwritable: if the disk fails, that is logged once in a world, and training continues.
func TestUnwritable(t *testing.T) {
	var said bytes.Buffer
	log := logrus.New()
	log.SetOutput(&said)
	for _, name := range []string{filepath.Join(t.TempDir(), "no", "such"), "/dev/full"} {
		said.Reset()
		together(t, 1, func(g *collective.Group) {
			r := New(Config{Filename: name, Log: log})
			if name == "/dev/full" {
				// Path would change the name.
				r.file = &rankFile{file: must2(os.OpenFile(name, os.O_WRONLY, 0)), rows: map[string]int{}, limit: 1 << 20}
				r.Span(span("Barrier", time.Now()))
				r.flush()
			} else if err := r.Enter(t.Context(), g); err != nil {
				t.Error(err)
			}
			r.Span(span("Barrier", time.Now()))
			r.flush()
			r.Close()
		})
		if n := strings.Count(said.String(), "not written until the next world"); n != 1 {
			t.Errorf("%s: said %d times: %s", name, n, said.String())
		}
	}
}

// TestWritableAgain: after a failure in one world, spans are written again in the next.
func TestWritableAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "late")
	r := New(Config{Filename: filepath.Join(dir, "t.json")})
	for range 2 {
		together(t, 1, func(g *collective.Group) {
			if err := r.Enter(t.Context(), g); err != nil {
				t.Error(err)
			}
		})
		r.Span(span("Barrier", time.Now()))
		r.flush()
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	r.Close()
	path, _ := Path(filepath.Join(dir, "t.json"), 0)
	if n := count(read(t, path), "Barrier"); n != 1 {
		t.Errorf("%d spans are written of one", n)
	}
}

func must2(f *os.File, err error) *os.File {
	if err != nil {
		panic(err)
	}
	return f
}

// Spans that arrive faster than they can be written are counted.
func TestLost(t *testing.T) {
	const each, by = 25_000, 4
	name := filepath.Join(t.TempDir(), "trace")
	together(t, 1, func(g *collective.Group) {
		r := New(Config{Filename: name})
		if err := r.Enter(t.Context(), g); err != nil {
			t.Error(err)
		}
		var wg sync.WaitGroup
		for range by {
			wg.Go(func() {
				for range each {
					r.Span(span("Barrier", time.Now()))
				}
			})
		}
		wg.Wait()
		r.Close()
	})
	path, _ := Path(name, 0)
	n := bytes.Count(must(os.ReadFile(path)), []byte(`"name":"Barrier"`))
	for line := range bytes.Lines(must(os.ReadFile(path))) {
		var e struct{ Args struct{ Spans int } }
		if bytes.Contains(line, []byte("spans lost")) && json.Unmarshal(bytes.TrimSuffix(line, []byte(",\n")), &e) == nil {
			n += e.Args.Spans
		}
	}
	if n != by*each {
		t.Errorf("%d of %d", n, by*each)
	}
}

func TestMergeOfNothing(t *testing.T) {
	var out bytes.Buffer
	if m, err := Merge(&out, nil); err != nil || m.Events != 0 || out.String() != "[\n]\n" {
		t.Errorf("%q, %v, %v", out.String(), m, err)
	}
	if _, err := Merge(io.Discard, []string{"no such file"}); err == nil {
		t.Error("no error")
	}
}

func TestMicros(t *testing.T) {
	for n, want := range map[int64]string{0: "0.000", 1: "0.001", -1500: "-1.500", 1234567: "1234.567"} {
		if got := string(appendMicros(nil, n)); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
		if n >= 0 {
			if back, ok := (event{"ts": json.RawMessage(want)}).nanos(); !ok || back != n {
				t.Errorf("%s: %d", want, back)
			}
		}
	}
}

func BenchmarkSpan(b *testing.B) {
	r := New(Config{Filename: filepath.Join(b.TempDir(), "trace")})
	s := span("AllReduce", time.Now())
	b.ReportAllocs()
	for b.Loop() {
		r.Span(s)
		if len(r.queued) == maxQueued {
			r.queued = r.queued[:0]
		}
	}
}
