package licenses_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/licenses"
)

const root = "../.."

// linked returns the programs that are linked with each module@version, and the folders of the
// modules, according to go list.
func linked(t *testing.T) (programs map[string][]string, dirs map[string]string) {
	t.Helper()
	const format = `{{with .Module}}{{if not (or .Main .Replace)}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}`
	programs, dirs = map[string][]string{}, map[string]string{}
	for dir, all := range map[string][]string{
		".":                  {"./cmd/hvdrun", "./plugins/dns", "./plugins/file", "./plugins/http", "./plugins/slurm"},
		"plugins/kubernetes": {"."},
	} {
		for _, program := range all {
			for _, platform := range [][]string{{"GOARCH=amd64", "CGO_ENABLED=1"}, {"GOARCH=arm64", "CGO_ENABLED=0"}} {
				cmd := exec.Command("go", "list", "-deps", "-f", format, program)
				cmd.Dir, cmd.Env = filepath.Join(root, dir), append(append(os.Environ(), "GOFLAGS=", "GOOS=linux"), platform...)
				var stderr bytes.Buffer
				cmd.Stderr = &stderr
				out, err := cmd.Output()
				if err != nil {
					t.Fatalf("%s: go list: %v\n%s", program, err, &stderr)
				}
				for line := range strings.Lines(string(out)) {
					words := strings.Fields(line)
					if len(words) != 3 {
						continue
					}
					key, name := words[0]+" "+words[1], path.Base(path.Join(dir, program))
					dirs[key] = words[2]
					if !slices.Contains(programs[key], name) {
						programs[key] = append(programs[key], name)
					}
				}
			}
		}
	}
	return programs, dirs
}

// TestEveryModuleIsListed: the list has exactly the modules that the programs are linked with, and
// the texts of their files equal those in the module cache.
func TestEveryModuleIsListed(t *testing.T) {
	list, err := licenses.All()
	if err != nil {
		t.Fatal(err)
	}
	programs, dirs := linked(t)
	if len(programs) < 40 {
		t.Fatalf("go list tells of %d modules", len(programs))
	}
	listed := map[string]bool{}
	for _, m := range list.Modules {
		key := m.Path + " " + m.Version
		listed[key] = true
		if m.License == "" || m.Source == "" || len(m.Files) == 0 {
			t.Errorf("%s has no licence, source or file", key)
		}
		if m.Path == "std" {
			continue // the Go version that made the list
		}
		want := slices.Sorted(slices.Values(programs[key]))
		if !slices.Equal(m.Programs, want) {
			t.Errorf("%s is said to be in %v, and is in %v; run make generate", key, m.Programs, want)
		}
		for _, f := range m.Files {
			if text, err := os.ReadFile(filepath.Join(dirs[key], f.Name)); dirs[key] != "" && (err != nil || string(text) != list.Texts[f.Text]) {
				t.Errorf("%s: %s is not what the list has; run make generate (%v)", key, f.Name, err)
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(programs)) {
		if !listed[key] {
			t.Errorf("%s is linked and not listed; run make generate", key)
		}
	}
	if !listed["std "] {
		t.Error("the licence of Go is missing")
	}
}

// TestNotices: NOTICE contains each notice of a module, and the printed list contains each text
// once.
func TestNotices(t *testing.T) {
	list, err := licenses.All()
	if err != nil {
		t.Fatal(err)
	}
	notice, err := os.ReadFile(filepath.Join(root, "NOTICE"))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := list.Print(&out); err != nil {
		t.Fatal(err)
	}
	notices := 0
	for _, m := range list.Modules {
		if want := fmt.Sprintf("%s %s\n    license: %s\n    source:  %s\n", m.Path, m.Version, m.License, m.Source); !strings.Contains(out.String(), want) {
			t.Errorf("%s is not printed", want)
		}
		for _, f := range m.Files {
			text := strings.TrimSpace(list.Texts[f.Text])
			if n := strings.Count(out.String(), m.Path+": "+f.Name+"\n"); n != 1 || !strings.Contains(out.String(), text) {
				t.Errorf("%s: %s is printed %d times", m.Path, f.Name, n)
			}
			if strings.HasPrefix(strings.ToUpper(path.Base(f.Name)), "NOTICE") {
				notices++
				if !strings.Contains(string(notice), text) {
					t.Errorf("NOTICE lacks that of %s; run make generate", m.Path)
				}
			}
		}
	}
	if notices < 3 {
		t.Errorf("%d notices", notices)
	}
}

// TestCycloneDX: the bill of materials has each module once, with its version and its licence.
func TestCycloneDX(t *testing.T) {
	list, err := licenses.All()
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := list.CycloneDX(&text, "v1.2.3"); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Metadata   struct{ Component struct{ PURL string } }
		Components []struct {
			Ref      string `json:"bom-ref"`
			Version  string
			Licenses []struct{ Expression string }
		}
		Dependencies []struct{ DependsOn []string }
	}
	if err := json.Unmarshal(text.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Metadata.Component.PURL != "pkg:golang/github.com/hvdrun/hvdrun@v1.2.3" || len(got.Components) != len(list.Modules) ||
		len(got.Dependencies) != 1 || len(got.Dependencies[0].DependsOn) != len(list.Modules) {
		t.Errorf("%d components of %d modules of %s", len(got.Components), len(list.Modules), got.Metadata.Component.PURL)
	}
	seen := map[string]bool{}
	for i, c := range got.Components {
		if seen[c.Ref] || c.Version == "" || len(c.Licenses) != 1 || c.Licenses[0].Expression != list.Modules[i].License {
			t.Errorf("%+v for %s %s", c, list.Modules[i].Path, list.Modules[i].License)
		}
		seen[c.Ref] = true
	}
}
