// Package licenses provides the texts of the licences of all modules that hvdrun's programs are
// linked with. A generator collects them from the module cache, and a test checks that they are
// current.
package licenses

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

//go:generate go run -C internal/gen . ../../../..

//go:embed licenses.json.gz
var packed []byte

// List lists the modules that the programs are linked with.
type List struct {
	// Modules are ordered by their paths.
	Modules []Module `json:"modules"`
	// Texts are the texts of the files. Each occurs once.
	Texts []string `json:"texts"`
}

// Module is a module that hvdrun's programs are linked with.
type Module struct {
	// Path is the path of the module; "std", which has no Version, for Go's standard library.
	Path    string `json:"path"`
	Version string `json:"version,omitempty"`
	// License is an SPDX expression: identifiers joined by AND.
	License string `json:"license"`
	// Source is where its source is available.
	Source string `json:"source"`
	// Programs are the programs that are linked with it.
	Programs []string `json:"programs"`
	// Files are its licences and notices.
	Files []File `json:"files"`
}

// File is a file of a module.
type File struct {
	// Name is the path from the module's root.
	Name string `json:"name"`
	// Text is an index of List.Texts.
	Text int `json:"text"`
}

// All returns the list.
func All() (*List, error) {
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("licenses: %w", err)
	}
	l := &List{}
	if err := json.NewDecoder(z).Decode(l); err != nil {
		return nil, fmt.Errorf("licenses: %w", err)
	}
	return l, nil
}

// Print writes the modules, and then each text, preceded by the names of the files that contain it.
func (l *List) Print(w io.Writer) error {
	var b strings.Builder
	b.WriteString("hvdrun is licensed under Apache-2.0. Its programs are linked with:\n\n")
	for _, m := range l.Modules {
		fmt.Fprintf(&b, "%s %s\n    license: %s\n    source:  %s\n    linked:  %s\n",
			m.Path, m.Version, m.License, m.Source, strings.Join(m.Programs, " "))
	}
	for i, text := range l.Texts {
		b.WriteString("\n" + strings.Repeat("=", 80) + "\n")
		for _, m := range l.Modules {
			for _, f := range m.Files {
				if f.Text == i {
					fmt.Fprintf(&b, "%s: %s\n", m.Path, f.Name)
				}
			}
		}
		b.WriteString(strings.Repeat("-", 80) + "\n" + strings.TrimRight(text, "\n") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}
