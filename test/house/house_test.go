package house

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"golang.org/x/mod/modfile"
)

const module = "github.com/hvdrun/hvdrun"

// maxLines is the largest number of lines of a function, without tests and flat parts.
const maxLines = 80

// rooms maps a folder to what its packages, and those below it that have no separate line, may
// import from this module: other rooms with the folders below them. It is the table of
// testdata/rooms.txt. A room may always import from itself; all stands for every room except the
// commands.
var rooms map[string]string

// TestMain runs the tests in the root of the module, where their paths begin.
func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil {
		panic(err)
	}
	rooms = table()
	os.Exit(m.Run())
}

// table parses rooms from lines such as "| `a`, `b/*` | what for | c, d |".
func table() map[string]string {
	text, err := os.ReadFile("test/house/testdata/rooms.txt")
	if err != nil {
		panic(err)
	}
	rooms := map[string]string{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 3 || !strings.HasPrefix(line, "| `") {
			continue
		}
		imports := strings.ReplaceAll(strings.TrimSpace(cells[2]), ",", "")
		if imports == "nothing" {
			imports = ""
		}
		for room := range strings.SplitSeq(cells[0], ",") {
			rooms[strings.TrimSuffix(strings.Trim(strings.TrimSpace(room), "`"), "/*")] = imports
		}
	}
	return rooms
}

// TestTableIsRead: each import that the table allows is itself a room of the table.
func TestTableIsRead(t *testing.T) {
	if len(rooms) < 30 || rooms["plan"] != "" || rooms["elastic/internal/transfer"] != "elastic/internal/snapshot internal/wake" {
		t.Fatalf("read as %v", rooms)
	}
	for room, imports := range rooms {
		for _, name := range strings.Fields(imports) {
			if _, is := rooms[name]; !is && name != "all" {
				t.Errorf("%s may import %s, which is no room", room, name)
			}
		}
	}
}

// heavy are modules and packages that a training program must not link.
var heavy = []string{
	"github.com/hashicorp/memberlist", "github.com/hashicorp/go-plugin", "github.com/spf13/viper", "github.com/spf13/cobra",
	"github.com/NVIDIA/go-nvml", "github.com/ebitengine/purego", "github.com/prometheus/client_golang",
	"charm.land/bubbletea/v2", "google.golang.org/grpc", "google.golang.org/protobuf", "net/http", "regexp",
}

type pkg struct {
	ImportPath   string
	Name         string
	Imports      []string
	TestImports  []string
	XTestImports []string
}

// path returns the package's folder.
func (p pkg) path() string { return ours(p.ImportPath) }

// ours returns the folder of an import path of this module, or "".
func ours(importPath string) string {
	rest, _ := strings.CutPrefix(importPath, module+"/")
	if rest == importPath {
		return ""
	}
	return rest
}

// isKit reports whether a package is for tests only: its folder ends in test, as
// discovery/discoverytest.
func isKit(path string) bool { return strings.HasSuffix(path, "test") }

func under(path, room string) bool { return path == room || strings.HasPrefix(path, room+"/") }

// roomOf returns the longest room that the path is in, or "".
func roomOf(path string) string {
	best := ""
	for room := range rooms {
		if under(path, room) && len(room) > len(best) {
			best = room
		}
	}
	return best
}

func mayImport(from, to string) error {
	room := roomOf(from)
	switch {
	case room == "" && !isKit(from):
		return fmt.Errorf("%s is in no room of the table", from)
	case under(to, "cmd") && !under(from, "cmd") || under(to, "examples") && !under(from, "examples"):
		return fmt.Errorf("%s imports the program %s", from, to)
	case isKit(from):
		return nil
	case isKit(to):
		return fmt.Errorf("%s imports %s, which is for tests", from, to)
	case rooms[room] == "all" || roomOf(to) == room:
		return nil
	}
	for _, allowed := range strings.Fields(rooms[room]) {
		if roomOf(to) == allowed || under(to, allowed) && roomOf(to) == roomOf(allowed) {
			return nil
		}
	}
	return fmt.Errorf("%s imports %s; its room may import: %s", from, to, rooms[room])
}

