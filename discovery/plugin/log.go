package plugin

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/hashicorp/go-hclog"
	"github.com/sirupsen/logrus"
)

// libraryLog returns a log for go-plugin, whose messages are for the authors of plugins. This
// package itself reports what matters to users.
func libraryLog(log logrus.FieldLogger) hclog.Logger {
	l := hclog.NewInterceptLogger(&hclog.LoggerOptions{Level: hclog.Debug, Output: io.Discard})
	l.RegisterSink(librarySink{log})
	return l
}

type librarySink struct{ log logrus.FieldLogger }

// Accept implements hclog.SinkAdapter.
func (s librarySink) Accept(_ string, _ hclog.Level, message string, pairs ...any) {
	fields := logrus.Fields{}
	for i := 0; i+1 < len(pairs); i += 2 {
		fields[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	s.log.WithFields(fields).Debug("discovery/plugin: go-plugin: " + message)
}

// logLine logs a line that a plugin has printed. A line that hclog has written as JSON keeps its
// level and its fields.
func logLine(log logrus.FieldLogger, line string) {
	var entry map[string]any
	if strings.HasPrefix(line, "{") && json.Unmarshal([]byte(line), &entry) == nil {
		message, isText := entry["@message"].(string)
		level, _ := entry["@level"].(string)
		if isText {
			fields := logrus.Fields{}
			for key, value := range entry {
				if !strings.HasPrefix(key, "@") {
					fields[key] = value
				}
			}
			logAt(log.WithFields(fields), level, message)
			return
		}
	}
	log.Info("discovery/plugin: says: " + line)
}

func logAt(log logrus.FieldLogger, level, message string) {
	message = "discovery/plugin: says: " + message
	switch hclog.LevelFromString(level) {
	case hclog.Trace, hclog.Debug:
		log.Debug(message)
	case hclog.Warn:
		log.Warn(message)
	case hclog.Error:
		log.Error(message)
	default:
		log.Info(message)
	}
}
