package gossip

import (
	"bytes"
	"log"
	"strings"

	"github.com/sirupsen/logrus"
)

// noise lists messages that memberlist logs all the time.
var noise = []string{
	"Stream connection", "Initiating push/pull sync", "Using dynamic bind port", "not a NodeAwareTransport",
	"Was able to connect to", "Failed UDP ping",
}

// libraryLog writes memberlist's lines to the log at debug level. They concern single packets; what
// matters shows in the lists of hosts.
type libraryLog struct{ log logrus.FieldLogger }

func newLibraryLog(to logrus.FieldLogger) *log.Logger { return log.New(libraryLog{to}, "", 0) }

// Write takes one line: "[WARN] memberlist: text".
func (l libraryLog) Write(line []byte) (int, error) {
	text := string(bytes.TrimSpace(line))
	for _, n := range noise {
		if strings.Contains(text, n) {
			return len(line), nil
		}
	}
	level := ""
	if rest, ok := strings.CutPrefix(text, "["); ok {
		level, text, _ = strings.Cut(rest, "] ")
	}
	text = strings.TrimPrefix(text, "memberlist: ")
	l.log.WithField("said", level).Debug("gossip: memberlist: " + text)
	return len(line), nil
}
