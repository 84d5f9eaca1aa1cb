package licenses

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
)

// The parts of CycloneDX 1.6 that describe a list of modules.
type (
	bom struct {
		Format   string      `json:"bomFormat"`
		Spec     string      `json:"specVersion"`
		Version  int         `json:"version"`
		Metadata bomMetadata `json:"metadata"`
		// Components are in the order of List.Modules.
		Components   []component  `json:"components"`
		Dependencies []dependency `json:"dependencies"`
	}
	bomMetadata struct {
		Component component `json:"component"`
	}
	component struct {
		Type     string    `json:"type"`
		Ref      string    `json:"bom-ref"`
		Name     string    `json:"name"`
		Version  string    `json:"version"`
		Licenses []license `json:"licenses"`
		PURL     string    `json:"purl"`
	}
	license struct {
		Expression string `json:"expression"`
	}
	dependency struct {
		Ref string   `json:"ref"`
		On  []string `json:"dependsOn"`
	}
)

// CycloneDX writes the list as a software bill of materials of that version of hvdrun, in
// CycloneDX's JSON. Equal lists have equal output.
func (l *List) CycloneDX(w io.Writer, version string) error {
	own := componentOf("application", "github.com/hvdrun/hvdrun", version, "Apache-2.0")
	b := bom{Format: "CycloneDX", Spec: "1.6", Version: 1, Metadata: bomMetadata{own}}
	all := dependency{Ref: own.Ref}
	for _, m := range l.Modules {
		if m.Path == "std" {
			m.Version = runtime.Version() // of the Go that built this program
		}
		c := componentOf("library", m.Path, m.Version, m.License)
		b.Components = append(b.Components, c)
		all.On = append(all.On, c.Ref)
	}
	b.Dependencies = []dependency{all}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(b); err != nil {
		return fmt.Errorf("licenses: %w", err)
	}
	return nil
}

func componentOf(kind, path, version, spdx string) component {
	purl := "pkg:golang/" + path + "@" + version
	return component{kind, purl, path, version, []license{{spdx}}, purl}
}
