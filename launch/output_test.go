package launch_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/sirupsen/logrus"
	"pgregory.net/rapid"

	"github.com/hvdrun/hvdrun/launch"
)

// sink records each Write separately. It needs no lock: Output writes one line at a time.
type sink struct{ writes []string }

func (s *sink) Write(p []byte) (int, error) {
	s.writes = append(s.writes, string(p))
	return len(p), nil
}

func (s *sink) text() string { return strings.Join(s.writes, "") }

func always(rank int) func() int { return func() int { return rank } }

func write(t *testing.T, w interface{ Write([]byte) (int, error) }, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if n, err := w.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatalf("Write returned %d, %v", n, err)
		}
	}
}

func TestOUT01_EachLineIsPrefixed(t *testing.T) {
	var out sink
	w := launch.TaggedWriter(&launch.Output{Stdout: &out}, "prefix", always(123))
	write(t, w, "first line\nsecond line\nthird line\n")
	want := "[123]<prefix>:first line\n[123]<prefix>:second line\n[123]<prefix>:third line\n"
	if out.text() != want || len(out.writes) != 3 {
		t.Fatalf("%d writes: %q", len(out.writes), out.text())
	}
}

func TestOUT01_StdoutAndStderr(t *testing.T) {
	var out, errOut sink
	stdout, stderr := (&launch.Output{Stdout: &out, Stderr: &errOut}).Worker(always(7))
	write(t, stdout, "a\n")
	write(t, stderr, "b\n")
	if out.text() != "[7]<stdout>:a\n" || errOut.text() != "[7]<stderr>:b\n" {
		t.Fatalf("stdout %q, stderr %q", out.text(), errOut.text())
	}
}

func TestOUT02_CharactersStayWhole(t *testing.T) {
	line := strings.Repeat("€", 6000) + "\n"
	var out sink
	w := launch.TaggedWriter(&launch.Output{Stdout: &out}, "prefix", always(1))
	for i := range len(line) { // byte by byte
		write(t, w, line[i:i+1])
	}
	if len(out.writes) != 1 || out.writes[0] != "[1]<prefix>:"+line {
		t.Fatalf("%d writes", len(out.writes))
	}
}

func TestOUT02_OverlongLineIsCutBetweenCharacters(t *testing.T) {
	for shift := range 4 {
		text := strings.Repeat("x", shift) + strings.Repeat("🙂", launch.MaxPiece*5/8)
		var out sink
		w := launch.TaggedWriter(&launch.Output{Stdout: &out}, "prefix", always(1))
		write(t, w, text)
		if len(out.writes) < 2 {
			t.Fatalf("%d writes: nothing is passed on", len(out.writes))
		}
		write(t, w, "\nnext\n")
		for i, piece := range out.writes {
			if !utf8.ValidString(piece) || len(piece) > launch.MaxPiece+len("[1]<prefix>:") {
				t.Errorf("piece %d of %d bytes, valid %v", i, len(piece), utf8.ValidString(piece))
			}
		}
		if want := "[1]<prefix>:" + text + "\n[1]<prefix>:next\n"; out.text() != want {
			t.Errorf("shift %d: the text has changed", shift)
		}
	}
}

func TestOUT02_BytesThatAreNoTextPass(t *testing.T) {
	text := "\xff\xfe" + strings.Repeat("\x80", 3*launch.MaxPiece)
	var out sink
	w := launch.TaggedWriter(&launch.Output{Stdout: &out}, "prefix", always(1))
	write(t, w, text, "\n")
	if out.text() != "[1]<prefix>:"+text+"\n" {
		t.Fatalf("the text has changed")
	}
}

func TestOUT03_Timestamps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out sink
		o := &launch.Output{Stdout: &out, Timestamps: true}
		write(t, launch.TaggedWriter(o, "prefix", always(123)), "first line\n")
		if want := time.Now().Format("Mon Jan _2 15:04:05 2006") + "[123]<prefix>:first line\n"; out.text() != want {
			t.Fatalf("got %q, want %q", out.text(), want)
		}
	})
}

