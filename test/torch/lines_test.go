package torch

import (
	"bufio"
	"io"
	"strings"
	"testing"
)

// lines are those that workers write, as they come.
type lines struct{ in *bufio.Reader }

func newLines(r io.Reader) *lines { return &lines{bufio.NewReader(r)} }

// await blocks until a worker has made a step in a world of that size.
func (l *lines) await(t *testing.T, world string) {
	t.Helper()
	for {
		line, err := l.in.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if fields := strings.Split(strings.TrimSpace(line), "\t"); len(fields) == 7 && fields[1] == "step" && fields[4] == world {
			return
		}
	}
}
