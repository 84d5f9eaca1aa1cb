package house

import (
	"go/ast"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// waitNames are the functions by which a loop waits before it goes on.
var waitNames = regexp.MustCompile(`^(time\.(After|NewTimer|Sleep)|(.*\.)?(pause|Pause|pauseFor|pauseBefore|rest))$`)

// TestRetriesAreDocumented: each loop that waits before it goes on is in the table of retries,
// either with what it logs when it fails or among those that repeat nothing; and the table names no
// other.
func TestRetriesAreDocumented(t *testing.T) {
	listed := map[string]bool{}
	for cell := range readTable(t, "retries.txt") {
		for name := range strings.SplitSeq(cell, "`, `") {
			listed[name] = true
		}
	}
	var there []string
	for _, s := range sources(t) {
		if s.test() || isKit(s.dir()) || strings.HasPrefix(s.path, "test/") || strings.HasPrefix(s.path, "examples/") {
			continue
		}
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && waitsInLoop(f) {
				there = append(there, s.path+" "+f.Name.Name)
			}
		}
	}
	for _, name := range there {
		if !listed[name] {
			t.Errorf("%s waits in a loop: testdata/retries.txt lacks what it logs when it fails", name)
		}
	}
	for name := range listed {
		if !slices.Contains(there, name) {
			t.Errorf("testdata/retries.txt lists %s, which has no such loop", name)
		}
	}
}

// waitsInLoop returns whether a loop of the function waits.
func waitsInLoop(f *ast.FuncDecl) (waits bool) {
	ast.Inspect(f, func(n ast.Node) bool {
		var loop ast.Node
		switch n := n.(type) {
		case *ast.ForStmt:
			loop = n
		case *ast.RangeStmt:
			loop = n
		default:
			return true
		}
		ast.Inspect(loop, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			name := ""
			switch fun := call.Fun.(type) {
			case *ast.Ident:
				name = fun.Name
			case *ast.SelectorExpr:
				name = "." + fun.Sel.Name
				if x, ok := fun.X.(*ast.Ident); ok {
					name = x.Name + name
				}
			}
			waits = waits || waitNames.MatchString(name)
			return true
		})
		return true
	})
	return waits
}
