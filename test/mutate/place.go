package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// mutant is a change of a file: the bytes from start to end are replaced.
type mutant struct {
	file       string // path
	in         string // function
	what       string // kind of change
	start, end int
	new        string
	source     []byte
	ordinal    int // among equal changes in the function
}

func (m *mutant) old() string { return string(m.source[m.start:m.end]) }

func (m *mutant) text() []byte {
	return slices.Concat(m.source[:m.start], []byte(m.new), m.source[m.end:])
}

func (m *mutant) String() string {
	return fmt.Sprintf("%s:%d %s: %s", filepath.Base(m.file), 1+bytes.Count(m.source[:m.start], []byte("\n")), m.in, m.what)
}

// diff shows the changed lines.
func (m *mutant) diff() string {
	first := bytes.LastIndexByte(m.source[:m.start], '\n') + 1
	last := len(m.source)
	if n := bytes.IndexByte(m.source[m.end:], '\n'); n >= 0 {
		last = m.end + n
	}
	var s strings.Builder
	fmt.Fprintf(&s, "  --- %s:%d\n", m.file, 1+bytes.Count(m.source[:m.start], []byte("\n")))
	for _, side := range []struct{ sign, text string }{
		{"-", string(m.source[first:last])}, {"+", string(m.source[first:m.start]) + m.new + string(m.source[m.end:last])},
	} {
		for line := range strings.SplitSeq(side.text, "\n") {
			fmt.Fprintf(&s, "  %s%s\n", side.sign, line)
		}
	}
	return s.String()
}

// choose sorts mutants by a hash of the seed and of what each is, so that the first are a random
// choice.
func choose(all []*mutant, seed uint64) {
	key := func(m *mutant) uint64 {
		sum := sha256.Sum256(fmt.Appendf(nil, "%d\x00%s\x00%s\x00%s\x00%s\x00%s\x00%d", seed, filepath.Base(m.file), m.in, m.what, m.old(), m.new, m.ordinal))
		return binary.BigEndian.Uint64(sum[:])
	}
	slices.SortFunc(all, func(a, b *mutant) int { return cmp.Compare(key(a), key(b)) })
}

// mutants returns all changes that this program knows of the package's files, in their order.
func (p *pkg) mutants() ([]*mutant, error) {
	var all []*mutant
	for _, name := range p.GoFiles {
		path := filepath.Join(p.Dir, name)
		source, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		more, err := mutantsOf(path, source)
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, nil
}

// mutantsOf returns the changes of a file; none of a generated one.
func mutantsOf(path string, source []byte) ([]*mutant, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, source, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil || ast.IsGenerated(file) {
		return nil, err
	}
	f := finder{path: path, source: source, at: func(p token.Pos) int { return files.Position(p).Offset }}
	for _, d := range file.Decls {
		if d, ok := d.(*ast.FuncDecl); ok && d.Body != nil {
			f.in = d.Name.Name
			if d.Recv != nil {
				f.in = "(" + f.text(d.Recv.List[0].Type) + ")." + f.in
			}
			f.results = [][]ast.Expr{results(d.Type)}
			f.seen = map[string]int{}
			ast.Inspect(d.Body, f.visit)
		}
	}
	return f.all, nil
}

// finder collects the changes of a file.
type finder struct {
	path    string
	source  []byte
	at      func(token.Pos) int
	in      string         // the function at hand
	results [][]ast.Expr   // types of the results of the function at hand and of those around it
	kept    []ast.Stmt     // statements that are not dropped
	seen    map[string]int // equal changes of the function so far
	all     []*mutant
}

func (f *finder) text(n ast.Node) string { return string(f.source[f.at(n.Pos()):f.at(n.End())]) }

// add adds the change of the bytes from one position to another.
func (f *finder) add(from, to token.Pos, what, new string) {
	m := &mutant{file: f.path, in: f.in, what: what, start: f.at(from), end: f.at(to), new: new, source: f.source}
	key := what + "\x00" + m.old() + "\x00" + new
	m.ordinal = f.seen[key]
	f.seen[key]++
	f.all = append(f.all, m)
}

// swapped are the operators that take each other's place.
var swapped = map[token.Token]token.Token{
	token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR, token.EQL: token.NEQ, token.NEQ: token.EQL,
	token.ADD: token.SUB, token.SUB: token.ADD, token.LAND: token.LOR, token.LOR: token.LAND,
}

func (f *finder) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.FuncLit:
		outer := f.results
		f.results = append(outer, results(n.Type))
		ast.Inspect(n.Body, f.visit)
		f.results = outer
		return false
	case *ast.IfStmt:
		f.keep(n.Init)
		f.negate(n.Cond)
	case *ast.ForStmt:
		f.keep(n.Init)
		f.keep(n.Post) // without it the loop does not end
		f.negate(n.Cond)
	case *ast.SwitchStmt:
		f.keep(n.Init)
	case *ast.TypeSwitchStmt:
		f.keep(n.Init)
		f.keep(n.Assign)
	case *ast.CommClause:
		f.keep(n.Comm)
	case *ast.BinaryExpr:
		if other, ok := swapped[n.Op]; ok {
			f.add(n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), n.Op.String()+" is "+other.String(), other.String())
		}
	case *ast.BasicLit:
		f.count(n)
	case *ast.ReturnStmt:
		f.zero(n)
	case *ast.AssignStmt:
		if n.Tok != token.DEFINE {
			f.drop(n)
		}
	case *ast.IncDecStmt:
		f.drop(n)
	case *ast.ExprStmt:
		if call, ok := n.X.(*ast.CallExpr); ok && !logs(call) {
			f.drop(n)
		}
	}
	return true
}

