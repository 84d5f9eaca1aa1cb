package launch_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/internal/proc"
)

// TestMain adopts the processes that workers leave behind, as agents do.
func TestMain(m *testing.M) {
	if err := proc.Adopt(); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}
