package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/elastic"
)

// display shows the progress of training on rank 0: a bar on a terminal, otherwise a line per
// epoch.
type display struct {
	out      *os.File
	bar      bool // out is a terminal
	drawn    time.Time
	loss     float64 // of the last epoch
	perEpoch int     // images per epoch
	all      int     // images of all epochs
}

func newDisplay(out *os.File, epochs, perEpoch int) *display {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &display{out: out, bar: terminal, perEpoch: perEpoch, all: epochs * perEpoch}
}

// step shows a finished step.
func (d *display) step(w *elastic.Worker, epoch int, at progress) {
	images := epoch*d.perEpoch + at.Images
	if now := time.Now(); d.bar && w.Rank() == 0 && (now.Sub(d.drawn) >= 50*time.Millisecond || images == d.all) {
		d.drawn = now
		fmt.Fprint(d.out, "\r"+barOf(images, d.all, epoch+1, d.loss))
	}
}

// barOf returns a progress bar and the numbers that it shows.
func barOf(images, all, epoch int, loss float64) string {
	const width = 40
	done := width * images / all
	return fmt.Sprintf("epoch %d  loss %.4f  %s%s  %d of %d images", epoch, loss,
		strings.Repeat("█", done), strings.Repeat("░", width-done), images, all)
}

// epoch shows a finished epoch.
func (d *display) epoch(w *elastic.Worker, epoch int, at progress) {
	if w.Rank() != 0 {
		return
	}
	d.loss = at.Loss / float64(at.Images)
	if !d.bar {
		fmt.Fprintf(d.out, "epoch %d  loss %.4f  size %d  generation %d\n", epoch+1, d.loss, w.Size(), w.Generation())
	} else if (epoch+1)*d.perEpoch == d.all {
		fmt.Fprintln(d.out)
	}
}
