package elastic

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

// arrive enters the first world and closes the worker if that fails.
func (w *Worker) arrive(ctx context.Context) (*Worker, error) {
	if err := w.enterFirst(ctx, func() {}); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}
