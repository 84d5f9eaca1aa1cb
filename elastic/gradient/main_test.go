package gradient_test

import (
	"os"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }
