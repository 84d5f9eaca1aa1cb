package house

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// unplain are words that a reader has to read twice: a literal that each has, for speed, and the
// number of lines that may still have them. Lower a number when lines are rewritten; never raise
// it.
var unplain = []struct {
	literal string
	pattern *regexp.Regexp
	lines   int
}{
	{" none", regexp.MustCompile(`\b(is|are) none\b`), 8},                        // "nil: there is none"
	{"in vain", regexp.MustCompile(`\bin vain\b`), 1},                            // "it waits in vain"
	{"of th", regexp.MustCompile(`\bof (those|that) (that|which)\b`), 4},         // "the errors of those that failed"
	{"hat it ", regexp.MustCompile(`\b[Tt]hat it [a-z]+ ([a-z]+ )?is [a-z]`), 1}, // "that it goes on is no error"
}

// TestPlainWords looks for such words in the source, its comments and texts, and in the pages.
func TestPlainWords(t *testing.T) {
	found := make([][]string, len(unplain))
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "bin"):
			return filepath.SkipDir
		case d.IsDir() || strings.HasSuffix(path, ".pb.go") || path == filepath.Join("test", "house", "plain_test.go"),
			!slices.Contains([]string{".go", ".md", ".py", ".proto", ".h", ".c", ".sh", ".js"}, filepath.Ext(path)):
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
		if lines := len(found[n]); lines > u.lines {
			t.Errorf("%d lines have %s, %d at most: put the subject first\n%s", lines, u.pattern, u.lines, strings.Join(found[n], "\n"))
		} else if lines < u.lines {
			t.Logf("%d lines have %s: lower the limit of %d", lines, u.pattern, u.lines)
		}
	}
}