func TestOUT04_LastPartWithoutNewline(t *testing.T) {
	var out sink
	w := launch.TaggedWriter(&launch.Output{Stdout: &out}, "prefix", always(0))
	write(t, w, "first\nlast")
	if len(out.writes) != 1 {
		t.Fatalf("writes %q", out.writes)
	}
	for range 2 {
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if want := "[0]<prefix>:first\n[0]<prefix>:last"; out.text() != want {
		t.Fatalf("got %q, want %q", out.text(), want)
	}
}

func TestOUT04_NothingIsGluedToATail(t *testing.T) {
	var out, errOut sink
	o := &launch.Output{Stdout: &out, Stderr: &errOut}
	a, aErr := o.Worker(always(0))
	b, bErr := o.Worker(always(1))
	write(t, a, "tail")
	a.Close()
	write(t, aErr, "other stream\n")
	write(t, b, "line\n")
	write(t, bErr, "line\n")
	if want := "[0]<stdout>:tail\n[1]<stdout>:line\n"; out.text() != want {
		t.Errorf("got %q, want %q", out.text(), want)
	}
	if want := "[0]<stderr>:other stream\n[1]<stderr>:line\n"; errOut.text() != want {
		t.Errorf("got %q, want %q", errOut.text(), want)
	}
}

func TestOUT04_OneTerminalForBoth(t *testing.T) {
	var out sink
	stdout, stderr := (&launch.Output{Stdout: &out, Stderr: &out}).Worker(always(0))
	write(t, stdout, "tail")
	stdout.Close()
	write(t, stderr, "error\n")
	if want := "[0]<stdout>:tail\n[0]<stderr>:error\n"; out.text() != want {
		t.Fatalf("got %q, want %q", out.text(), want)
	}
}

func TestInterruptedOverlongLine(t *testing.T) {
	var out sink
	o := &launch.Output{Stdout: &out}
	a, _ := o.Worker(always(0))
	b, _ := o.Worker(always(1))
	long := strings.Repeat("x", launch.MaxPiece)
	write(t, a, long+"y")
	write(t, b, "short\n")
	write(t, a, "z\n")
	if want := "[0]<stdout>:" + long + "\n[1]<stdout>:short\n[0]<stdout>:yz\n"; out.text() != want {
		t.Fatalf("got ...%q", out.text()[launch.MaxPiece:])
	}
}

func TestOUT05_NoIndexOrNoTag(t *testing.T) {
	for name, test := range map[string]struct {
		tag  string
		rank func() int
	}{"no index": {"prefix", nil}, "negative": {"prefix", always(-1)}, "no tag": {"", always(1)}} {
		var out sink
		w := launch.TaggedWriter(&launch.Output{Stdout: &out, Timestamps: true}, test.tag, test.rank)
		write(t, w, "a\nb\rc")
		w.Close()
		if out.text() != "a\nb\rc" {
			t.Errorf("%s: got %q", name, out.text())
		}
	}
}

func TestOUT06_CarriageReturn(t *testing.T) {
	var out sink
	w := launch.TaggedWriter(&launch.Output{Stdout: &out}, "prefix", always(0))
	write(t, w, "10%\r20%\rdone\r\nnext\r", "\nlast\n", "\r", "\r\n")
	want := "[0]<prefix>:10%\r[0]<prefix>:20%\r[0]<prefix>:done\r\n[0]<prefix>:next\r\n[0]<prefix>:last\n" +
		"[0]<prefix>:\r[0]<prefix>:\r\n"
	if out.text() != want {
		t.Fatalf("got  %q\nwant %q", out.text(), want)
	}
}

func TestOUT07_FlushedOnlyAtTheEndOfALine(t *testing.T) {
	var out sink
	w := launch.TaggedWriter(&launch.Output{Stdout: &out}, "prefix", always(0))
	for _, step := range []struct{ part, want string }{
		{"first line\r", "[0]<prefix>:first line\r"},
		{"first ", ""},
		{"line ", ""},
		{"again\n", "[0]<prefix>:first line again\n"},
		{"second", ""},
		{" line\n", "[0]<prefix>:second line\n"},
	} {
		out.writes = nil
		write(t, w, step.part)
		if out.text() != step.want {
			t.Fatalf("after %q: got %q, want %q", step.part, out.text(), step.want)
		}
	}
}

func TestRankIsThatOfTheEndOfTheLine(t *testing.T) {
	var out sink
	rank := 3
	dir := t.TempDir()
	o := &launch.Output{Stdout: &out, Dir: dir}
	w, _ := o.Worker(func() int { return rank })
	write(t, w, "one\ntw")
	rank = 1
	write(t, w, "o\n")
	if want := "[3]<stdout>:one\n[1]<stdout>:two\n"; out.text() != want {
		t.Fatalf("got %q, want %q", out.text(), want)
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	wantFile(t, filepath.Join(dir, "rank.3", "stdout"), "[3]<stdout>:one\n")
	wantFile(t, filepath.Join(dir, "rank.1", "stdout"), "[1]<stdout>:two\n")
	if _, err := os.Stat(filepath.Join(dir, "rank.1", "stderr")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file was made that nothing was written to: %v", err)
	}
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s holds %q, want %q (%v)", path, got, want, err)
	}
}

func TestFilesAreAppended(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		o := &launch.Output{Dir: dir}
		stdout, stderr := o.Worker(always(0))
		write(t, stdout, "line\ntail")
		write(t, stderr, "error\n")
		stdout.Close()
		stderr.Close()
		if err := o.Close(); err != nil {
			t.Fatal(err)
		}
	}
	wantFile(t, filepath.Join(dir, "rank.0", "stdout"), strings.Repeat("[0]<stdout>:line\n[0]<stdout>:tail\n", 2)[:67])
	wantFile(t, filepath.Join(dir, "rank.0", "stderr"), strings.Repeat("[0]<stderr>:error\n", 2))
}

func TestFileFailureIsToldOnceAndLosesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(dir, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	var out sink
	var log bytes.Buffer
	logger := logrus.New()
	logger.SetOutput(&log)
	o := &launch.Output{Stdout: &out, Dir: dir, Log: logger}
	w, _ := o.Worker(always(0))
	write(t, w, "a\n", "b\n")
	if out.text() != "[0]<stdout>:a\n[0]<stdout>:b\n" {
		t.Errorf("got %q", out.text())
	}
	err := o.Close()
	if err == nil || !strings.HasPrefix(err.Error(), "launch: ") || !strings.Contains(err.Error(), dir) {
		t.Errorf("Close returned %v", err)
	}
	if n := strings.Count(log.String(), "\n"); n != 1 {
		t.Errorf("%d lines in the log: %s", n, log.String())
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("broken") }

func TestConsoleFailureSparesFiles(t *testing.T) {
	dir := t.TempDir()
	o := &launch.Output{Stdout: brokenWriter{}, Dir: dir}
	w, _ := o.Worker(always(2))
	write(t, w, "a\n", "b\n")
	if err := o.Close(); err == nil || !strings.HasSuffix(err.Error(), "broken") {
		t.Errorf("Close returned %v", err)
	}
	wantFile(t, filepath.Join(dir, "rank.2", "stdout"), "[2]<stdout>:a\n[2]<stdout>:b\n")
}

// TestPartsDoNotMatter: the output does not depend on the parts in which text arrives. It is
// compared with that of the whole text.
func TestPartsDoNotMatter(t *testing.T) {
	lineEnds := regexp.MustCompile("[^\r\n]*(\r\n|\r|\n)")
	rapid.Check(t, func(t *rapid.T) {
		atom := rapid.SampledFrom([]string{"a", "é", "🙂", "\xf0\x9f", "\xff", "\n", "\r", "\r\n"})
		text := strings.Join(rapid.SliceOf(atom).Draw(t, "text"), "")
		var out sink
		w := launch.TaggedWriter(&launch.Output{Stdout: &out}, "p", always(0))
		for rest := text; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "part")
			_, _ = w.Write([]byte(rest[:n]))
			rest = rest[n:]
		}
		_ = w.Close()
		want := lineEnds.ReplaceAllString(text, "[0]<p>:$0")
		if i := strings.LastIndexAny(text, "\r\n") + 1; i < len(text) {
			want = want[:len(want)-len(text[i:])] + "[0]<p>:" + text[i:]
		}
		if out.text() != want {
			t.Fatalf("text %q: got %q, want %q", text, out.text(), want)
		}
	})
}

func TestLinesOfManyWorkersStayApart(t *testing.T) {
	var out sink
	o := &launch.Output{Stdout: &out, Stderr: &out, Dir: t.TempDir()}
	const workers, lines = 8, 100
	var wg sync.WaitGroup
	for rank := range workers {
		stdout, stderr := o.Worker(always(rank))
		for tag, w := range map[string]*launch.LineWriter{"stdout": stdout, "stderr": stderr} {
			wg.Go(func() {
				random := rand.New(rand.NewPCG(uint64(rank), uint64(len(tag))))
				var text strings.Builder
				for i := range lines {
					fmt.Fprintf(&text, "%d %s %d é\n", rank, tag, i)
				}
				for rest := text.String(); rest != ""; {
					n := min(1+random.IntN(40), len(rest))
					_, _ = w.Write([]byte(rest[:n]))
					rest = rest[n:]
				}
				_ = w.Close()
			})
		}
	}
	wg.Wait()
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	next := make(map[string]int) // number of the next line, by prefix
	for _, line := range out.writes {
		prefix, _, _ := strings.Cut(line, ":")
		words := strings.FieldsFunc(prefix, func(r rune) bool { return strings.ContainsRune("[]<>", r) })
		if len(words) != 2 {
			t.Fatalf("line %q", line)
		}
		if want := fmt.Sprintf("%s:%s %s %d é\n", prefix, words[0], words[1], next[prefix]); line != want {
			t.Fatalf("line %q, want %q", line, want)
		}
		next[prefix]++
	}
	if len(out.writes) != 2*workers*lines {
		t.Fatalf("%d lines", len(out.writes))
	}
}
