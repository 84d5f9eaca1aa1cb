package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// waitNames matches the functions with which a loop waits before it continues.
var waitNames = regexp.MustCompile(`^(time\.(After|NewTimer|Sleep)|(.*\.)?(pause|Pause|pauseFor|pauseBefore|rest))$`)

// TestRetriesAreDocumented: the table of retries lists each loop that waits before it continues,
// either with what it logs on failure or among those that do not retry anything, and lists no other
// loop.
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

// doubles lists the functions that double and bound a value that is not a time.
var doubles = map[string]string{
	"elastic/internal/dirtypages/memory.go decide":     "scans for which a chunk rests",
	"elastic/internal/dirtypages/memory.go decideCalm": "scans for which a chunk rests",
	"collective/internal/fold/fold.go End":             "leaves below a node of a tree",
}

// TestOneBackoff: a pause that doubles must be a retry.Backoff.
func TestOneBackoff(t *testing.T) {
	used := map[string]bool{}
	for _, s := range sources(t) {
		if s.test() || under(s.dir(), "internal/retry") {
			continue
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			found := backoffs(f)
			name := s.path + " " + f.Name.Name
			if used[name] = used[name] || len(found) > 0; doubles[name] != "" {
				continue
			}
			for _, at := range found {
				t.Errorf("%s: a pause that doubles: use retry.Backoff, or list %q in doubles", s.where(at), name)
			}
		}
	}
	for name := range doubles {
		if !used[name] {
			t.Errorf("doubles lists %s, which doubles nothing", name)
		}
	}
}

func TestBackoffsAreFound(t *testing.T) {
	const text = `package p
func a() { for p := first; ; p = min(2*p, last) { time.Sleep(p) } }
func b() { for p := first; ; p *= 2 { select { case <-time.After(p): case <-done: } } }
func c() { for { p <<= 1; retry.Pause(ctx, p) } }
func d(n int) time.Duration { return min(first<<min(n, 10), last) }
func e() { w.pause = min(max(first, w.pause*2), last) }
func f() { for { p += p; time.Sleep(p) } }
func g() { for { p = p*2; time.Sleep(p) } }
func h() { for n := 1; n < size; n *= 2 { copy(x, y) } }
func i() { _ = min(2*second, last); _ = 1 << n }`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", text, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := ""
	for _, d := range file.Decls {
		if f := d.(*ast.FuncDecl); len(backoffs(f)) > 0 {
			found += f.Name.Name
		}
	}
	if found != "abcdefg" {
		t.Errorf("found in %q", found)
	}
}

// backoffs returns where a function doubles a pause: where it doubles a value up to a bound, and
// where it doubles a value in a loop that waits.
func backoffs(f *ast.FuncDecl) (found []ast.Node) {
	waits := waitsInLoop(f)
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr: // min(first<<n, last)
			if name, ok := n.Fun.(*ast.Ident); ok && name.Name == "min" && len(n.Args) == 2 && (shifts(n.Args[0]) || shifts(n.Args[1])) {
				found = append(found, n)
			}
		case *ast.AssignStmt: // p = min(2*p, last); p *= 2
			if len(n.Lhs) != 1 || len(n.Rhs) != 1 {
				return true
			}
			to, value := types.ExprString(n.Lhs[0]), n.Rhs[0]
			text := types.ExprString(value)
			call, ok := value.(*ast.CallExpr)
			switch {
			case ok && types.ExprString(call.Fun) == "min" && doublesOf(value, to),
				waits && (n.Tok == token.MUL_ASSIGN || n.Tok == token.SHL_ASSIGN),
				waits && n.Tok == token.ADD_ASSIGN && text == to,
				waits && doublesOf(value, to):
				found = append(found, n)
			}
		}
		return true
	})
	return found
}

// shifts returns whether an expression shifts a value by a variable number.
func shifts(e ast.Expr) bool {
	b, ok := e.(*ast.BinaryExpr)
	if !ok || b.Op != token.SHL {
		return false
	}
	_, fixed := b.Y.(*ast.BasicLit)
	_, one := b.X.(*ast.BasicLit)
	return !fixed && !one
}

// doublesOf returns whether an expression contains twice the value of another.
func doublesOf(e ast.Expr, of string) (doubles bool) {
	ast.Inspect(e, func(n ast.Node) bool {
		b, ok := n.(*ast.BinaryExpr)
		if !ok {
			return true
		}
		x, y := types.ExprString(b.X), types.ExprString(b.Y)
		switch b.Op {
		case token.MUL:
			doubles = doubles || x == of && y == "2" || x == "2" && y == of
		case token.SHL, token.ADD:
			doubles = doubles || x == of && (y == of || b.Op == token.SHL)
		}
		return true
	})
	return doubles
}
