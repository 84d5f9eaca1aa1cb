package docs_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// mostColumns is the maximum length of a line of prose. Tables and blocks can have longer lines.
const mostColumns = 100

// all are the pages about hvdrun as a whole.
var all = []string{"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "docs/design/*.md", "docs/reference/*.md", "discovery/README.md"}

func TestColumns(t *testing.T) {
	for _, p := range pages(t, all...) {
		for i, line := range p.prose() {
			if n := utf8.RuneCountInString(line); n > mostColumns && !strings.HasPrefix(line, "|") {
				t.Errorf("%s:%d: %d columns, %d at most", p.name, i+1, n, mostColumns)
			}
		}
	}
	for name, most := range map[string]int{"README.md": 200, "ARCHITECTURE.md": 150} {
		if n := strings.Count(pages(t, name)[0].text, "\n"); n > most {
			t.Errorf("%s has %d lines, %d at most", name, n, most)
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// TestLinks: the targets of links exist, including headings.
func TestLinks(t *testing.T) {
	for _, p := range pages(t, all...) {
		for i, line := range p.prose() {
			for _, m := range link.FindAllStringSubmatch(inlineCode.ReplaceAllString(line, ""), -1) {
				to, anchor, _ := strings.Cut(m[1], "#")
				if strings.Contains(to, "://") {
					continue
				}
				path := filepath.Join(root, filepath.Dir(p.name), to)
				if to == "" {
					path = filepath.Join(root, p.name)
				}
				if _, err := os.Stat(path); err != nil {
					t.Errorf("%s:%d: a link to %s: %v", p.name, i+1, m[1], err)
				} else if anchor != "" && !hasAnchor(t, path, anchor) {
					t.Errorf("%s:%d: %s has no heading #%s", p.name, i+1, to, anchor)
				}
			}
		}
	}
}

// hasAnchor reports whether a page has a heading to which GitHub gives this anchor.
func hasAnchor(t *testing.T, path, anchor string) bool {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range (page{path, string(text)}).prose() {
		title := strings.TrimLeft(line, "#")
		if title == line {
			continue
		}
		is := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, strings.TrimSpace(title))
		if is == anchor {
			return true
		}
	}
	return false
}

var filePath = regexp.MustCompile("`((?:[a-z0-9_]+/)+[a-zA-Z0-9_.-]+\\.(?:go|md|txt|proto|yaml|sh)|[a-z]+(?:/[a-z0-9]+)+)`")

// TestPaths: the files and folders that a page names exist.
func TestPaths(t *testing.T) {
	n := 0
	for _, p := range pages(t, all...) {
		for i, line := range p.prose() {
			for _, m := range filePath.FindAllStringSubmatch(line, -1) {
				top, _, _ := strings.Cut(m[1], "/")
				if _, err := os.Stat(filepath.Join(root, top)); err != nil {
					continue // a built file, or one of another repository
				}
				n++
				if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
					t.Errorf("%s:%d: %v", p.name, i+1, err)
				}
			}
		}
	}
	if n < 50 {
		t.Errorf("the pages name %d files", n)
	}
}

var measured = regexp.MustCompile(`[0-9][0-9.,]* (?:µs|ms|s|MB)\b`)

// TestFigures: BENCHMARKS.md has each figure of the README's table.
func TestFigures(t *testing.T) {
	benchmarks := pages(t, "BENCHMARKS.md")[0].text
	n := 0
	for _, line := range pages(t, "README.md")[0].prose() {
		if !strings.HasPrefix(line, "|") {
			continue
		}
		for _, figure := range measured.FindAllString(line, -1) {
			n++
			number, _, _ := strings.Cut(figure, " ")
			if !regexp.MustCompile(`(^|[^0-9.,])` + regexp.QuoteMeta(number) + `($|[^0-9.,]|[.,][^0-9])`).MatchString(benchmarks) {
				t.Errorf("README.md: %s does not stand in BENCHMARKS.md: %s", figure, line)
			}
		}
	}
	if n < 10 {
		t.Errorf("the table has %d figures", n)
	}
}

// TestGo: blocks of Go parse as a file, declarations or statements.
func TestGo(t *testing.T) {
	for _, p := range pages(t, all...) {
		for _, b := range p.blocks("go") {
			var err error
			for _, form := range []string{"%s", "package p\n%s", "package p\nfunc _() {\n%s\n}"} {
				if _, err = parser.ParseFile(token.NewFileSet(), "", fmt.Sprintf(form, b.text), parser.SkipObjectResolution); err == nil {
					break
				}
			}
			if err != nil {
				t.Errorf("%s:%d: %v", p.name, b.line, err)
			}
		}
	}
}

var (
	goName   = regexp.MustCompile(`(?:^|[^.\w])([a-z]+)\.([A-Z]\w*)(?:\.([A-Z]\w*))?`)
	testName = regexp.MustCompile("^`(?:Test|Fuzz|Benchmark)[A-Z]\\w*`$")
)

// TestNames: the packages declare the names that pages mention, and the tests that pages mention
// exist.
func TestNames(t *testing.T) {
	declared, tests := names(t)
	n := 0
	for _, p := range pages(t, all...) {
		for i, line := range p.prose() {
			for _, code := range inlineCode.FindAllString(line, -1) {
				if testName.MatchString(code) {
					n++
					if !tests[strings.Trim(code, "`")] {
						t.Errorf("%s:%d: there is no test %s", p.name, i+1, code)
					}
				}
				for _, m := range goName.FindAllStringSubmatch(code, -1) {
					of := declared[m[1]]
					if of == nil {
						continue // a foreign package, or a variable
					}
					n++
					if !of[m[2]] || m[3] != "" && !of[m[3]] {
						t.Errorf("%s:%d: package %s declares no %s", p.name, i+1, m[1], strings.Trim(code, "`"))
					}
				}
			}
		}
	}
	if n < 150 {
		t.Errorf("the pages name %d things", n)
	}
}

// names returns the names that packages declare, including methods and fields, and the names of
// tests.
func names(t *testing.T) (declared map[string]map[string]bool, tests map[string]bool) {
	t.Helper()
	declared, tests = make(map[string]map[string]bool), make(map[string]bool)
	walkSource(t, func(path string, file *ast.File) {
		of := declared[file.Name.Name]
		if of == nil {
			of = make(map[string]bool)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				of[n.Name.Name] = true
				tests[n.Name.Name] = true
				return false
			case *ast.TypeSpec:
				of[n.Name.Name] = true
			case *ast.ValueSpec:
				add(of, n.Names)
			case *ast.Field:
				add(of, n.Names)
			}
			return true
		})
		if !strings.HasSuffix(path, "_test.go") && file.Name.Name != "main" {
			declared[file.Name.Name] = of
		}
	})
	return declared, tests
}

func add(to map[string]bool, idents []*ast.Ident) {
	for _, id := range idents {
		to[id.Name] = true
	}
}

// TestMessages: the source has each message that docs/troubleshooting.md quotes.
func TestMessages(t *testing.T) {
	texts := literals(t)
	n := 0
	for i, line := range pages(t, "docs/troubleshooting.md")[0].prose() {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		cell, _, _ := strings.Cut(line[1:], " | ")
		for _, code := range inlineCode.FindAllString(cell, -1) {
			n++
			if !anyHas(texts, strings.Trim(code, "`")) {
				t.Errorf("docs/troubleshooting.md:%d: no text of the source has %s", i+1, code)
			}
		}
	}
	if n < 40 {
		t.Errorf("%d messages", n)
	}
}

// anyHas reports whether a text has the parts of a message, which are separated by …, in their
// order.
func anyHas(texts []string, message string) bool {
	var parts []string
	for part := range strings.SplitSeq(message, "…") {
		if part = strings.TrimSpace(part); part != "" {
			parts = append(parts, part)
		}
	}
texts:
	for _, text := range texts {
		for _, part := range parts {
			_, rest, found := strings.Cut(text, part)
			if !found {
				continue texts
			}
			text = rest
		}
		return true
	}
	return false
}

// literals returns the strings of the source without tests. Strings joined by + are one.
func literals(t *testing.T) (texts []string) {
	t.Helper()
	walkSource(t, func(path string, file *ast.File) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		ast.Inspect(file, func(n ast.Node) bool {
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text := joined(e)
			if text != "" {
				texts = append(texts, text)
			}
			return text == ""
		})
	})
	return append(texts, pythonTexts(t)...)
}

// continued matches the end of a Python string that continues in the next line.
var continued = regexp.MustCompile(`"\s*\n\s*f?"`)

// pythonTexts returns the lines of hvdrun's package for PyTorch, with joined strings.
func pythonTexts(t *testing.T) (texts []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, "python", "hvdrun", "*.py"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, strings.Split(continued.ReplaceAllString(string(text), ""), "\n")...)
	}
	return texts
}

// walkSource calls visit for each Go file of the repository.
func walkSource(t *testing.T, visit func(path string, file *ast.File)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		hidden := len(d.Name()) > 2 && strings.HasPrefix(d.Name(), ".")
		switch {
		case err != nil:
			return err
		case d.IsDir() && (hidden || d.Name() == "testdata" || d.Name() == "bin"):
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err == nil {
			visit(path, file)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// joined returns the text of a literal, or of literals joined by + without the other operands. It
// returns "" for other expressions.
func joined(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			text, _ := strconv.Unquote(e.Value)
			return text
		}
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			return joined(e.X) + joined(e.Y)
		}
	}
	return ""
}
