package follow

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ReadSources looks at the sources of the module at root, from which a test has built programs. Go
// test notes that, and takes a result of the test's package from its cache only while they are the
// same.
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
