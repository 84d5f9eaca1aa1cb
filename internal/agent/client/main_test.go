package client

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(sandbox.Tests{M: m}) }
