package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
	"github.com/hvdrun/hvdrun/test/steplog"
)

// TestEmbeddedDriver: a program of another module embeds the driver and is killed; the same command
// line resumes the job, whose workers have continued.
func TestEmbeddedDriver(t *testing.T) {
	t.Parallel()
	program := buildEmbedding(t)
	dir := t.TempDir()
	folder, log := filepath.Join(dir, "job"), filepath.Join(dir, "steps")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	command := func() (cmd *exec.Cmd, out *bytes.Buffer) {
		cmd = exec.CommandContext(t.Context(), program, "-dir", folder, "-np", "2", "-hvdrun", binaries.Hvdrun, "--",
			binaries.Trainer, "-log", log, "-dir", dir, "-steps", "10", "-gate", "5=killed")
		out = &bytes.Buffer{}
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd, out
	}
	first, out := command()
	steps := steplog.Follow[steplog.Line](log)
	var lines []steplog.Line
	for len(lines) == 0 || lines[len(lines)-1].Step < 5 {
		more, err := steps.Next()
		if lines = append(lines, more...); err != nil || time.Now().After(sandbox.Limit()) {
			t.Fatalf("no step 5: %v, %v\n%s", lines, err, out)
		}
		<-time.After(10 * time.Millisecond)
	}
	_ = first.Process.Kill()
	_ = first.Wait()
	if err := os.WriteFile(filepath.Join(dir, "killed"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	second, out := command()
	if err := second.Wait(); err != nil || !strings.Contains(out.String(), "the job is done") {
		t.Errorf("resumed: %v\n%s", err, out)
	}
	more, err := steps.Next()
	lines = append(lines, more...)
	if err = errors.Join(err, steplog.Check(lines, 10, steplog.Size)); err != nil {
		t.Error(err)
	}
	pids := map[int]bool{}
	for _, l := range lines {
		pids[l.PID] = true
	}
	if len(pids) != 2 {
		t.Errorf("%d processes have trained, not 2", len(pids))
	}
}

// buildEmbedding builds examples/embed as the only package of another module, with a replace
// directive for this one.
func buildEmbedding(t *testing.T) (program string) {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for from, to := range map[string]string{"examples/embed/main.go": "main.go", "go.mod": "go.mod", "go.sum": "go.sum"} {
		text, err := os.ReadFile(filepath.Join(root, from))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, to), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	golang(t, dir, "mod", "edit", "-module", "example.com/embed", "-require", "github.com/hvdrun/hvdrun@v0.0.0",
		"-replace", fmt.Sprintf("github.com/hvdrun/hvdrun=%s", root))
	golang(t, dir, "build", "-mod=mod", "-ldflags=-w", "-o", "embed", ".")
	return filepath.Join(dir, "embed")
}
