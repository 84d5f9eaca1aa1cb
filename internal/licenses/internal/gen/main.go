// Command gen collects from the module cache the licences of everything that the programs of hvdrun
// are linked with, and writes the list that package licenses embeds, and NOTICE.
package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// The list, in the format of package licenses, which another module cannot import.
type (
	list struct {
		Modules []*mod   `json:"modules"`
		Texts   []string `json:"texts"`
	}
	mod struct {
		Path     string   `json:"path"`
		Version  string   `json:"version,omitempty"`
		License  string   `json:"license"`
		Source   string   `json:"source"`
		Programs []string `json:"programs"`
		Files    []file   `json:"files"`
	}
	file struct {
		Name string `json:"name"`
		Text int    `json:"text"`
	}
)

// shipped are the folders of programs, by module.
var shipped = map[string][]string{
	".":                  {"./cmd/hvdrun", "./plugins/dns", "./plugins/file", "./plugins/http", "./plugins/slurm"},
	"plugins/kubernetes": {"."},
}

// platforms are the platforms that programs are built for; their dependencies may differ.
var platforms = [][]string{
	{"GOOS=linux", "GOARCH=amd64", "CGO_ENABLED=1"}, {"GOOS=linux", "GOARCH=arm64", "CGO_ENABLED=0"},
}

// licensing matches the names of licence files and notices.
var licensing = regexp.MustCompile(`(?i)^(licen[cs]e|copying|copyright|notice|patents)([.-].*)?$`)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: gen FOLDER, the root of the repository")
	}
	l, err := collect(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	packed, err := l.pack()
	if err == nil {
		err = os.WriteFile(filepath.Join(os.Args[1], "internal", "licenses", "licenses.json.gz"), packed, 0o644)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(os.Args[1], "NOTICE"), []byte(l.notice()), 0o644)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// pack encodes the list for package licenses.
func (l *list) pack() ([]byte, error) {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(json.NewEncoder(z).Encode(l), z.Close()); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// linked is a package as go list describes it.
type linked struct {
	ImportPath string
	Dir        string
	DepOnly    bool // not named on the command line
	Standard   bool
	Deps       []string // paths of all dependencies
	Module     *struct {
		Path, Version, Dir string
		Main               bool
		Replace            *struct{ Path string }
	}
}

// collect returns everything that the programs of the repository at root are linked with.
func collect(root string) (*list, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env: %w", err)
	}
	c := collector{goroot: strings.TrimSpace(string(goroot)), modules: map[string]*mod{}, texts: map[string]int{}}
	for dir, programs := range shipped {
		for _, platform := range platforms {
			if err := c.programs(filepath.Join(root, dir), programs, platform); err != nil {
				return nil, fmt.Errorf("%s: %w", dir, err)
			}
		}
	}
	return c.finish()
}

type collector struct {
	goroot  string
	modules map[string]*mod
	texts   map[string]int // numbers of the texts of files
}

// programs adds what the programs of one module are linked with.
func (c *collector) programs(dir string, programs, platform []string) error {
	cmd := exec.Command("go", append([]string{"list", "-deps", "-json=ImportPath,Dir,DepOnly,Standard,Deps,Module"}, programs...)...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	cmd.Env = append(append(os.Environ(), "GOFLAGS=-mod=readonly", "GOWORK=off"), platform...)
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	var all []linked
	with := map[string][]string{} // names of the programs, by a package that they are linked with
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p linked
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		all = append(all, p)
		if !p.DepOnly {
			for _, dep := range p.Deps {
				with[dep] = append(with[dep], filepath.Base(p.Dir))
			}
		}
	}
	for _, p := range all {
		if err := c.take(p, with[p.ImportPath]); err != nil {
			return err
		}
	}
	return nil
}

// take adds a package's module, and the licences in the folders from the package's up to the
// module's.
func (c *collector) take(p linked, programs []string) error {
	var m *mod
	root := ""
	switch {
	case p.Standard:
		m = c.module("std", "", "https://go.dev/dl/")
		root, p.Dir = c.goroot, c.goroot // third-party code in the library has Go's licence, or is in golang.org/x
	case p.Module == nil || p.Module.Main || p.Module.Replace != nil:
		return nil // of this repository
	default:
		m = c.module(p.Module.Path, p.Module.Version, "go mod download "+p.Module.Path+"@"+p.Module.Version)
		root = p.Module.Dir
	}
	for _, program := range programs {
		if !slices.Contains(m.Programs, program) {
			m.Programs = append(m.Programs, program)
		}
	}
	for dir := p.Dir; ; dir = filepath.Dir(dir) {
		if err := c.folder(m, root, dir); err != nil {
			return err
		}
		if dir == root || len(dir) <= len(root) {
			return nil
		}
	}
}

// module returns the module with the path and version. Two versions are two modules.
func (c *collector) module(path, version, source string) *mod {
	key := path + "@" + version
	if c.modules[key] == nil {
		c.modules[key] = &mod{Path: path, Version: version, Source: source}
	}
	return c.modules[key]
}

// folder adds the licences in a folder.
func (c *collector) folder(m *mod, root, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || !licensing.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".go") {
			continue
		}
		name, err := filepath.Rel(root, filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		if slices.ContainsFunc(m.Files, func(f file) bool { return f.Name == name }) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		if _, known := c.texts[string(text)]; !known {
			c.texts[string(text)] = len(c.texts)
		}
		m.Files = append(m.Files, file{name, c.texts[string(text)]})
	}
	return nil
}

