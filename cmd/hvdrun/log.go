package main

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/audit"
)

const (
	timeText = "15:04:05.000"
	timeJSON = "2006-01-02T15:04:05.000000000Z07:00"
)

// textFormat writes an entry as one short line: time, level, message, fields in the order of their
// names.
type textFormat struct{}

// Format returns the line.
func (textFormat) Format(e *logrus.Entry) ([]byte, error) {
	var b bytes.Buffer
	level := strings.ToUpper(e.Level.String())
	if e.Level == logrus.WarnLevel {
		level = "WARN"
	}
	fmt.Fprintf(&b, "%s %-5s %s", e.Time.Format(timeText), level, escapeLines(e.Message))
	names := make([]string, 0, len(e.Data))
	for name := range e.Data {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		value := fmt.Sprint(e.Data[name])
		if _, is := e.Data[name].(audit.Record); is {
			fmt.Fprintf(&b, " %s=%s", name, value) // JSON, in which nothing needs to be escaped
			continue
		}
		if value == "" || strings.ContainsAny(value, " \t\r\n\"=") || escape(value) != value {
			value = strconv.Quote(value)
		}
		fmt.Fprintf(&b, " %s=%s", name, value)
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}

// escapeLines is escape for a text that begins on a line of its own. All others of its lines are
// indented, so that none of them can pass for one that this program has begun.
func escapeLines(text string) string {
	return strings.ReplaceAll(escape(strings.TrimRight(text, "\n")), "\n", "\n    ")
}

// escapeCell is escape for a part of a line or of a table: ends of lines and tabs are escaped too.
func escapeCell(text string) string {
	return strings.NewReplacer("\n", `\n`, "\t", `\t`).Replace(escape(text))
}

// escape escapes what could command a terminal, as "\x1b", and keeps line ends and tabs. Texts
// of other machines and of workers are parts of log lines, errors and tables.
func escape(text string) string {
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
