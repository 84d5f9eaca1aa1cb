package house

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// readTable reads a table of testdata, whose rows are lines such as "| `name` | cell | cell |". It
// returns the rest of the row for each name. Lines that begin differently are comments.
func readTable(t *testing.T, name string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("test", "house", "testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		cells, rest, ended := strings.Cut(strings.TrimPrefix(strings.TrimSpace(line), "| "), " |")
		switch name := strings.Trim(cells, "`"); {
		case !ended:
			t.Errorf("a row without an end: %s", line)
		case rows[name] != "":
			t.Errorf("%s stands twice", name)
		default:
			rows[name] = strings.Trim(rest, " |")
		}
	}
	return rows
}
