package cli

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/clitest"
	"github.com/hvdrun/hvdrun/internal/logline"
)

// TestJournalLines: if systemd's journal reads the log, each line has its priority, but no time and
// level.
func TestJournalLines(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	info, err := w.Stat()
	if err != nil {
		t.Fatal(err)
	}
	stat := info.Sys().(*syscall.Stat_t)
	ours := fmt.Sprintf("JOURNAL_STREAM=%d:%d", stat.Dev, stat.Ino)
	for env, want := range map[string]bool{ours: true, ours + "1": false, "OTHER=1": false} {
		if got := ReadByJournal([]string{env}, &Stream{W: w}); got != want {
			t.Errorf("%s: %v", env, got)
		}
	}
	if ReadByJournal([]string{ours}, &bytes.Buffer{}) {
		t.Error("what is no file is read by the journal")
	}
	for level, want := range map[logrus.Level]string{
		logrus.ErrorLevel: "<3>one\n<3>    two host=a\n", logrus.WarnLevel: "<4>one\n<4>    two host=a\n",
		logrus.InfoLevel: "<6>one\n<6>    two host=a\n", logrus.DebugLevel: "<7>one\n<7>    two host=a\n",
	} {
		line, err := logline.Text{Journal: true}.Format(&logrus.Entry{Level: level, Message: "one\ntwo", Data: logrus.Fields{"host": "a"}})
		if err != nil || string(line) != want {
			t.Errorf("%v: %q, %v", level, line, err)
		}
	}
}

// FuzzEscape: escaped text does not control a terminal, and escaping it again does not change it.
func FuzzEscape(f *testing.F) {
	f.Add(clitest.Foreign)
	f.Add("plain\n")
	f.Add("\xf0\x9f\x98")
	f.Fuzz(func(t *testing.T, text string) {
		commands := func(r rune) bool {
			return unicode.IsControl(r) && r != '\n' && r != '\t' || unicode.Is(unicode.Bidi_Control, r)
		}
		for _, escaped := range []string{Escape(text), EscapeLines(text), EscapeCell(text)} {
			if !utf8.ValidString(escaped) || strings.ContainsFunc(escaped, commands) || Escape(escaped) != escaped {
				t.Errorf("%q becomes %q", text, escaped)
			}
		}
		if cell := EscapeCell(text); strings.ContainsAny(cell, "\n\t") {
			t.Errorf("%q becomes %q", text, cell)
		}
		for i, line := range strings.Split(EscapeLines(text), "\n") {
			if i > 0 && !strings.HasPrefix(line, "    ") {
				t.Errorf("%q: line %d is %q", text, i, line)
			}
		}
	})
}
