package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
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
type textFormat struct {
	// journal: systemd's journal reads the lines. Each begins with its priority, as <4>, in place
	// of time and level, which the journal has.
	journal bool
}

// Format returns the line.
func (f textFormat) Format(e *logrus.Entry) ([]byte, error) {
	var b bytes.Buffer
	level := strings.ToUpper(e.Level.String())
	if e.Level == logrus.WarnLevel {
		level = "WARN"
	}
	if f.journal {
		before := priority(e.Level)
		b.WriteString(before + strings.ReplaceAll(escapeLines(e.Message), "\n", "\n"+before))
	} else {
		fmt.Fprintf(&b, "%s %-5s %s", e.Time.Format(timeText), level, escapeLines(e.Message))
	}
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

// priority is a level as systemd's journal reads it at the beginning of a line.
func priority(level logrus.Level) string {
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

// readByJournal returns whether systemd's journal reads what is written to w: JOURNAL_STREAM names
// the device and the inode of what it gave to the service.
func readByJournal(env []string, w io.Writer) bool {
	given, _ := lookup(env, "JOURNAL_STREAM")
	if s, wrapped := w.(*stream); wrapped {
		w = s.w
	}
	f, is := w.(*os.File)
	if given == "" || !is {
		return false
	}
	info, err := f.Stat()
	if err != nil {
		return false
	}
	stat, is := info.Sys().(*syscall.Stat_t)
	return is && given == fmt.Sprintf("%d:%d", stat.Dev, stat.Ino)
}

// jobField is a hook that adds a job's run id to each entry of the log.
type jobField string

// Levels returns all levels.
func (jobField) Levels() []logrus.Level { return logrus.AllLevels }

// Fire adds the field, unless there is one.
func (j jobField) Fire(e *logrus.Entry) error {
	if _, has := e.Data["job"]; !has {
		e.Data["job"] = string(j)
	}
	return nil
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
