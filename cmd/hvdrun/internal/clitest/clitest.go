// Package clitest has what the tests of several packages of hvdrun's command share.
package clitest

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// Foreign is what a host, a plugin or a worker may say: it clears the screen, begins a line of the
// log, breaks a table, and is not valid UTF-8.
const Foreign = "\x1b[2Ja\n12:00:00.000 INFO  all is well\nhvdrun: done\tb\u009b1m\u202e\xff"

// Tame checks that a text shows Foreign escaped: it has the given number of lines (0: any),
// contains no control characters of a terminal, and none of its lines begins like one of Foreign.
func Tame(t *testing.T, what, text string, lines int) {
	t.Helper()
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' || r == '\u202e' }) {
		t.Errorf("%s: %q", what, text)
	}
	if n := strings.Count(text, "\n"); lines > 0 && n != lines {
		t.Errorf("%s: %d lines: %q", what, n, text)
	}
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "12:00:00") || strings.HasPrefix(line, "hvdrun: done") {
			t.Errorf("%s: %q", what, text)
		}
	}
	if !strings.Contains(text, `\x1b[2J`) && !strings.Contains(text, `\u009b1m`) {
		t.Errorf("%s: it is not shown: %q", what, text)
	}
}