func TestImportTable(t *testing.T) {
	for _, p := range list(t, "./...") {
		if p.path() == "" {
			continue // the root is this test's module
		}
		for _, i := range p.Imports {
			if to := ours(i); to != "" {
				if err := mayImport(p.path(), to); err != nil {
					t.Error(err)
				}
			}
		}
		for _, i := range slices.Concat(p.TestImports, p.XTestImports) {
			if to := ours(i); under(to, "cmd") && !under(p.path(), "cmd") {
				t.Errorf("a test of %s imports the program %s", p.path(), to)
			}
		}
	}
}

// TestNothingBelowImportsTheDriver: only packages above the driver import its packages.
func TestNothingBelowImportsTheDriver(t *testing.T) {
	above := []string{"driver", "cmd", "examples", "test"}
	for _, p := range list(t, "./...") {
		if isKit(p.path()) || slices.ContainsFunc(above, func(room string) bool { return under(p.path(), room) }) {
			continue
		}
		for _, i := range p.Imports {
			if under(ours(i), "driver") {
				t.Errorf("%s imports %s", p.path(), ours(i))
			}
		}
	}
}

// TestCommandsStandApart: a package for one kind of hvdrun's commands does not import one for
// another kind.
func TestCommandsStandApart(t *testing.T) {
	const inner = "cmd/hvdrun/internal/"
	commands := []string{"agent", "bench", "discover", "operate", "tasks", "top", "torchrun"}
	for _, p := range list(t, "./cmd/hvdrun/internal/...") {
		for _, i := range p.Imports {
			if name, is := strings.CutPrefix(ours(i), inner); is && slices.Contains(commands, name) {
				t.Errorf("%s imports the commands of %s", p.path(), name)
			}
		}
	}
}

func TestImportTableRefuses(t *testing.T) {
	for _, c := range []struct {
		from, to string
		allowed  bool
	}{
		{"plan", "internal/identity", false},
		{"driver", "elastic", false},
		{"driver", "internal/wire", false},
		{"driver", "driver/decide", true},
		{"driver/decide", "driver", false},
		{"driver/decide", "internal/rendezvous", false},
		{"driver", "discovery", true},
		{"driver", "discovery/gossip", false},
		{"discovery", "discovery/gossip", false},
		{"internal/agent", "discovery/gossip", true},
		{"elastic", "driver", false},
		{"elastic", "collective/ring", true},
		{"collective", "collective/ring", true},
		{"launch", "launch/launchtest", false},
		{"launch/launchtest", "launch", true},
		{"examples/digits", "driver", false},
		{"cmd/hvdrun", "driver", true},
		{"driver", "cmd/hvdrun", false},
		{"plugins/file", "discovery/plugin", true},
		{"plugins/file", "plugins/settings", true},
		{"plugins/file", "discovery/gossip", false},
		{"plugins/file", "internal/wire", false},
		{"attic", "plan", false},
	} {
		if err := mayImport(c.from, c.to); (err == nil) != c.allowed {
			t.Errorf("%s importing %s: %v", c.from, c.to, err)
		}
	}
}

// impure are the packages that a deciding package must not use: those that act, wait, or can return
// something else at each call.
var impure = []string{
	"net", "os", "sync", "sync/atomic", "context", "math/rand", "math/rand/v2", "crypto/rand",
	"github.com/sirupsen/logrus",
}

// clocks are the functions of package time that read a clock or wait.
var clocks = []string{
	"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick",
}

// TestDecisionsArePure: packages that decide are functions of their input.
func TestDecisionsArePure(t *testing.T) {
	for _, s := range sources(t) {
		if s.test() || !under(s.dir(), "driver/decide") && !under(s.dir(), "job") {
			continue
		}
		for _, found := range impurities(s.file) {
			t.Errorf("%s: %s", s.where(found.at), found.what)
		}
	}
}

func TestImpuritiesAreFound(t *testing.T) {
	const text = `package p
import ("os"; "net/netip"; "time")
func f(c chan int) (time.Time, netip.Addr) { go f(c); c <- 1; select {}; _ = os.Args; return time.Now(), netip.Addr{} }`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", text, 0)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, i := range impurities(file) {
		found = append(found, i.what)
	}
	want := []string{"imports os", "starts a goroutine", "uses a channel", "waits", "calls time.Now"}
	if !slices.Equal(found, want) {
		t.Errorf("found %q, want %q", found, want)
	}
}

type impurity struct {
	at   ast.Node
	what string
}

