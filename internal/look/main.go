// Command look prints parts of the source in a folder that are hard to remember: the widest
// structs, the longest functions, the largest files and packages, and the exported names that no
// other package uses, neither by name nor as part of the signature of a name that it uses. These
// numbers are not limits: they say where to look first.
//
//	go run ./internal/look -n 10 .
//
// It leaves out tests and generated code.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	n := flag.Int("n", 10, "how many of each to print")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: look [-n 10] [FOLDER]")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() > 1 || *n < 1 {
		flag.Usage()
		os.Exit(2)
	}
	if err := look(os.Stdout, cmp.Or(flag.Arg(0), "."), *n); err != nil {
		fmt.Fprintln(os.Stderr, "look:", err)
		os.Exit(1)
	}
}

// measured is a part of the source, with its size.
type measured struct {
	size int
	what string
}

// findings holds what was found in the source.
type findings struct {
	structs, functions, files []measured
	packages                  map[string]int      // lines, by folder
	exported                  map[string]string   // where, by "folder.Name"
	mentioned                 []string            // by other packages, as "folder.Name"
	needed                    map[string]bool     // by other packages, as "folder.Name"
	signatures                map[string][]string // names of the same package in the signature of a name
}

func look(w io.Writer, folder string, n int) error {
	module, err := moduleOf(folder)
	if err != nil {
		return err
	}
	f := &findings{packages: map[string]int{}, exported: map[string]string{}, needed: map[string]bool{}, signatures: map[string][]string{}}
	err = filepath.WalkDir(folder, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(folder, name)
		if err != nil {
			return err
		}
		hidden := strings.HasPrefix(d.Name(), ".") && rel != "."
		if d.IsDir() && (hidden || d.Name() == "testdata" || rel == "bin") {
			return filepath.SkipDir
		}
		if d.IsDir() || hidden || !strings.HasSuffix(rel, ".go") {
			return nil
		}
		return f.read(module, name, filepath.ToSlash(rel))
	})
	if err != nil {
		return err
	}
	f.print(w, n)
	return nil
}

// moduleOf returns the path of the module in the folder.
func moduleOf(folder string) (string, error) {
	text, err := os.ReadFile(filepath.Join(folder, "go.mod"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if module, is := strings.CutPrefix(line, "module "); is {
			return strings.TrimSpace(module), nil
		}
	}
	return "", errors.New("go.mod names no module")
}

// read reads a file. From a test it only takes the names that the test mentions.
func (f *findings) read(module, name, rel string) error {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
	if err != nil {
		return err
	}
	dir := path.Dir(rel)
	f.mention(module, dir, file)
	if strings.HasSuffix(rel, "_test.go") || ast.IsGenerated(file) {
		return nil
	}
	line := func(p token.Pos) int { return fset.Position(p).Line }
	lines := line(file.FileEnd)
	f.files = append(f.files, measured{lines, rel})
	f.packages[dir] += lines
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			what := d.Name.Name
			if d.Recv != nil {
				of := receiver(d.Recv.List[0].Type)
				if d.Name.IsExported() {
					f.sign(dir, strings.TrimPrefix(of, "*"), d.Type)
				}
				what = fmt.Sprintf("(%s).%s", of, what)
			} else {
				f.export(dir, rel, d.Name, file)
				f.sign(dir, d.Name.Name, d.Type)
			}
			f.functions = append(f.functions, measured{line(d.End()) - line(d.Pos()) + 1, rel + " " + what})
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				f.declare(dir, rel, spec, file)
			}
			if d.Tok == token.CONST {
				f.enumerate(dir, d)
			}
		}
	}
	return nil
}

func (f *findings) declare(dir, rel string, spec ast.Spec, file *ast.File) {
	switch sp := spec.(type) {
	case *ast.TypeSpec:
		f.export(dir, rel, sp.Name, file)
		f.sign(dir, sp.Name.Name, sp.Type)
		if s, is := sp.Type.(*ast.StructType); is {
			f.structs = append(f.structs, measured{s.Fields.NumFields(), rel + " " + sp.Name.Name})
		}
	case *ast.ValueSpec:
		for _, name := range sp.Names {
			f.export(dir, rel, name, file)
			if sp.Type != nil {
				f.sign(dir, name.Name, sp.Type)
			}
		}
	}
}

