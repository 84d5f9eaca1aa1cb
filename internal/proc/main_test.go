package proc_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// TestMain plays the driver if a test has started this binary as one.
func TestMain(m *testing.M) {
	if mode := os.Getenv("PROC_TEST_DRIVER"); mode != "" {
		playDriver(mode)
		return
	}
	if err := proc.Adopt(); err != nil { // as agents do
		panic(err)
	}
	goleak.VerifyTestMain(m)
}
