package house

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strings"
	"testing"
)

const walksFile = "test/house/testdata/walks.txt"

// step is a row of a walk.
type step struct {
	line           int // of testdata/walks.txt
	name, file, by string
	from           *step // nil: the walk begins
	decl           *ast.FuncDecl
}

// walk is one table of testdata/walks.txt.
type walk struct {
	steps []*step
	size  string // the line above the table, with the counts
}

// counted returns the line that must be above the table.
func (w *walk) counted() string {
	left, returns, last := map[string]bool{}, 0, ""
	for _, s := range w.steps {
		if s.file != last && left[s.file] {
			returns++
		}
		left[s.file], last = true, s.file
	}
	return fmt.Sprintf("%d files, %d returns.", len(left), returns)
}

var sizeLine = regexp.MustCompile(`^\d+ files, \d+ returns\.$`)

// TestWalks: each function of testdata/walks.txt is where its row says, and the function of the
// previous row mentions it.
func TestWalks(t *testing.T) {
	text, err := os.ReadFile(walksFile)
	if err != nil {
		t.Fatal(err)
	}
	walks, faults := readWalks(string(text), os.ReadFile)
	for _, f := range faults {
		t.Error(f)
	}
	if want := strings.Count(string(text), "\n## "); len(walks) != want {
		t.Errorf("%s has %d walks under %d headings", walksFile, len(walks), want)
	}
	for _, w := range walks {
		at := w.steps[0].line
		if len(w.steps) < 10 {
			t.Errorf("%s:%d: a walk of %d functions", walksFile, at, len(w.steps))
		}
		if is := w.counted(); w.size != is {
			t.Errorf("%s:%d: the line above the table is %q; write %q", walksFile, at, w.size, is)
		}
	}
}

// readWalks parses the walks of a text, and returns what is wrong with them.
func readWalks(text string, read func(path string) ([]byte, error)) (walks []*walk, faults []string) {
	files := make(map[string]*ast.File)
	w := &walk{}
	for i, line := range strings.Split(text, "\n") {
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if len(cells) != 5 || !strings.HasPrefix(line, "| `") {
			if len(w.steps) > 0 {
				walks, w = append(walks, w), &walk{}
			}
			if sizeLine.MatchString(line) {
				w.size = line
			}
			continue
		}
		for i, c := range cells {
			cells[i] = strings.Trim(c, " `")
		}
		s := &step{line: i + 1, name: cells[0], file: cells[1], by: cells[3]}
		fault := s.link(w.steps, cells[2])
		if fault == "" {
			fault = s.find(files, read)
		}
		if fault == "" {
			fault = s.check()
		}
		if fault != "" {
			faults = append(faults, fmt.Sprintf("%s:%d: %s: %s", walksFile, s.line, s.name, fault))
		}
		w.steps = append(w.steps, s)
	}
	if len(w.steps) > 0 {
		walks = append(walks, w)
	}
	return walks, faults
}

// link sets the step from which this one is reached.
func (s *step) link(walk []*step, from string) (fault string) {
	switch {
	case from == "" && len(walk) > 0:
		s.from = walk[len(walk)-1]
	case from != "":
		for _, earlier := range walk {
			if earlier.name == from {
				s.from = earlier
			}
		}
		if s.from == nil {
			return fmt.Sprintf("there is no earlier row of %s, which column from names", from)
		}
	}
	return ""
}

// find finds the declaration of the step's function.
func (s *step) find(files map[string]*ast.File, read func(path string) ([]byte, error)) (fault string) {
	file := files[s.file]
	if file == nil {
		text, err := read(s.file)
		if err != nil {
			return fmt.Sprintf("column file: %v; name the file that declares it now", err)
		}
		if file, err = parser.ParseFile(token.NewFileSet(), s.file, text, parser.SkipObjectResolution); err != nil {
			return err.Error()
		}
		files[s.file] = file
	}
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && file.Name.Name+"."+receiver(f)+f.Name.Name == s.name {
			s.decl = f
			return ""
		}
	}
	return fmt.Sprintf("%s declares no such function; correct the columns function and file", s.file)
}

// receiver returns the name of the method's type and a dot, or "" for a function.
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	name := ""
	ast.Inspect(f.Recv.List[0].Type, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && name == "" {
			name = id.Name + "."
		}
		return true
	})
	return name
}

// check checks that the step before leads to this one.
func (s *step) check() (fault string) {
	if s.from == nil || s.from.decl == nil {
		return "" // the walk begins, or the row before has another fault
	}
	name := s.decl.Name.Name
	switch by := s.by; {
	case by == "" && !mentions(s.from.decl, name):
		return fmt.Sprintf("%s does not mention %s; correct column from, or name in column by what both mention", s.from.name, name)
	case by == "":
	case by != s.from.decl.Name.Name && !mentions(s.from.decl, by):
		return fmt.Sprintf("%s does not mention %s, which column by names", s.from.name, by)
	case by != name && !mentions(s.decl, by):
		return fmt.Sprintf("it does not mention %s, which column by names", by)
	}
	return ""
}

// mentions reports whether a name occurs in the function's receiver, signature or body.
func mentions(f *ast.FuncDecl, name string) (found bool) {
	ast.Inspect(f, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && id != f.Name && id.Name == name {
			found = true
		}
		return !found
	})
	return found
}

func TestWalksAreChecked(t *testing.T) {
	read := func(path string) ([]byte, error) {
		if path != "p/p.go" {
			return nil, os.ErrNotExist
		}
		return []byte("package p\nfunc a() { b(); c <- 1 }\nfunc b() {}\ntype T struct{}\nfunc (t *T) d() { <-c; a() }\n"), nil
	}
	for row, want := range map[string]string{
		"| `p.b` | `p/p.go` | | | |":       "",
		"| `p.T.d` | `p/p.go` | | `c` | |": "",
		"| `p.T.d` | `p/p.go` | | `a` | |": "",
		"| `p.T.d` | `p/p.go` | | | |":     "does not mention d",
		"| `p.b` | `p/p.go` | | `c` | |":   "it does not mention c",
		"| `p.b` | `p/p.go` | | `e` | |":   "p.a does not mention e",
		"| `p.e` | `p/p.go` | | | |":       "p/p.go declares no such function",
		"| `p.d` | `p/p.go` | | | |":       "declares no such function",
		"| `p.b` | `q/p.go` | | | |":       "name the file",
		"| `p.b` | `p/p.go` | `p.x` | | |": "no earlier row of p.x",
	} {
		_, faults := readWalks("| `p.a` | `p/p.go` | | | |\n"+row+"\n", read)
		said := strings.Join(faults, "\n")
		if (said == "") != (want == "") || !strings.Contains(said, want) {
			t.Errorf("%s: %q, want %q", row, said, want)
		}
		if said != "" && !strings.HasPrefix(said, walksFile+":2: ") {
			t.Errorf("%s: %q does not name the line", row, said)
		}
	}
}

func TestWalksAreCounted(t *testing.T) {
	w := &walk{}
	for _, file := range strings.Fields("a a b a c b b a") {
		w.steps = append(w.steps, &step{file: file})
	}
	if got, want := w.counted(), "3 files, 3 returns."; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