// finish sorts the list, numbers the texts in the order of their first use, and identifies the
// licences.
func (c *collector) finish() (*list, error) {
	was := make([]string, len(c.texts))
	for text, i := range c.texts {
		was[i] = text
	}
	l := &list{}
	for _, m := range c.modules {
		slices.Sort(m.Programs)
		slices.SortFunc(m.Files, func(a, b file) int { return cmp.Compare(a.Name, b.Name) })
		l.Modules = append(l.Modules, m)
	}
	slices.SortFunc(l.Modules, func(a, b *mod) int { return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Version, b.Version)) })
	number := map[int]int{}
	for _, m := range l.Modules {
		var names []string
		for i, f := range m.Files {
			n, known := number[f.Text]
			if !known {
				n = len(l.Texts)
				number[f.Text] = n
				l.Texts = append(l.Texts, was[f.Text])
			}
			m.Files[i].Text = n
			if strings.HasPrefix(path.Base(f.Name), "PATENTS") {
				continue // an additional grant without an SPDX name
			}
			for _, match := range licensecheck.Scan([]byte(l.Texts[n])).Match {
				if !slices.Contains(names, match.ID) && !match.IsURL {
					names = append(names, match.ID)
				}
			}
		}
		if len(names) == 0 {
			return nil, fmt.Errorf("module %s %s: no licence is known that its files %v would be", m.Path, m.Version, m.Files)
		}
		m.License = strings.Join(names, " AND ")
	}
	return l, nil
}

// isNotice returns whether Apache-2.0 requires a file with that name to be passed on.
func isNotice(name string) bool { return strings.HasPrefix(strings.ToUpper(path.Base(name)), "NOTICE") }

// notice returns the text of NOTICE, for hvdrun and everything that it is linked with.
func (l *list) notice() string {
	var b strings.Builder
	b.WriteString(`hvdrun
Copyright the authors of hvdrun

This product is licensed under the Apache License, Version 2.0; see LICENSE.

Its programs are linked with modules of others. Their licences, full texts included, and where their
sources are had, those under the Mozilla Public License 2.0 included, are printed by

    hvdrun version --licenses

The following are the notices of modules that have one.
`)
	for _, m := range l.Modules {
		for _, f := range m.Files {
			if isNotice(f.Name) {
				fmt.Fprintf(&b, "\n%s\n%s %s, %s:\n\n%s\n",
					strings.Repeat("-", 80), m.Path, m.Version, f.Name, strings.TrimSpace(l.Texts[f.Text]))
			}
		}
	}
	return b.String()
}
