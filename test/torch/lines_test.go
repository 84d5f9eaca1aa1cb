package torch

import (
	"bufio"
	"io"
	"strconv"
	"strings"
	"testing"
)

// event is a line that a worker writes.
type event struct {
	at                               float64 // seconds since 1970
	name, rank, world, restart, step string
}

// parse parses a line; ok is false if it is not an event.
func parse(line string) (e event, ok bool) {
	f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
	if len(f) != 7 {
		return e, false
	}
	at, err := strconv.ParseFloat(f[0], 64)
	return event{at, f[1], f[3], f[4], f[5], f[6]}, err == nil
}

// lines are the lines that workers write, in their order.
type lines struct {
	in   *bufio.Reader
	last float64 // the time of the last event that was returned
}

func newLines(r io.Reader) *lines { return &lines{in: bufio.NewReader(r)} }

// await blocks until a worker has completed a step in a world of this size.
func (l *lines) await(t *testing.T, world string) {
	t.Helper()
	l.until(t, func(e event) bool { return e.name == "step" && e.world == world })
}

func (l *lines) until(t *testing.T, is func(event) bool) {
	t.Helper()
	for {
		line, err := l.in.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := parse(line); ok {
			l.last = e.at
			if is(e) {
				return
			}
		}
	}
}
