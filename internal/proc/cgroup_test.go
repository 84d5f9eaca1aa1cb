package proc

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestSweepCgroups: where a killed worker was itself a launcher, the cgroups of its workers are
// removed with its own. Those of a worker that lives, or is just starting, stay. Plain folders
// stand for the cgroups.
func TestSweepCgroups(t *testing.T) {
	parent := t.TempDir()
	now := time.Now()
	for _, path := range []string{"hvdrun-left/hvdrun-below/hvdrun-deeper", "hvdrun-lives/hvdrun-starts", "hvdrun-starts", "another/hvdrun-its"} {
		if err := os.MkdirAll(filepath.Join(parent, path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(parent, "hvdrun-lives", "cgroup.events"), []byte("populated 1\nfrozen 0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"hvdrun-left", "hvdrun-lives", "another"} {
		if err := os.Chtimes(filepath.Join(parent, name), now, now.Add(-time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	sweepCgroups(parent, now.Add(-time.Minute))
	left, err := filepath.Glob(filepath.Join(parent, "*", "hvdrun-*"))
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{filepath.Join(parent, "another/hvdrun-its"), filepath.Join(parent, "hvdrun-lives/hvdrun-starts")}; !slices.Equal(left, want) {
		t.Errorf("below the cgroups are left: %q, want %q", left, want)
	}
	if left, want := cgroupsIn(parent), []string{filepath.Join(parent, "hvdrun-lives"), filepath.Join(parent, "hvdrun-starts")}; !slices.Equal(left, want) {
		t.Errorf("the cgroups are left: %q, want %q", left, want)
	}
}
