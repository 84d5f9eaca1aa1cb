package torch

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestPages runs each Python program of the pages for PyTorch users as printed there, with two
// workers, one of which dies.
func TestPages(t *testing.T) {
	for _, name := range []string{"pytorch", "huggingface", "horovod"} {
		page := program(t, "../../docs/"+name+".md")
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		programs := strings.Split(string(text), "\n```python\n")[1:]
		if len(programs) == 0 {
			t.Errorf("%s has no program", page)
		}
		for i, p := range programs {
			t.Run(fmt.Sprint(name, "/", i), func(t *testing.T) {
				if needTorch(t); name == "huggingface" {
					needHF(t)
				}
				if p, _, _ := strings.Cut(p, "\n```\n"); strings.Contains(p, "torch.func") && strings.HasPrefix(version().number, "1.") {
					t.Skip("torch.func is of torch 2.0")
				}
				dir := t.TempDir()
				out := runs(t, true, elasticJob("2", program(t, "pages.py"), page, fmt.Sprint(i), dir)...)
				if _, err := os.Stat(filepath.Join(dir, "died")); err != nil || !strings.Contains(out, "all steps are made") {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
	}
}
