package main

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/clitest"
)

// FuzzEscape: nothing commands a terminal, and what is escaped stays as it is.
func FuzzEscape(f *testing.F) {
	f.Add(clitest.Foreign)
	f.Add("plain\n")
	f.Add("\xf0\x9f\x98")
	f.Fuzz(func(t *testing.T, text string) {
		commands := func(r rune) bool {
			return unicode.IsControl(r) && r != '\n' && r != '\t' || unicode.Is(unicode.Bidi_Control, r)
		}
		for _, escaped := range []string{escape(text), escapeLines(text), escapeCell(text)} {
			if !utf8.ValidString(escaped) || strings.ContainsFunc(escaped, commands) || escape(escaped) != escaped {
				t.Errorf("%q becomes %q", text, escaped)
			}
		}
		if cell := escapeCell(text); strings.ContainsAny(cell, "\n\t") {
			t.Errorf("%q becomes %q", text, cell)
		}
		for i, line := range strings.Split(escapeLines(text), "\n") {
			if i > 0 && !strings.HasPrefix(line, "    ") {
				t.Errorf("%q: line %d is %q", text, i, line)
			}
		}
	})
}
