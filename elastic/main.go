package elastic

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Main is the main function of a training program: it calls train and ends the process. It does not
// return.
//
//	func main() { elastic.Main(train) }
//
// The exit status is 0 if train returns nil, or [ErrRemoved] or [ErrFinished], wrapped or not: the
// job goes on, or is done, without this worker. Any other error is written to standard error, and
// the status is 1. A worker that exits with status 0 before its training is done has failed, so a
// main function that prints an error and returns hides nothing from the driver.
func Main(train func(ctx context.Context) error) {
	os.Exit(exitStatus(train(context.Background())))
}

// exitStatus writes the error with which a program ends, and returns the exit status.
func exitStatus(err error) int {
	if err == nil || errors.Is(err, ErrRemoved) || errors.Is(err, ErrFinished) {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}