func (f *finder) keep(s ast.Stmt) {
	if s != nil {
		f.kept = append(f.kept, s)
	}
}

func (f *finder) negate(cond ast.Expr) {
	if cond != nil {
		f.add(cond.Pos(), cond.End(), "a condition is negated", "!("+f.text(cond)+")")
	}
}

func (f *finder) drop(s ast.Stmt) {
	if !slices.Contains(f.kept, s) {
		f.add(s.Pos(), s.End(), "a statement is left out", "")
	}
}

// logs reports whether a call only logs.
func logs(call *ast.CallExpr) bool {
	s, ok := call.Fun.(*ast.SelectorExpr)
	return ok && slices.Contains([]string{"Debug", "Info", "Warn", "Log", "LogAttrs"}, s.Sel.Name)
}

// count changes an integer by one. Octal numbers are the modes of files.
func (f *finder) count(n *ast.BasicLit) {
	v, err := strconv.ParseInt(n.Value, 0, 32)
	if n.Kind != token.INT || err != nil || strings.HasPrefix(n.Value, "0o") {
		return
	}
	for _, d := range []int64{1, -1} {
		f.add(n.Pos(), n.End(), fmt.Sprintf("%s is %d", n.Value, v+d), fmt.Sprint(v+d))
	}
}

// results returns the type of each result of a function.
func results(t *ast.FuncType) []ast.Expr {
	var all []ast.Expr
	if t.Results != nil {
		for _, field := range t.Results.List {
			for range max(1, len(field.Names)) {
				all = append(all, field.Type)
			}
		}
	}
	return all
}

// zero has a function return a zero value, or the other truth.
func (f *finder) zero(n *ast.ReturnStmt) {
	types := f.results[len(f.results)-1]
	if len(types) != len(n.Results) {
		return // a call returns several values, or the results have names
	}
	for i, t := range types {
		e := n.Results[i]
		zero := zeroOf(t)
		if zero == "false" {
			f.add(e.Pos(), e.End(), "a returned truth is negated", "!("+f.text(e)+")")
		} else if zero != "" && zero != f.text(e) {
			f.add(e.Pos(), e.End(), fmt.Sprintf("result %d is %s", i, zero), zero)
		}
	}
}

// zeroOf returns the zero value of a type, empty if that cannot be seen.
func zeroOf(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.Ident:
		switch t.Name {
		case "bool":
			return "false"
		case "string":
			return `""`
		case "error", "any":
			return "nil"
		case "int", "int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64", "byte", "float32", "float64", "uintptr":
			return "0"
		}
	case *ast.StarExpr, *ast.MapType, *ast.FuncType, *ast.ChanType, *ast.InterfaceType:
		return "nil"
	case *ast.ArrayType:
		if t.Len == nil {
			return "nil"
		}
	}
	return ""
}
