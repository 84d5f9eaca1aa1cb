package main

import (
	"os"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
)

// TestTopNeedsATerminal: without a terminal, the error names the command to use instead.
func TestTopNeedsATerminal(t *testing.T) {
	var stdout, stderr strings.Builder
	if code := run([]string{"top"}, strings.NewReader(""), &stdout, &stderr, os.Environ()); code != cli.StatusUsage {
		t.Errorf("status %d", code)
	}
	if got := strings.TrimSpace(stderr.String()); got != "hvdrun: top needs a terminal for its input and output; `hvdrun status --watch` needs none" {
		t.Errorf("%q", got)
	}
}
