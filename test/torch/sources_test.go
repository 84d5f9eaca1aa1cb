package torch

import (
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// TestSources reads the sources of the programs under test, so that go test does not use a cached
// result of other sources.
func TestSources(t *testing.T) {
	if err := follow.ReadSources("../.."); err != nil {
		t.Fatal(err)
	}
}
