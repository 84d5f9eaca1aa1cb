package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLook(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module example.com/m\n\ngo 1.26\n",
		"a/a.go": "package a\n\ntype Wide struct{ A, B int; c Hidden }\n\nfunc Used() Result { return 0 }\n\nfunc (w *Wide) Long() {\n\n\n}\n\n" +
			"type Result int\n\ntype Hidden int\n\nconst Unused = 1\n\nconst (\n\tFirst = iota\n\tSecond\n)\n",
		"a/a_test.go": "package a\n\nvar unused = Unused\n",
		"b/b.go":      "package b\n\nimport other \"example.com/m/a\"\n\nfunc f() { other.Used(); _ = other.First }\n",
		"b/b_test.go": "package b\n\nimport \"example.com/m/a\"\n\nvar w a.Wide\n",
	} {
		path := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var b strings.Builder
	if err := look(&b, dir, 2); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"     3  a/a.go Wide\n", "     4  a/a.go (*Wide).Long\n", "7 names are exported; no other package needs 2 of them\n        a.Hidden (a.go)\n        a.Unused (a.go)\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing in\n%s", want, &b)
		}
	}
	if err := look(&b, filepath.Join(dir, "a"), 2); err == nil {
		t.Error("a folder without a module is read")
	}
}