// sign records that a name's signature has the names in part of it. Unexported fields of a struct
// do not belong to its signature.
func (f *findings) sign(dir, name string, part ast.Node) {
	ast.Inspect(part, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			f.signatures[dir+"."+name] = append(f.signatures[dir+"."+name], dir+"."+n.Name)
		case *ast.SelectorExpr:
			return false
		case *ast.StructType:
			for _, field := range n.Fields.List {
				if len(field.Names) == 0 || slices.ContainsFunc(field.Names, (*ast.Ident).IsExported) {
					f.sign(dir, name, field.Type)
				}
			}
			return false
		}
		return true
	})
}

// enumerate records that the constants of one declaration need each other: they are the values of
// one type.
func (f *findings) enumerate(dir string, d *ast.GenDecl) {
	first := ""
	for _, spec := range d.Specs {
		for _, name := range spec.(*ast.ValueSpec).Names {
			first = cmp.Or(first, dir+"."+name.Name)
			f.signatures[first] = append(f.signatures[first], dir+"."+name.Name)
			f.signatures[dir+"."+name.Name] = append(f.signatures[dir+"."+name.Name], first)
		}
	}
}

// need records that another package needs a name, and with it the names of its signature.
func (f *findings) need(name string) {
	if f.needed[name] {
		return
	}
	f.needed[name] = true
	for _, other := range f.signatures[name] {
		f.need(other)
	}
}

func (f *findings) export(dir, rel string, name *ast.Ident, file *ast.File) {
	if name.IsExported() && file.Name.Name != "main" {
		f.exported[dir+"."+name.Name] = rel
	}
}

// mention records the names of the module's other packages that a file uses. The external tests of
// a package are another package.
func (f *findings) mention(module, dir string, file *ast.File) {
	if strings.HasSuffix(file.Name.Name, "_test") {
		dir = ""
	}
	imports := map[string]string{} // folders, by the name in this file
	for _, i := range file.Imports {
		folder, ours := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), module+"/")
		if !ours {
			continue
		}
		name := path.Base(folder)
		if i.Name != nil {
			name = i.Name.Name
		}
		imports[name] = folder
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if s, is := n.(*ast.SelectorExpr); is {
			if x, is := s.X.(*ast.Ident); is && imports[x.Name] != "" && imports[x.Name] != dir {
				f.mentioned = append(f.mentioned, imports[x.Name]+"."+s.Sel.Name)
			}
		}
		return true
	})
}

// receiver returns the name of the type of a method.
func receiver(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.StarExpr:
		return "*" + receiver(t.X)
	case *ast.IndexExpr:
		return receiver(t.X)
	case *ast.IndexListExpr:
		return receiver(t.X)
	case *ast.Ident:
		return t.Name
	}
	return "?"
}

func (f *findings) print(w io.Writer, n int) {
	var packages []measured
	total := 0
	for dir, lines := range f.packages {
		packages = append(packages, measured{lines, dir})
		total += lines
	}
	fmt.Fprintf(w, "%d lines in %d files of %d packages\n", total, len(f.files), len(packages))
	for _, part := range []struct {
		title string
		of    []measured
	}{
		{"fields of structs", f.structs}, {"lines of functions", f.functions}, {"lines of files", f.files},
		{"lines of packages", packages},
	} {
		fmt.Fprintf(w, "\n%s\n", part.title)
		slices.SortFunc(part.of, func(a, b measured) int {
			return cmp.Or(cmp.Compare(b.size, a.size), cmp.Compare(a.what, b.what))
		})
		for _, m := range part.of[:min(n, len(part.of))] {
			fmt.Fprintf(w, "%6d  %s\n", m.size, m.what)
		}
	}
	for _, name := range f.mentioned {
		f.need(name)
	}
	var unused []string
	for name, rel := range f.exported {
		if !f.needed[name] {
			unused = append(unused, fmt.Sprintf("%s (%s)", name, path.Base(rel)))
		}
	}
	slices.Sort(unused)
	fmt.Fprintf(w, "\n%d names are exported; no other package needs %d of them\n",
		len(f.exported), len(unused))
	for _, name := range unused[:min(4*n, len(unused))] {
		fmt.Fprintf(w, "        %s\n", name)
	}
}
