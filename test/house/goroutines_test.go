package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"slices"
	"strings"
	"testing"
)

// TestGoroutinesAreAwaited: the table lists each function with a go statement, with what waits for
// the goroutine, and no other function.
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

// TestOneFlag: a send that is skipped if a value is pending must be a wake.Flag.
func TestOneFlag(t *testing.T) {
	for _, s := range sources(t) {
		if under(s.dir(), "internal/wake") {
			continue
		}
		for _, at := range flags(s.file) {
			t.Errorf("%s: a channel that holds one value at most: use wake.Flag", s.where(at))
		}
	}
}

// flags returns the selects of a file that only send struct{}{} if they can.
func flags(file *ast.File) (found []ast.Node) {
	ast.Inspect(file, func(n ast.Node) bool {
		s, ok := n.(*ast.SelectStmt)
		if !ok || len(s.Body.List) != 2 {
			return true
		}
		sends, otherwise := false, false
		for _, c := range s.Body.List {
			c := c.(*ast.CommClause)
			if len(c.Body) > 0 {
				return true
			}
			otherwise = otherwise || c.Comm == nil
			if send, ok := c.Comm.(*ast.SendStmt); ok {
				value, ok := send.Value.(*ast.CompositeLit)
				sends = ok && types.ExprString(value.Type) == "struct{}"
			}
		}
		if sends && otherwise {
			found = append(found, s)
		}
		return true
	})
	return found
}

func TestFlagsAreFound(t *testing.T) {
	const text = `package p
func a() { select { case c <- struct{}{}: default: } }
func b() { for { select { default: /* pending */ case x.c[1] <- struct{}{}: } } }
func c() { select { case c <- struct{}{}: case <-done: } }
func d() { select { case <-c: default: } }
func e() bool { select { case room <- struct{}{}: return true; default: return false } }
func f() { select { case c <- event: default: } }`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	found := ""
	for _, d := range file.Decls {
		if f := d.(*ast.FuncDecl); len(flags(&ast.File{Decls: []ast.Decl{d}, Name: file.Name})) > 0 {
			found += f.Name.Name
		}
	}
	if found != "ab" {
		t.Errorf("found in %q", found)
	}
}
