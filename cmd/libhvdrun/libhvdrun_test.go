//go:build cgo

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

// example is the path of the program of examples/c. The library is in the same folder.
var example string

func TestMain(m *testing.M) {
	os.Exit(sandbox.Run(m, func(dir string) error {
		library := filepath.Join(dir, "libhvdrun.so")
		example = filepath.Join(dir, "all_reduce")
		for _, args := range [][]string{
			{"go", "build", "-buildmode=c-shared", "-tags", "netgo,osusergo", "-o", library, "."},
			{"gcc", "-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-I", ".", "-o", example, "../../examples/c/all_reduce.c", library, "-Wl,-rpath," + dir},
			{"gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", "hvdrun.h"},
		} {
			if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w\n%s", args[0], err, out)
			}
		}
		return nil
	}))
}

// rank is a process of the example.
type rank struct {
	*exec.Cmd
	says   *bufio.Reader
	stderr bytes.Buffer
}

func start(t *testing.T, steps int) (ranks [4]*rank) {
	dir := t.TempDir()
	for r := range ranks {
		ranks[r] = &rank{Cmd: exec.CommandContext(t.Context(), example, fmt.Sprint(r), "4", dir, fmt.Sprint(steps))}
		out, err := ranks[r].StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		ranks[r].says, ranks[r].Stderr = bufio.NewReader(out), &ranks[r].stderr
		if err := ranks[r].Start(); err != nil {
			t.Fatal(err)
		}
	}
	for r := range ranks {
		line, err := ranks[r].says.ReadString('\n')
		if want := fmt.Sprintf("rank %d of 4: the sum is 10\n", r); line != want {
			t.Errorf("%q, not %q (%v)\n%s", line, want, err, &ranks[r].stderr)
		}
	}
	return ranks
}

// TestExample: four processes in C compute and leave.
func TestExample(t *testing.T) {
	for _, r := range start(t, 200) {
		if err := r.Wait(); err != nil || r.stderr.Len() > 0 {
			t.Errorf("%v\n%s", err, &r.stderr)
		}
	}
}

// TestDeath: the death of one process ends the calls of the others with an error that reports it.
func TestDeath(t *testing.T) {
	ranks := start(t, 1<<40)
	if err := ranks[2].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for i, r := range ranks {
		err := r.Wait()
		if i != 2 && (r.ProcessState.ExitCode() != 3 || !strings.Contains(r.stderr.String(), "rank 2")) {
			t.Errorf("rank %d: %v\n%s", i, err, &r.stderr)
		}
	}
}