func impurities(file *ast.File) (found []impurity) {
	ast.Inspect(file, func(n ast.Node) bool {
		what := ""
		switch n := n.(type) {
		case *ast.ImportSpec:
			if path := strings.Trim(n.Path.Value, `"`); slices.Contains(impure, path) {
				what = "imports " + path
			}
		case *ast.GoStmt:
			what = "starts a goroutine"
		case *ast.SendStmt:
			what = "uses a channel"
		case *ast.SelectStmt:
			what = "waits"
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains(clocks, n.Sel.Name) {
				what = "calls time." + n.Sel.Name
			}
		}
		if what != "" {
			found = append(found, impurity{n, what})
		}
		return true
	})
	return found
}

func TestTrainingProgramsAreLight(t *testing.T) {
	for _, dep := range list(t, "-deps", "./elastic") {
		for _, h := range heavy {
			if under(dep.ImportPath, h) {
				t.Errorf("elastic links %s", dep.ImportPath)
			}
		}
	}
}

// keepers are packages and functions whose use makes the linker keep all exported methods of all
// types, because they call methods by names that it does not know: 5 MB in hvdrun.
var keepers = regexp.MustCompile(`"(text|html)/template"|\.(Set(Usage|Help|Version)Template|AddTemplateFuncs?)\(`)

// TestLinkerDropsMethods: no code of hvdrun's executes templates.
func TestLinkerDropsMethods(t *testing.T) {
	for _, dep := range list(t, "-deps", "./cmd/hvdrun") {
		files, err := filepath.Glob(filepath.Join(dep.path(), "*.go"))
		if err != nil || dep.path() == "" {
			continue
		}
		for _, name := range files {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if use := keepers.Find(text); use != nil && !strings.HasSuffix(name, "_test.go") {
				t.Errorf("%s uses %s", name, use)
			}
		}
	}
}

// services maps a package to the protocols of internal/wire whose messages it links.
var services = map[string][]string{
	"collective":       nil,
	"elastic":          nil,
	"driver":           {"controlpb"},
	"tasks":            {"taskspb"},
	"internal/agent":   {"agentpb"},
	"discovery/plugin": {"discoverypb"},
}

// TestServicesLinked: a program links only the messages of the services that it serves or calls.
func TestServicesLinked(t *testing.T) {
	for path, want := range services {
		var linked []string
		for _, dep := range list(t, "-deps", "./"+path) {
			if name, is := strings.CutPrefix(dep.path(), "internal/wire/"); is {
				linked = append(linked, name)
			}
		}
		slices.Sort(linked)
		if !slices.Equal(linked, want) {
			t.Errorf("%s links %v, not %v", path, linked, want)
		}
	}
}

// list runs go list.
func list(t *testing.T, args ...string) []pkg {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Name,Imports,TestImports,XTestImports"}, args...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		switch err := dec.Decode(&p); {
		case errors.Is(err, io.EOF):
			return pkgs
		case err != nil:
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

// source is a parsed file that is not generated.
type source struct {
	path string
	text string
	fset *token.FileSet
	file *ast.File
}

func (s source) dir() string { return filepath.Dir(s.path) }
func (s source) test() bool  { return strings.HasSuffix(s.path, "_test.go") }

// program returns whether the file belongs to a program and not to a package that several import.
func (s source) program() bool { return s.file.Name.Name == "main" || under(s.dir(), "cmd") }

func (s source) lines(n ast.Node) int {
	return s.fset.Position(n.End()).Line - s.fset.Position(n.Pos()).Line + 1
}

func (s source) where(n ast.Node) string {
	return fmt.Sprintf("%s:%d", s.path, s.fset.Position(n.Pos()).Line)
}

// texts returns the paths of the project's files.
func texts() (paths []string, err error) {
	err = filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		hidden := strings.HasPrefix(d.Name(), ".") && path != "."
		if d.IsDir() && (hidden || path == "bin" || path == "tmp") {
			return filepath.SkipDir
		}
		if d.Type().IsRegular() && !hidden {
			paths = append(paths, path)
		}
		return nil
	})
	return paths, err
}

