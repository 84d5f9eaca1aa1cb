package house

import (
	"go/ast"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// own lists packages whose folders look importable but that serve hvdrun alone: they need the
// identity of a job.
var own = []string{"notify", "torchrun", "tasks/scheduler", "driver/decide"}

// insiders lists exported declarations and fields whose types belong to packages that other modules
// cannot import, and why.
var insiders = map[string]string{
	"collective.Config.Credentials": "elastic listens for the members of a world",
	"collective.Config.Network":     "tests replace the network",
	"collective.Elsewhere.Type":     "collective/cuda has the memory",
	"collective.Endpoint.Visit":     "elastic fetches a commit",
	"collective.Peers.Key":          "elastic connects the members of a world",
	"driver.Config.Tasks":           "hvdrun has the scheduler",
	"elastic/checkpoint.Write":      "elastic has the commits",
}

// TestSignatures: other modules can use the packages that they can import, because no exported
// declaration there mentions a type of an internal package.
func TestSignatures(t *testing.T) {
	found := map[string]bool{}
	for _, s := range sources(t) {
		if s.test() || s.file.Name.Name == "main" || !imported(s.dir()) {
			continue
		}
		inner := map[string]bool{} // names of internal packages in this file
		for _, i := range s.file.Imports {
			path := strings.Trim(i.Path.Value, `"`)
			if ours(path) != "" && slices.Contains(strings.Split(path, "/"), "internal") {
				name := filepath.Base(path)
				if i.Name != nil {
					name = i.Name.Name
				}
				inner[name] = true
			}
		}
		for name, n := range exported(s.file) {
			for _, sel := range namesIn(n) {
				if x := sel.X.(*ast.Ident); inner[x.Name] {
					name := s.dir() + "." + name
					found[name] = true
					if insiders[name] == "" {
						t.Errorf("%s: %s mentions %s.%s, which other modules cannot import", s.where(sel), name, x.Name, sel.Sel.Name)
					}
				}
			}
		}
	}
	for name := range insiders {
		if !found[name] {
			t.Errorf("%s needs no exception any more", name)
		}
	}
}

// imported reports whether other modules import the package of a folder.
func imported(dir string) bool {
	parts := strings.Split(dir, "/")
	if slices.Contains(parts, "internal") || slices.Contains([]string{"cmd", "examples", "plugins", "test"}, parts[0]) {
		return false
	}
	return !isKit(dir) && !slices.ContainsFunc(own, func(room string) bool { return under(dir, room) })
}

// exported returns the types and signatures of a file's exported declarations and fields, by name.
func exported(file *ast.File) map[string]ast.Expr {
	all := map[string]ast.Expr{}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if of := strings.TrimSuffix(receiver(d), "."); d.Name.IsExported() && (of == "" || ast.IsExported(of)) {
				all[receiver(d)+d.Name.Name] = d.Type
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					if fields, is := spec.Type.(*ast.StructType); is && spec.Name.IsExported() {
						for _, f := range fields.Fields.List {
							for _, name := range f.Names {
								if name.IsExported() {
									all[spec.Name.Name+"."+name.Name] = f.Type
								}
							}
							if len(f.Names) == 0 {
								all[spec.Name.Name] = f.Type // embedded
							}
						}
					} else if spec.Name.IsExported() {
						all[spec.Name.Name] = spec.Type
					}
				case *ast.ValueSpec:
					if spec.Type != nil && spec.Names[0].IsExported() {
						all[spec.Names[0].Name] = spec.Type
					}
				}
			}
		}
	}
	return all
}

// namesIn returns the names of other packages in a type, except those in unexported fields.
func namesIn(of ast.Expr) (all []*ast.SelectorExpr) {
	ast.Inspect(of, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.StructType:
			for _, f := range n.Fields.List {
				if len(f.Names) == 0 || slices.ContainsFunc(f.Names, (*ast.Ident).IsExported) {
					all = append(all, namesIn(f.Type)...)
				}
			}
			return false
		case *ast.SelectorExpr:
			if _, is := n.X.(*ast.Ident); is {
				all = append(all, n)
			}
		}
		return true
	})
	return all
}
