package sandbox

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEnter(t *testing.T) {
	for _, v := range []string{"HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HVD_MIN_NP", "GOCACHE", "GOPATH", "STATICCHECK_CACHE"} {
		t.Setenv(v, os.Getenv(v)) // set back after the test
	}
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("GOCACHE", "")
	t.Setenv("XDG_STATE_HOME", "/elsewhere")
	t.Setenv("HVD_MIN_NP", "3")
	leave, err := Enter()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(os.Getenv("HOME"))
	for _, name := range []string{"HOME", "TMPDIR", "XDG_RUNTIME_DIR"} {
		if fi, err := os.Stat(os.Getenv(name)); err != nil || fi.Mode().Perm() != 0o700 || filepath.Dir(os.Getenv(name)) != dir {
			t.Errorf("%s=%s: %v, %v", name, os.Getenv(name), fi, err)
		}
	}
	for _, name := range []string{"HVD_MIN_NP", "XDG_STATE_HOME"} {
		if value, is := os.LookupEnv(name); is {
			t.Errorf("%s is %q", name, value)
		}
	}
	if cache := os.Getenv("GOCACHE"); !strings.HasPrefix(cache, home) {
		t.Errorf("Go's cache is in %s, not below the home before, %s", cache, home)
	}
	if err := leave(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s: %v", dir, err)
	}
}

func TestNet(t *testing.T) {
	seen := map[string]bool{}
	for range 300 {
		prefix, err := Net()
		if err != nil || seen[prefix] {
			t.Fatalf("%q again, or %v", prefix, err)
		}
		seen[prefix] = true
	}
}