// parsed are all Go files except generated ones. They are parsed once for all tests.
var parsed = sync.OnceValues(func() ([]source, error) {
	paths, err := texts()
	if err != nil {
		return nil, err
	}
	var all []source
	for _, path := range paths {
		if !strings.HasSuffix(path, ".go") || strings.Contains(path, "testdata/") {
			continue
		}
		fset := token.NewFileSet()
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		file, err := parser.ParseFile(fset, path, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		if !ast.IsGenerated(file) {
			all = append(all, source{path, string(text), fset, file})
		}
	}
	if len(all) == 0 {
		return nil, errors.New("no sources")
	}
	return all, nil
})

func sources(t *testing.T) []source {
	t.Helper()
	all, err := parsed()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestPackageDocs(t *testing.T) {
	docs := map[string][]string{}
	for _, s := range sources(t) {
		if s.test() {
			continue
		}
		files := docs[s.dir()]
		if s.file.Doc != nil {
			files = append(files, s.path)
		}
		docs[s.dir()] = files
	}
	for dir, files := range docs {
		if len(files) != 1 {
			t.Errorf("package %s has %d package comments: %v", dir, len(files), files)
		}
	}
}

// maxColumns is the maximum width of a comment line, with tabs of four columns. Code and tables
// within comments, and comments after code, can be wider.
const maxColumns = 100

func TestCommentsAreNarrow(t *testing.T) {
	for _, s := range sources(t) {
		for _, group := range s.file.Comments {
			for _, c := range group.List {
				p := s.fset.Position(c.Pos())
				if n := columns(c.Text, p.Column-1); n > maxColumns && s.alone(c) {
					t.Errorf("%s:%d: a comment of %d columns, %d at most", s.path, p.Line, n, maxColumns)
				}
			}
		}
	}
}

// columns returns the width of a line of prose behind this number of tabs, or 0 if it is not prose.
func columns(text string, tabs int) int {
	if !strings.HasPrefix(text, "// ") {
		return 0
	}
	return 4*tabs + utf8.RuneCountInString(text)
}

// alone reports whether no code stands before the comment.
func (s source) alone(c *ast.Comment) bool {
	p := s.fset.Position(c.Pos())
	line := s.text[p.Offset-(p.Column-1) : p.Offset]
	return strings.Trim(line, "\t") == ""
}

func TestPackageNames(t *testing.T) {
	for _, s := range sources(t) {
		switch name := s.file.Name.Name; name {
		case "util", "utils", "common", "helpers", "helper", "misc", "base", "types":
			t.Errorf("%s: package %s says nothing about what it holds", s.path, name)
		}
	}
}

func TestExportedNamesAreDocumented(t *testing.T) {
	for _, s := range sources(t) {
		if s.test() || s.file.Name.Name == "main" {
			continue
		}
		for _, decl := range s.file.Decls {
			for _, name := range undocumented(decl) {
				t.Errorf("%s: %s has no comment", s.where(decl), name)
			}
		}
	}
}

// undocumented returns the exported names of the declaration that have no comment. A comment on a
// group covers all its names. Methods that only implement a well-known interface need no comment.
func undocumented(decl ast.Decl) (names []string) {
	switch d := decl.(type) {
	case *ast.FuncDecl:
		known := slices.Contains([]string{"Error", "Unwrap", "Is", "String", "Len", "Less", "Swap"}, d.Name.Name)
		if d.Name.IsExported() && d.Doc == nil && (d.Recv == nil || !known && exportedReceiver(d)) {
			names = append(names, d.Name.Name)
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch sp := spec.(type) {
			case *ast.TypeSpec:
				if sp.Name.IsExported() && d.Doc == nil && sp.Doc == nil {
					names = append(names, sp.Name.Name)
				}
			case *ast.ValueSpec:
				for _, n := range sp.Names {
					if n.IsExported() && d.Doc == nil && sp.Doc == nil && sp.Comment == nil {
						names = append(names, n.Name)
					}
				}
			}
		}
	}
	return names
}

func exportedReceiver(d *ast.FuncDecl) bool {
	typ := d.Recv.List[0].Type
	for {
		switch x := typ.(type) {
		case *ast.StarExpr:
			typ = x.X
		case *ast.IndexExpr:
			typ = x.X
		case *ast.IndexListExpr:
			typ = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return true
		}
	}
}

func TestFunctionsAreShort(t *testing.T) {
	for _, s := range sources(t) {
		if s.test() {
			continue
		}
		for _, decl := range s.file.Decls {
			if d, ok := decl.(*ast.FuncDecl); ok {
				n := s.lines(d)
				for _, flat := range flatParts(d) {
					n -= s.lines(flat)
				}
				if n > maxLines {
					t.Errorf("%s: %s has %d lines without flat switches and tables, more than %d", s.where(d), d.Name.Name, n, maxLines)
				}
			}
		}
	}
}

// flatLines is the maximum number of lines of a case in a flat switch, or of an element of a table.
const flatLines = 6

// flatParts returns the outermost switches and tables of a function that can be read line by line:
// a switch whose cases are short and branch at most one if deep, and a composite literal whose
// elements are short and contain no code.
func flatParts(d *ast.FuncDecl) (all []ast.Node) {
	ast.Inspect(d, func(n ast.Node) bool {
		var cases []ast.Stmt
		switch n := n.(type) {
		case *ast.SwitchStmt:
			cases = n.Body.List
		case *ast.TypeSwitchStmt:
			cases = n.Body.List
		case *ast.CompositeLit:
			if !holdsCode(n) {
				all = append(all, n)
				return false
			}
		}
		if len(cases) > 0 && !slices.ContainsFunc(cases, func(c ast.Stmt) bool { return !isFlat(c.(*ast.CaseClause)) }) {
			all = append(all, n)
			return false
		}
		return true
	})
	return all
}

func holdsCode(n ast.Node) (found bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		_, is := n.(*ast.FuncLit)
		found = found || is
		return !found
	})
	return found
}

