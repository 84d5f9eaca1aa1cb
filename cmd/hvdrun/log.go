package main

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sirupsen/logrus"
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
	fmt.Fprintf(&b, "%s %-5s %s", e.Time.Format(timeText), level, strings.TrimRight(e.Message, "\n"))
	names := make([]string, 0, len(e.Data))
	for name := range e.Data {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		value := fmt.Sprint(e.Data[name])
		if value == "" || strings.ContainsAny(value, " \t\r\n\"=") {
			value = strconv.Quote(value)
		}
		fmt.Fprintf(&b, " %s=%s", name, value)
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}
