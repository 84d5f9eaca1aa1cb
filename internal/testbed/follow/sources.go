package follow

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ReadSources has a result of go test, which a test that calls it belongs to, stand in its cache for
// these sources alone: those of the module at root, from which the test has built programs. Go test
// notes the files that a test looks at.
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