// isFlat reports whether a case has few statements, none of which loops, switches, declares a
// function, or nests an if in another.
func isFlat(c *ast.CaseClause) bool {
	statements, branches := 0, 0
	flat := true
	for _, s := range c.Body {
		ast.Inspect(s, func(n ast.Node) bool {
			switch n.(type) {
			case *ast.IfStmt:
				branches++
			case *ast.ForStmt, *ast.RangeStmt, *ast.SwitchStmt, *ast.TypeSwitchStmt, *ast.SelectStmt, *ast.FuncLit:
				flat = false
			}
			if _, is := n.(ast.Stmt); is {
				statements++
			}
			return flat
		})
	}
	return flat && branches <= 1 && statements <= flatLines
}

// TestFlatIsTold: flatParts distinguishes what can be read line by line from what cannot.
func TestFlatIsTold(t *testing.T) {
	for text, want := range map[string]int{
		"switch x { case 1: return 2; case 2: if y { return 3 }; return 4 }":    1,
		"switch x { case 1: for { f() } }":                                      0,
		"switch x { case 1: if y { if z { return 3 } } }":                       0,
		"switch v := x.(type) { case int: g(v) }":                               1,
		"for range x { switch y { case 1: return 0 } }":                         1,
		"return []int{1, 2, 3}[x]":                                              1,
		"m := map[int]func(){1: func() { f() }}; m[x]()":                        0,
		"switch x { case 1: a(); b(); c(); d(); e(); f(); g(); h(); return 1 }": 0,
	} {
		file, err := parser.ParseFile(token.NewFileSet(), "", "package p; func f() int { "+text+" }", 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(flatParts(file.Decls[0].(*ast.FuncDecl))); got != want {
			t.Errorf("%s: %d flat parts, not %d", text, got, want)
		}
	}
}

// maxFields is the maximum number of fields of a struct that is not a configuration.
const maxFields = 16

// wide lists the structs with more fields, and why.
var wide = map[string]string{
	"cmd/hvdrun/internal/operate.submission":  "flags",
	"cmd/hvdrun/internal/settings.Settings":   "flags",
	"cmd/hvdrun/internal/torchrun.torchFlags": "flags",
	"collective/cuda.api":                     "functions of a library",
	"collective/cuda/nccl.api":                "functions of a library",
	"driver/decide.Record":                    "an object of the journal",
	"job.Entry":                               "an object of the events file",
	"job.Status":                              "an object of the status",
	"internal/line.Message":                   "any line to a worker",
	"launch.Spec":                             "what is asked of a launcher",
	"plan.Worker":                             "the environment of a worker",
}

// TestStructsAreNarrow: a struct with many fields must be split into several with different
// lifetimes.
func TestStructsAreNarrow(t *testing.T) {
	found := map[string]bool{}
	for _, s := range sources(t) {
		if s.test() || under(s.dir(), "test") || under(s.dir(), "examples") {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			spec, is := n.(*ast.TypeSpec)
			if !is {
				return true
			}
			of, is := spec.Type.(*ast.StructType)
			if !is {
				return true
			}
			fields := 0
			for _, f := range of.Fields.List {
				fields += max(1, len(f.Names))
			}
			name := s.dir() + "." + spec.Name.Name
			if fields <= maxFields || spec.Name.Name == "Config" {
				return true
			}
			if found[name] = true; wide[name] == "" {
				t.Errorf("%s: %s has %d fields, %d at most", s.where(spec), name, fields, maxFields)
			}
			return true
		})
	}
	for name := range wide {
		if !found[name] {
			t.Errorf("%s is not wide", name)
		}
	}
}

