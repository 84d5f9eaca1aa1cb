package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// TestGoroutinesAreAwaited: each function with a go statement is in the table, with what waits for
// the goroutine; and the table names no other function.
func TestGoroutinesAreAwaited(t *testing.T) {
	listed := readTable(t, "goroutines.txt")
	var there []string
	for _, s := range sources(t) {
		if s.test() || isKit(s.dir()) || strings.HasPrefix(s.path, "test/") || strings.HasPrefix(s.path, "examples/") {
			continue
		}
		there = append(there, starters(s.path, s.file)...)
	}
	for _, name := range there {
		if listed[name] == "" {
			t.Errorf("%s has a go statement: use the Go method of a sync.WaitGroup, or add to testdata/goroutines.txt what waits for the goroutine", name)
		}
	}
	for name := range listed {
		if !slices.Contains(there, name) {
			t.Errorf("testdata/goroutines.txt lists %s, which has no go statement", name)
		}
	}
}

// starters returns the functions of a file that have a go statement.
func starters(path string, file *ast.File) (names []string) {
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if _, is := n.(*ast.GoStmt); is {
				names = append(names, path+" "+f.Name.Name)
			}
			return true
		})
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func TestGoroutinesAreFound(t *testing.T) {
	const text = `package p
func a() { go b() }
func b() { var wg sync.WaitGroup; wg.Go(a); wg.Wait() }
func (t *T) c() { for { func() { go func() {}() }() } }`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(starters("p.go", file)); got != "[p.go a p.go c]" {
		t.Errorf("found %s", got)
	}
}
