package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// TestEvaluate: the checkpoints of a training job are evaluated, some of them by the spare, which
// runs examples/evaluate.
func TestEvaluate(t *testing.T) {
	dir := t.TempDir()
	if err := sandbox.Build(dir, "github.com/hvdrun/hvdrun/examples/evaluate"); err != nil {
		t.Fatal(err)
	}
	r := start(t, Job{
		Flags:   flags("-np", "2", "--min-np", "1", "--spares", "1", "-H", on(hostA, 3)),
		Command: []string{filepath.Join(dir, "evaluate"), "-dir", filepath.Join(dir, "checkpoints"), "-epochs", "6", "-every", "200ms", "-step-time", "10ms"},
	})
	res, err := r.Wait()
	if err != nil || res.Hung || len(res.Left) > 0 {
		t.Fatalf("%v, left behind: %v\n%s", err, res.Left, res.Output)
	}
	var all, spares int
	for line := range strings.Lines(res.Output) {
		_, text, _ := strings.Cut(line, "<stdout>:")
		if n, _ := fmt.Sscanf(text, "%d checkpoints evaluated, %d of them by spares", &all, &spares); n == 2 {
			break
		}
	}
	if all < 3 || spares == 0 || spares < 1 || strings.Count(res.Output, "held-out accuracy") != all || !strings.Contains(res.Output, "COMMIT  ACCURACY") {
		t.Errorf("%d checkpoints evaluated, %d by spares:\n%s", all, spares, res.Output)
	}
}
