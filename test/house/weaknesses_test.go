package house

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestWeaknesses: testdata/weaknesses.txt answers each of Horovod's 29 weaknesses and 19 pains, and
// the tests that it names exist.
func TestWeaknesses(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("test", "house", "testdata", "weaknesses.txt"))
	if err != nil {
		t.Fatal(err)
	}
	want := 0
	var counts []int
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		number, err := strconv.Atoi(strings.TrimSpace(cells[0]))
		if len(cells) != 4 || err != nil {
			continue
		}
		if number == 1 {
			counts, want = append(counts, 0), 1
		}
		if number != want {
			t.Errorf("row %d stands where %d should", number, want)
		}
		counts[len(counts)-1]++
		want++
		if n := checkShown(t, cells[3]); n == 0 {
			t.Errorf("nothing shows what is said in %s", line)
		}
	}
	if len(counts) != 2 || counts[0] != 29 || counts[1] != 19 {
		t.Errorf("rows: %v", counts)
	}
}

// TestShown: the tests that testdata/shown.txt names for the pages of docs/design exist.
func TestShown(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("test", "house", "testdata", "shown.txt"))
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		rows++
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) != 2 || checkShown(t, cells[1]) == 0 {
			t.Errorf("nothing shows what is said in %s", line)
		}
	}
	if rows < 50 {
		t.Errorf("%d rows", rows)
	}
}

var quoted = regexp.MustCompile("`[^`]+`|;|stor(?:y|ies)|script|\\*not yet\\*")

// checkShown checks that everything that a cell names exists: tests of a package, stories, scripts,
// targets of make. It returns their number.
func checkShown(t *testing.T, cell string) (n int) {
	kind, folder := "", ""
	for _, word := range quoted.FindAllString(cell, -1) {
		name := strings.Trim(word, "`")
		switch {
		case word == ";":
			kind, folder = "", ""
		case !strings.HasPrefix(word, "`"):
			kind = word
		case kind == "story", kind == "stories":
			n++
			exists(t, filepath.Join("driver", "decide", "testdata", name+".txt"), "")
		case kind == "script":
			n++
			exists(t, filepath.Join("cmd", "hvdrun", "testdata", "script", name+".txt"), "")
		case strings.HasPrefix(name, "make "):
			n++
			exists(t, "Makefile", strings.TrimPrefix(name, "make ")+":")
		case folder == "":
			folder = name
		default:
			n++
			exists(t, filepath.Join(folder, "*_test.go"), "func "+name+"(")
		}
	}
	return n
}

// contents caches the texts of the files that match a pattern.
var contents = map[string][]string{}

// exists reports whether one of the files exists and has a line with this beginning.
func exists(t *testing.T, pattern, begin string) {
	t.Helper()
	files, read := contents[pattern]
	if !read {
		names, _ := filepath.Glob(pattern)
		for _, name := range names {
			if content, err := os.ReadFile(name); err == nil {
				files = append(files, "\n"+string(content))
			}
		}
		contents[pattern] = files
	}
	has := func(text string) bool { return strings.Contains(text, "\n"+begin) }
	if !slices.ContainsFunc(files, has) {
		t.Errorf("%s: there is no %s", pattern, begin)
	}
}
