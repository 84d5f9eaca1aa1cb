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
		programs := strings.Count(string(text), "\n```python\n")
		if programs == 0 {
			t.Errorf("%s has no program", page)
		}
		for i := range programs {
			t.Run(fmt.Sprint(name, "/", i), func(t *testing.T) {
				if needTorch(t); name == "huggingface" {
					needHF(t)
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
