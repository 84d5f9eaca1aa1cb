package server

import (
	"os"
	"path/filepath"
)

// beside returns the path of libhvdrun.so in the folder of a program, or where the package of a
// distribution installs it, or "".
func beside(program string) string {
	if program == "" {
		return ""
	}
	dir := filepath.Dir(program)
	for _, path := range []string{
		filepath.Join(dir, "libhvdrun.so"), filepath.Join(dir, "lib", "libhvdrun.so"),
		filepath.Join(dir, "..", "lib", "hvdrun", "libhvdrun.so"),
	} {
		if fi, err := os.Stat(path); err == nil && fi.Mode().IsRegular() {
			return path
		}
	}
	return ""
}
