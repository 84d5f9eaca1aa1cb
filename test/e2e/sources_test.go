package e2e

import (
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
)

// TestSources: go test takes no result from its cache that is of programs of other sources.
func TestSources(t *testing.T) {
	if err := follow.ReadSources("../.."); err != nil {
		t.Fatal(err)
	}
}
