package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb/dirhash"
	"golang.org/x/mod/zip"
)

// ours is the path of the module of the repository.
const ours = "github.com/hvdrun/hvdrun"

// nested are the folders of modules that users install by version. Each follows the modules that it
// requires.
var nested = []string{"plugins/kubernetes", "frameworks/gomlx"}

// proxy holds what a module proxy serves for a version of this repository's modules and, under
// tagged, the go.mod and go.sum of each nested module at its tag. In the repository, the go.mod of
// a nested module refers to the folder of the main module by a replace directive, and go install
// refuses modules with such directives.
type proxy struct {
	version string
	time    time.Time
	root    string
	files   []file
	sums    []string // lines of go.sum for the modules so far
}

func (p *proxy) all() error {
	temp, err := os.MkdirTemp("", "hvdrun-modules-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	var main bytes.Buffer
	if err := zip.CreateFromVCS(&main, module.Version{Path: ours, Version: p.version}, p.root, "HEAD", ""); err != nil {
		return err
	}
	mod, err := p.show("go.mod")
	if err != nil {
		return err
	}
	if err := p.add(temp, ours, mod, main.Bytes()); err != nil {
		return err
	}
	for _, dir := range nested {
		if err := p.nest(temp, dir); err != nil {
			return fmt.Errorf("module %s: %w", dir, err)
		}
	}
	return nil
}

// show returns the contents of a file in the commit.
func (p *proxy) show(name string) ([]byte, error) {
	cmd := exec.Command("git", "show", "HEAD:"+name)
	cmd.Dir, cmd.Stderr = p.root, os.Stderr
	return cmd.Output()
}

// nest adds a nested module, which requires this version of the main module.
func (p *proxy) nest(temp, dir string) error {
	tree := filepath.Join(temp, filepath.FromSlash(dir))
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return err
	}
	cmd := exec.Command("sh", "-c", `git archive HEAD "$1" LICENSE | tar -x -C "$2"`, "sh", dir, temp)
	cmd.Dir = p.root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("git archive: %w\n%s", err, out)
	}
	license, err := os.ReadFile(filepath.Join(temp, "LICENSE"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tree, "LICENSE"), license, 0o644); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(tree, "go.mod"))
	if err != nil {
		return err
	}
	mod, path, err := tagged(text, p.version)
	if err != nil {
		return err
	}
	sum, err := os.ReadFile(filepath.Join(tree, "go.sum"))
	if err != nil {
		return err
	}
	sum = withSums(sum, p.sums)
	for name, data := range map[string][]byte{"go.mod": mod, "go.sum": sum} {
		if err := os.WriteFile(filepath.Join(tree, name), data, 0o644); err != nil {
			return err
		}
	}
	p.files = append(p.files, file{"tagged/" + dir + "/go.mod", 0o644, mod}, file{"tagged/" + dir + "/go.sum", 0o644, sum})
	var b bytes.Buffer
	if err := zip.CreateFromDir(&b, module.Version{Path: path, Version: p.version}, tree); err != nil {
		return err
	}
	return p.add(temp, path, mod, b.Bytes())
}

// tagged returns the go.mod of a nested module at its tag, and the module's path. That go.mod
// requires this version of the repository's modules and contains no replace directive for them.
func tagged(text []byte, version string) (mod []byte, path string, err error) {
	f, err := modfile.Parse("go.mod", text, nil)
	if err != nil {
		return nil, "", err
	}
	for _, r := range slices.Clone(f.Replace) {
		if !of(r.Old.Path) {
			return nil, "", fmt.Errorf("go.mod replaces %s, so that go install cannot take the module", r.Old.Path)
		}
		if err := f.DropReplace(r.Old.Path, r.Old.Version); err != nil {
			return nil, "", err
		}
	}
	for _, r := range f.Require {
		if of(r.Mod.Path) {
			if err := f.AddRequire(r.Mod.Path, version); err != nil {
				return nil, "", err
			}
		}
	}
	f.Cleanup()
	mod, err = f.Format()
	return mod, f.Module.Mod.Path, err
}

// of reports whether a module belongs to this repository.
func of(path string) bool { return path == ours || strings.HasPrefix(path, ours+"/") }

// withSums returns a go.sum with the additional lines, in the order in which Go writes them.
func withSums(sum []byte, more []string) []byte {
	hashes := map[module.Version]string{}
	var all []module.Version
	for _, line := range append(strings.Split(strings.TrimSpace(string(sum)), "\n"), more...) {
		words := strings.Fields(line)
		v := module.Version{Path: words[0], Version: words[1]}
		if hashes[v] == "" {
			all = append(all, v)
		}
		hashes[v] = words[2]
	}
	module.Sort(all)
	var b bytes.Buffer
	for _, v := range all {
		fmt.Fprintln(&b, v.Path, v.Version, hashes[v])
	}
	return b.Bytes()
}

// add adds the files that a proxy serves for a module.
func (p *proxy) add(temp, name string, mod, zipped []byte) error {
	info, err := json.Marshal(struct {
		Version string
		Time    time.Time
	}{p.version, p.time})
	if err != nil {
		return err
	}
	at := path.Join("proxy", name, "@v")
	p.files = append(p.files,
		file{at + "/list", 0o644, []byte(p.version + "\n")},
		file{path.Join(at, p.version+".info"), 0o644, info},
		file{path.Join(at, p.version+".mod"), 0o644, mod},
		file{path.Join(at, p.version+".zip"), 0o644, zipped},
	)
	written := filepath.Join(temp, "module.zip")
	if err := os.WriteFile(written, zipped, 0o600); err != nil {
		return err
	}
	all, err := dirhash.HashZip(written, dirhash.Hash1)
	if err != nil {
		return err
	}
	modSum, err := dirhash.Hash1([]string{"go.mod"}, func(string) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(mod)), nil })
	if err != nil {
		return err
	}
	p.sums = append(p.sums, fmt.Sprintf("%s %s %s", name, p.version, all), fmt.Sprintf("%s %s/go.mod %s", name, p.version, modSum))
	return nil
}
