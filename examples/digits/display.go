package main

import (
	"fmt"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/hvdrun/hvdrun/elastic"
)

// display shows the progress of training on rank 0: a bar on a terminal, otherwise a line per
// epoch.
type display struct {
	out      *os.File
	bar      *progressbar.ProgressBar // nil: not a terminal
	perEpoch int                      // images per epoch
}

func newDisplay(out *os.File, epochs, perEpoch int) *display {
	d := &display{out: out, perEpoch: perEpoch}
	if term.IsTerminal(int(out.Fd())) {
		d.bar = progressbar.NewOptions(epochs*perEpoch, progressbar.OptionSetWriter(out), progressbar.OptionSetWidth(40),
			progressbar.OptionShowCount(), progressbar.OptionSetItsString("images"), progressbar.OptionShowIts(),
			progressbar.OptionThrottle(50*time.Millisecond))
	}
	return d
}

// step shows a finished step.
func (d *display) step(w *elastic.Worker, epoch int, at progress) {
	if d.bar == nil || w.Rank() != 0 {
		return
	}
	_ = d.bar.Set(epoch*d.perEpoch + at.Images) // a failure to draw the bar must not stop training
}

// epoch shows a finished epoch.
func (d *display) epoch(w *elastic.Worker, epoch int, at progress) {
	if w.Rank() != 0 {
		return
	}
	loss := at.Loss / float64(at.Images)
	if d.bar != nil {
		d.bar.Describe(fmt.Sprintf("epoch %d  loss %.4f", epoch+1, loss))
		if d.bar.IsFinished() {
			fmt.Fprintln(d.out)
		}
		return
	}
	fmt.Fprintf(d.out, "epoch %d  loss %.4f  size %d  generation %d\n", epoch+1, loss, w.Size(), w.Generation())
}
