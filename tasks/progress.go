package tasks

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	barEvery  = 100 * time.Millisecond // on a terminal
	lineEvery = 10 * time.Second       // elsewhere
	barWidth  = 30
)

// bar shows how many of some tasks are over.
type bar struct {
	w        io.Writer
	terminal bool
	name     string
	all      int
	over     int
	began    time.Time
	shown    time.Time // when it was shown last; zero: never
}

// newBar returns a bar on a file. On a terminal it is one line, which is drawn again.
func newBar(f *os.File, name string, all int, now time.Time) *bar {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return &bar{w: f, terminal: err == nil, name: name, all: all, began: now}
}

// add counts a task that is over, and shows it if the last time was long enough ago.
func (b *bar) add(now time.Time) {
	b.over++
	every := lineEvery
	if b.terminal {
		every = barEvery
	}
	since := b.shown
	if since.IsZero() && !b.terminal {
		since = b.began
	}
	if b.over < b.all && now.Sub(since) >= every {
		b.show(now)
	}
}

func (b *bar) show(now time.Time) {
	b.shown = now
	if b.terminal {
		fmt.Fprintf(b.w, "\r%s\x1b[K", b.line(now))
	} else {
		fmt.Fprintln(b.w, b.line(now))
	}
}

// close shows the end.
func (b *bar) close(now time.Time) {
	b.show(now)
	if b.terminal {
		fmt.Fprintln(b.w)
	}
}

// line is what is shown.
func (b *bar) line(now time.Time) string {
	passed := now.Sub(b.began)
	text := fmt.Sprintf("%d of %d", b.over, b.all)
	if b.terminal {
		full := barWidth
		if b.all > 0 {
			full = barWidth * b.over / b.all
		}
		text = "[" + strings.Repeat("#", full) + strings.Repeat(".", barWidth-full) + "] " + text
	}
	if b.over > 0 && passed > 0 {
		text += fmt.Sprintf(", %.3g/s", float64(b.over)/passed.Seconds())
	}
	switch {
	case b.over == b.all:
		text += fmt.Sprintf(", in %v", passed.Round(100*time.Millisecond))
	case b.over > 0:
		left := time.Duration(float64(passed) / float64(b.over) * float64(b.all-b.over))
		text += fmt.Sprintf(", %v left", left.Round(time.Second))
	}
	return b.name + " " + text
}