func TestForbiddenCalls(t *testing.T) {
	mains := map[string]bool{
		"internal/proc/guard.go": true, // a separate program in this case
		"elastic/main.go":        true, // the main function of programs
	}
	ends := regexp.MustCompile(`^(os\.Exit|(log|logrus|l|logger)\.(Fatal|Panic)(f|ln)?|syscall\.Exit)$`)
	seen := map[string]bool{} // by name: whether it ends the program
	for _, s := range sources(t) {
		ast.Inspect(s.file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, ok := sel.X.(*ast.Ident)
			if !ok {
				return true
			}
			name := x.Name + "." + sel.Sel.Name
			does, known := seen[name]
			if !known {
				does = ends.MatchString(name)
				seen[name] = does
			}
			if does && !s.test() && !s.program() && !mains[s.path] {
				t.Errorf("%s: %s in a library", s.where(n), name)
			}
			if name == "time.Sleep" && (s.test() || isKit(s.dir())) {
				t.Errorf("%s: %s in a test", s.where(n), name)
			}
			return true
		})
	}
}

// environment lists the files, except programs and plan, that read the environment, and why.
var environment = map[string]string{
	"test/sandbox/sandbox.go": "replaces variables of the environment for tests",
}

// TestEnvironmentIsReadInOnePlace: programs read their own environment, and plan reads that of
// workers.
func TestEnvironmentIsReadInOnePlace(t *testing.T) {
	read := map[string]bool{}
	for _, s := range sources(t) {
		if s.test() || s.program() || under(s.dir(), "plan") || isKit(s.dir()) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok || sel.Sel.Name != "Getenv" && sel.Sel.Name != "LookupEnv" {
				return true
			}
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == "os" {
				if read[s.path] = true; environment[s.path] == "" {
					t.Errorf("%s: os.%s outside of programs and plan", s.where(n), sel.Sel.Name)
				}
			}
			return true
		})
	}
	for path := range environment {
		if !read[path] {
			t.Errorf("%s does not read the environment: remove it from the list", path)
		}
	}
}

func TestNothingIsLeftForLater(t *testing.T) {
	words := []string{"TO" + "DO", "FIX" + "ME", "XX" + "X"}
	marks := regexp.MustCompile(`\b(` + strings.Join(words, "|") + `)\b`)
	paths, err := texts()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		switch filepath.Ext(path) {
		case ".go", ".md", ".sh", ".proto", ".yml", ".conf":
		default:
			if filepath.Base(path) != "Makefile" {
				continue
			}
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range words {
			if bytes.Contains(text, []byte(word)) {
				if m := marks.Find(text); m != nil {
					t.Errorf("%s: %s", path, m)
				}
			}
		}
	}
}

// TestDependenciesAreExplained: each direct requirement in go.mod has a comment above it that says
// what it is for and what it saves.
func TestDependenciesAreExplained(t *testing.T) {
	text, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := modfile.Parse("go.mod", text, nil)
	if err != nil {
		t.Fatal(err)
	}
	explained := regexp.MustCompile(`^// For .+\. (Without it: .+|.+ requires it)\.$`)
	direct := 0
	for _, r := range mod.Require {
		if r.Indirect {
			continue
		}
		direct++
		if above := r.Syntax.Before; len(above) != 1 || !explained.MatchString(above[0].Token) {
			t.Errorf("go.mod does not say above %s what it is for: // For …. Without it: ….", r.Mod.Path)
		}
	}
	if direct == 0 {
		t.Error("go.mod requires nothing directly")
	}
}

func TestModuleReplacesNothing(t *testing.T) {
	text, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if regexp.MustCompile(`(?m)^\s*replace\b`).Match(text) {
		t.Error("go.mod replaces modules: what others get is not what was tested")
	}
}
