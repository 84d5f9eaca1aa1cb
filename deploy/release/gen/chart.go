package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/hvdrun/hvdrun/internal/licenses"
)

// chart packs deploy/chart like helm package, with the version of the release.
func (r *release) chart() error {
	files, err := tree(filepath.Join(r.root, "deploy", "chart"), "hvdrun")
	if err != nil {
		return err
	}
	version := strings.TrimPrefix(r.version, "v")
	for i := range files {
		if files[i].name == "hvdrun/Chart.yaml" {
			text := bytes.Replace(files[i].data, []byte("\nversion: 0.0.0\nappVersion: 0.0.0\n"), []byte("\nversion: "+version+"\nappVersion: "+version+"\n"), 1)
			if bytes.Equal(text, files[i].data) {
				return fmt.Errorf("deploy/chart/Chart.yaml has no place for the version")
			}
			files[i].data = text
		}
	}
	return r.write("hvdrun-"+version+".tgz", zipped(archive(files, r.time)))
}

// billOfMaterials writes the list of modules in CycloneDX's JSON. It returns an error unless the
// list contains each module that go version -m reports for the programs.
func (r *release) billOfMaterials() error {
	list, err := licenses.All()
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := list.CycloneDX(&b, r.version); err != nil {
		return err
	}
	var bom struct {
		Components []struct{ Name, Version string } `json:"components"`
	}
	if err := json.Unmarshal(b.Bytes(), &bom); err != nil {
		return err
	}
	listed := map[string]bool{}
	for _, c := range bom.Components {
		listed[c.Name+" "+c.Version] = true
	}
	for _, arch := range architectures {
		for _, pattern := range []string{"bin/*", "lib/hvdrun/*/*"} {
			programs, err := filepath.Glob(filepath.Join(r.trees, arch, filepath.FromSlash(pattern)))
			if err != nil {
				return err
			}
			for _, program := range programs {
				if err := isListed(program, listed); err != nil {
					return err
				}
			}
		}
	}
	return r.write(fmt.Sprintf("hvdrun_%s_sbom.cdx.json", r.version), b.Bytes())
}

// isListed returns an error if a program is linked with a module that is not in listed.
func isListed(program string, listed map[string]bool) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	for _, m := range info.Deps {
		if m.Path == "github.com/hvdrun/hvdrun" { // in a plugin that is a separate module
			continue
		}
		if m.Replace != nil {
			m = m.Replace
		}
		if !listed[m.Path+" "+m.Version] {
			return fmt.Errorf("%s is linked with %s %s, which the bill of materials lacks", filepath.Base(program), m.Path, m.Version)
		}
	}
	return nil
}

// modules writes proxy.tar.gz, the files that a Go module proxy serves for this version, and the
// go.mod and go.sum for the tags of the nested modules. Without a git repository it writes nothing.
func (r *release) modules() error {
	if _, err := os.Stat(filepath.Join(r.root, ".git")); err != nil {
		return nil
	}
	p := proxy{version: r.version, time: r.time, root: r.root}
	if err := p.all(); err != nil {
		return err
	}
	return r.write(fmt.Sprintf("hvdrun_%s_modules.tar.gz", r.version), zipped(archive(p.files, r.time)))
}
