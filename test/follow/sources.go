package follow

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ReadSources opens the sources of the module at root, from which a test has built programs. The go
// command notes that, and uses a cached result of the test's package only while the sources are
// unchanged.
func ReadSources(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "bin"):
			return fs.SkipDir
		case d.IsDir() || strings.HasSuffix(name, "_test.go") || strings.HasSuffix(name, ".md") || strings.HasSuffix(name, ".png"):
			return nil
		}
		_, err = os.Stat(path)
		return err
	})
}
