package launch_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain plays the driver where a test has started this binary as one.
func TestMain(m *testing.M) {
	if mode := os.Getenv("LAUNCH_TEST_DRIVER"); mode != "" {
		playDriver(mode)
		return
	}
	goleak.VerifyTestMain(m)
}
