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
// The exit status is 0 if train returns nil, [ErrRemoved] or [ErrFinished], wrapped or not: then
// the job continues, or is done, without this worker. Main writes any other error to standard
// error, and the status is 1. The driver treats a worker that exits with status 0 before its
// training is done as failed, so a main function that prints an error and returns hides no failure.
func Main(train func(ctx context.Context) error) {
	os.Exit(exitStatus(train(context.Background())))
}

// exitStatus writes the error with which a program ends to standard error, and returns the exit
// status.
func exitStatus(err error) int {
	if err == nil || errors.Is(err, ErrRemoved) || errors.Is(err, ErrFinished) {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}
