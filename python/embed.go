// Package python embeds hvdrun's package for programs of PyTorch, and installs it where workers
// find it.
package python

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
)

//go:embed hvdrun/*.py hvdrun/py.typed
var files embed.FS

// Version is hvdrun.__version__ of the package that Install writes. A program that starts workers
// sets it to its own version, such as v1.2.3, before it calls Install.
var Version string

// marker is a file with the version. It makes the package give way to one that the user has
// installed.
const marker = "hvdrun.embedded"

// Install writes the package into a folder of base that is named by a hash of the contents, and
// returns the folder, for PYTHONPATH. It leaves files that are the same already, and creates base
// if it is missing. Only this user may write to the files; others may read them if shared.
func Install(base string, shared bool) (string, error) {
	p := contents()
	dir := filepath.Join(base, "python-"+p.name)
	for _, d := range []string{base, dir, filepath.Join(dir, "hvdrun")} {
		if err := safefile.MakeDir(d, safefile.Mode(shared)); err != nil {
			return "", fmt.Errorf("python: %w", err)
		}
	}
	for name, data := range p.files {
		if err := put(filepath.Join(dir, name), data, shared); err != nil {
			return "", fmt.Errorf("python: %w", err)
		}
	}
	return dir, nil
}

// packed is the package: its files by their paths, and a hash of all of them.
type packed struct {
	files map[string][]byte
	name  string
}

// contents returns the package, which it reads once: each start of a worker installs it.
var contents = sync.OnceValue(func() packed {
	p, h := packed{files: map[string][]byte{marker: []byte(Version)}}, sha256.New()
	fmt.Fprintf(h, "%s\n", Version)
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		p.files[path], err = files.ReadFile(path)
		fmt.Fprintf(h, "%s %d\n%s", path, len(p.files[path]), p.files[path])
		return err
	})
	if err != nil {
		panic(fmt.Sprintf("python: %v", err)) // cannot happen: the files are in the program
	}
	p.name = hex.EncodeToString(h.Sum(nil)[:8])
	return p
})

// compared holds, by path, the state of each file when this process found it equal to that of the
// package: each start of a worker installs the package, and most find it unchanged.
var compared sync.Map // of fs.FileInfo

// put replaces a file in one step, unless it has the data already.
func put(path string, data []byte, shared bool) error {
	now, err := os.Lstat(path)
	if was, _ := compared.Load(path); err == nil && was != nil && unchanged(was.(fs.FileInfo), now) {
		return nil
	}
	if old, readErr := safefile.OwnText(path, int64(len(data))+1); err == nil && readErr == nil && bytes.Equal(old, data) {
		compared.Store(path, now)
		return nil
	}
	return safefile.Replace(path, data, safefile.Mode(shared))
}

// unchanged reports whether a file has not been written or replaced between two looks at it.
func unchanged(was, now fs.FileInfo) bool {
	return os.SameFile(was, now) && was.Mode() == now.Mode() && was.Size() == now.Size() && was.ModTime().Equal(now.ModTime())
}

// Environ installs the package in the user's cache, or if shared, in the system's, and returns env
// with its folder at the end of PYTHONPATH. Of two entries of env with the same name the later
// counts. If the package cannot be installed, Environ returns env, and writes a line to stderr,
// unless that is nil, if the program is written in Python. With HVD_NO_PYTHON_PATH=1 in env it does
// nothing.
func Environ(env []string, program string, shared bool, stderr io.Writer) []string {
	value := func(name string) (v string) {
		for _, entry := range env {
			if text, ok := strings.CutPrefix(entry, name+"="); ok {
				v = text
			}
		}
		return v
	}
	if value(plan.EnvNoPythonPath) == "1" {
		return env
	}
	cache := value("XDG_CACHE_HOME")
	switch home := value("HOME"); {
	case shared:
		cache = "/var/cache"
	case filepath.IsAbs(cache):
	case filepath.IsAbs(home):
		cache = filepath.Join(home, ".cache")
	default:
		return env
	}
	dir, err := Install(filepath.Join(cache, "hvdrun"), shared)
	if err == nil {
		return AddPath(env, dir)
	}
	if program = filepath.Base(program); stderr != nil && (strings.HasPrefix(program, "python") || strings.HasSuffix(program, ".py")) {
		fmt.Fprintf(stderr, "hvdrun: its package for PyTorch is not in PYTHONPATH: %v\n", err)
	}
	return env
}

// AddPath returns env with the folder at the end of its PYTHONPATH, which is one entry.
func AddPath(env []string, dir string) []string {
	const name = "PYTHONPATH="
	added := make([]string, 0, len(env)+1)
	for _, entry := range env {
		if old, is := strings.CutPrefix(entry, name); !is {
			added = append(added, entry)
		} else if old != "" {
			dir = old + string(filepath.ListSeparator) + dir
		}
	}
	return append(added, name+dir)
}
