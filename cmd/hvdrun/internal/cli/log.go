package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/internal/logline"
)

// TimeText and TimeJSON are the formats of times in text and in JSON.
const (
	TimeText = "15:04:05.000"
	TimeJSON = "2006-01-02T15:04:05.000000000Z07:00"
)

// TextFormat returns the text format of a log that is written to w. Records of the audit are JSON,
// so they are not escaped.
func TextFormat(env []string, w io.Writer) logline.Text {
	return logline.Text{Journal: ReadByJournal(env, w), Colour: isColourful(env, w), Raw: func(value any) bool {
		_, is := value.(audit.Record)
		return is
	}}
}

// isColourful reports whether w is a terminal and colours are not disabled (NO_COLOR).
func isColourful(env []string, w io.Writer) bool {
	if s, wrapped := w.(*Stream); wrapped {
		w = s.W
	}
	refused, _ := Lookup(env, "NO_COLOR")
	kind, _ := Lookup(env, "TERM")
	f, is := w.(*os.File)
	return is && refused == "" && kind != "dumb" && IsTerminal(f)
}

// ReadByJournal reports whether systemd's journal reads what is written to w: JOURNAL_STREAM names
// the device and the inode of the stream that systemd gave to the service.
func ReadByJournal(env []string, w io.Writer) bool {
	given, _ := Lookup(env, "JOURNAL_STREAM")
	if s, wrapped := w.(*Stream); wrapped {
		w = s.W
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

// JobField is a hook that adds a job's run id to each entry of the log.
type JobField string

// Levels returns all levels.
func (JobField) Levels() []logrus.Level { return logrus.AllLevels }

// Fire adds the field, unless the entry already has one.
func (j JobField) Fire(e *logrus.Entry) error {
	if _, has := e.Data["job"]; !has {
		e.Data["job"] = string(j)
	}
	return nil
}

// EscapeLines is like Escape, for a text that begins at the start of a line.
func EscapeLines(text string) string { return logline.EscapeLines(text) }

// EscapeCell is like Escape, for a part of a line or of a table: it escapes ends of lines and tabs
// too.
func EscapeCell(text string) string {
	return strings.NewReplacer("\n", `\n`, "\t", `\t`).Replace(Escape(text))
}

// Escape escapes characters that could control a terminal. It is for texts of other machines and of
// workers, which appear in log lines, errors and tables.
func Escape(text string) string { return logline.Escape(text) }
