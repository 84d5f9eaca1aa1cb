package house

import (
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// unplain are words that a reader has to read twice, each with a literal that it contains, for
// speed.
var unplain = []struct {
	literal string
	pattern *regexp.Regexp
}{
	{" none", regexp.MustCompile(`\b(is|are) none\b`)},                        // "nil: there is none"
	{"in vain", regexp.MustCompile(`\bin vain\b`)},                            // "it waits in vain"
	{"of th", regexp.MustCompile(`\bof (those|that) (that|which)\b`)},         // "the errors of those that failed"
	{"hat it ", regexp.MustCompile(`\b[Tt]hat it [a-z]+ ([a-z]+ )?is [a-z]`)}, // "that it goes on is no error"
}

// plainFiles are the endings and names of the files that TestPlainWords reads.
var plainFiles = []string{".go", ".md", ".py", ".proto", ".h", ".c", ".sh", ".bash", ".js", ".yaml", ".yml", ".txt", "Makefile"}

// TestPlainWords finds no such words in the source, its comments and texts, and in the pages.
func TestPlainWords(t *testing.T) {
	found := make([][]string, len(unplain))
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "bin"):
			return filepath.SkipDir
		case d.IsDir() || strings.HasSuffix(path, ".pb.go") || path == filepath.Join("test", "house", "plain_test.go"),
			!slices.Contains(plainFiles, cmp.Or(filepath.Ext(path), d.Name())):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for i, line := range strings.Split(string(text), "\n") {
			for n, u := range unplain {
				if strings.Contains(line, u.literal) && u.pattern.MatchString(line) {
					found[n] = append(found[n], fmt.Sprintf("%s:%d: %s", path, i+1, strings.TrimSpace(line)))
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for n, u := range unplain {
		if len(found[n]) > 0 {
			t.Errorf("%d lines have %s: put the subject first\n%s", len(found[n]), u.pattern, strings.Join(found[n], "\n"))
		}
	}
}
