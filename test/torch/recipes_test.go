package torch

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRecipes: typical training programs have the same result alone as in a job in which a worker
// dies and is replaced.
func TestRecipes(t *testing.T) {
	needTorch(t)
	script, alone := program(t, "recipes.py"), t.TempDir()
	runs(t, true, *python, script, alone, "all")
	names := strings.Fields(runs(t, true, *python, script, alone, "list"))
	if len(names) < 20 {
		t.Fatalf("%q: these are not all", names)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			want := results(t, filepath.Join(alone, name))
			if len(want) == 0 {
				t.Skip("this torch cannot do that")
			}
			dir := t.TempDir()
			if name == "checkpoints" { // another job, of another size, has trained the first half
				t.Setenv("TOTAL", "7")
				runs(t, true, elasticJob("3", script, dir, name)...)
				if err := os.Remove(filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
				t.Setenv("TOTAL", "14")
			}
			out := runs(t, true, elasticJob("2", script, dir, name)...)
			if _, err := os.Stat(filepath.Join(dir, "died-"+name)); err != nil {
				t.Errorf("nobody has died: %v", err)
			}
			got := results(t, filepath.Join(dir, name))
			if len(got) == 0 {
				t.Errorf("no rank has come to the end\n%s", out)
			}
			for _, g := range got {
				if !alike(g, want[0], 1e-7) {
					t.Errorf("with a death\n%v\nalone\n%v\n%s", g, want[0], out)
				}
			}
		})
	}
}

// results returns the JSON lines of a file, or nil if it does not exist.
func results(t *testing.T, path string) (all []any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var one any
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		all = append(all, one)
	}
	return all
}

// alike reports whether two JSON values are equal, except that numbers can differ by the fraction
// part.
func alike(a, b any, part float64) bool {
	switch a := a.(type) {
	case float64:
		b, is := b.(float64)
		return is && math.Abs(a-b) <= part*max(1, math.Abs(b))
	case []any:
		b, is := b.([]any)
		if !is || len(a) != len(b) {
			return false
		}
		for i := range a {
			if !alike(a[i], b[i], part) {
				return false
			}
		}
		return true
	}
	return a == b
}
