package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestUpstream applies upstream/infra-2.patch to the sources of gomlx and tests the example that it
// adds, with this hvdrun.
func TestUpstream(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles gomlx anew")
	}
	run := func(dir, name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOFLAGS=", "GOWORK=off", "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
	here := run(".", "pwd", "-P")
	sources, patch := filepath.Join(t.TempDir(), "gomlx"), filepath.Join(here, "upstream", "infra-2.patch")
	if err := os.CopyFS(sources, os.DirFS(run(".", "go", "list", "-m", "-f", "{{.Dir}}", "github.com/gomlx/gomlx"))); err != nil {
		t.Fatal(err)
	}
	run(sources, "chmod", "-R", "u+w", ".")
	run(sources, "git", "apply", patch)

	example := filepath.Join(sources, "examples", "multinode")
	sums, err := os.ReadFile("go.sum") // has the sums of the same requirements
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(example, "go.sum"), sums, 0o666); err != nil {
		t.Fatal(err)
	}
	for module, dir := range map[string]string{
		"gomlx/gomlx": sources, "hvdrun/hvdrun": filepath.Join(here, "../.."), "hvdrun/hvdrun/frameworks/gomlx": filepath.Join(here, "../../frameworks/gomlx"),
	} {
		run(example, "go", "mod", "edit", fmt.Sprintf("-replace=github.com/%s=%s", module, dir))
	}
	if text := run(example, "gofmt", "-l", "."); text != "" {
		t.Errorf("not formatted: %s", text)
	}
	run(example, "go", "vet", ".")
	t.Log(run(example, "go", "test", "-count=1", "-v", "."))
	t.Log(run(example, "go", "run", ".", "-epochs", "2"))
}
