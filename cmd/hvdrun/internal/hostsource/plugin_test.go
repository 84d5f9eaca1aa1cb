package hostsource

import (
	"os"
	"path/filepath"
	"testing"
)

// TestPluginOf: the plugins that belong to a program are found beside it, or where its package
// installs them.
func TestPluginOf(t *testing.T) {
	root := t.TempDir()
	for path, want := range map[string]string{"bin/hvdrun": "bin/plugins/file", "usr/bin/hvdrun": "usr/lib/hvdrun/plugins/file"} {
		at := filepath.Join(root, want)
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o700); err != nil {
			t.Fatal(err)
		}
		program := filepath.Join(root, path)
		if got, places := pluginOf(program, "file"); got != "" || len(places) != 2 {
			t.Errorf("%s: %q before there is one", path, got)
		}
		if err := os.WriteFile(at, []byte("#!/bin/sh\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		if got, _ := pluginOf(program, "file"); got != at {
			t.Errorf("%s: %q, not %q", path, got, at)
		}
	}
}
