// Package logline formats a log entry as one short line of text, and escapes control characters in
// texts of other machines.
package logline

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sirupsen/logrus"
)

const timeText = "15:04:05.000"

// Text is a [logrus.Formatter] that writes the time, the level, the message, and the fields sorted
// by name.
type Text struct {
	// Journal: systemd's journal reads the lines. Each begins with its priority, such as <4>,
	// instead of the time and level, which the journal records.
	Journal bool
	// Colour: warnings are yellow, and errors red.
	Colour bool
	// Raw reports whether a field's value is written without quotes; nil: none is.
	Raw func(value any) bool
}

// Format implements logrus.Formatter.
func (f Text) Format(e *logrus.Entry) ([]byte, error) {
	var b bytes.Buffer
	level := strings.ToUpper(e.Level.String())
	if e.Level == logrus.WarnLevel {
		level = "WARN"
	}
	if f.Journal {
		before := Priority(e.Level)
		b.WriteString(before + strings.ReplaceAll(EscapeLines(e.Message), "\n", "\n"+before))
	} else {
		level = fmt.Sprintf("%-5s", level)
		if f.Colour && e.Level <= logrus.WarnLevel {
			level = fmt.Sprintf("\x1b[%dm%s\x1b[0m", colour(e.Level), level)
		}
		fmt.Fprintf(&b, "%s %s %s", e.Time.Format(timeText), level, EscapeLines(e.Message))
	}
	names := make([]string, 0, len(e.Data))
	for name := range e.Data {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		value := fmt.Sprint(e.Data[name])
		if f.Raw != nil && f.Raw(e.Data[name]) {
			fmt.Fprintf(&b, " %s=%s", name, value)
			continue
		}
		if value == "" || strings.ContainsAny(value, " \t\r\n\"=") || Escape(value) != value {
			value = strconv.Quote(value)
		}
		fmt.Fprintf(&b, " %s=%s", name, value)
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}

// colour returns the terminal's code for the colour of a warning or an error.
func colour(level logrus.Level) int {
	if level == logrus.WarnLevel {
		return 33
	}
	return 31
}

// Priority returns a level in the form in which systemd's journal reads it at the beginning of a
// line.
func Priority(level logrus.Level) string {
	switch level {
	case logrus.PanicLevel, logrus.FatalLevel:
		return "<2>"
	case logrus.ErrorLevel:
		return "<3>"
	case logrus.WarnLevel:
		return "<4>"
	case logrus.InfoLevel:
		return "<6>"
	}
	return "<7>"
}

// EscapeLines is like Escape, for a text that begins on a new line. It indents the other lines, so
// that none of them looks like a line of this program.
func EscapeLines(text string) string {
	return strings.ReplaceAll(Escape(strings.TrimRight(text, "\n")), "\n", "\n    ")
}

// Escape escapes characters that could control a terminal, as "\x1b", and keeps line ends and tabs.
// It is for texts of other machines and of workers in log lines, errors and tables.
func Escape(text string) string {
	commands := func(r rune) bool {
		return unicode.IsControl(r) && r != '\n' && r != '\t' || r == utf8.RuneError || unicode.Is(unicode.Bidi_Control, r)
	}
	if !strings.ContainsFunc(text, commands) {
		return text
	}
	var b strings.Builder
	for i, r := range text {
		_, size := utf8.DecodeRuneInString(text[i:])
		if part := text[i : i+size]; commands(r) {
			b.WriteString(strings.Trim(strconv.QuoteToASCII(part), `"`))
		} else {
			b.WriteString(part)
		}
	}
	return b.String()
}
