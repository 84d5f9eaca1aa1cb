package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m, nil)) }

const source = `package p

import "log/slog"

func f(a, b int) (int, error) {
	if x := a; x < b && b > 3 {
		a += b
		slog.Info("kept")
		g(a)
	}
	for i := 0; i != 0o600; i++ {
		b--
	}
	return a + b, h()
}

func h() error { return func() error { return g(1) }() }

func g(n int) error {
	if n == 0 {
		return nil
	}
	panic("g")
}
`

func changes(t *testing.T, source string) []*mutant {
	t.Helper()
	all, err := mutantsOf("/p/p.go", []byte(source))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestMutants: each kind of change is made where it belongs, and only there.
func TestMutants(t *testing.T) {
	var got []string
	for _, m := range changes(t, source) {
		got = append(got, m.String()+": "+m.old()+" -> "+m.new)
	}
	want := []string{
		"p.go:6 f: a condition is negated: x < b && b > 3 -> !(x < b && b > 3)",
		"p.go:6 f: && is ||: && -> ||",
		"p.go:6 f: < is <=: < -> <=",
		"p.go:6 f: > is >=: > -> >=",
		"p.go:6 f: 3 is 4: 3 -> 4",
		"p.go:6 f: 3 is 2: 3 -> 2",
		"p.go:7 f: a statement is left out: a += b -> ",
		"p.go:9 f: a statement is left out: g(a) -> ",
		"p.go:11 f: a condition is negated: i != 0o600 -> !(i != 0o600)",
		"p.go:11 f: 0 is 1: 0 -> 1",
		"p.go:11 f: 0 is -1: 0 -> -1",
		"p.go:11 f: != is ==: != -> ==",
		"p.go:12 f: a statement is left out: b-- -> ",
		"p.go:14 f: result 0 is 0: a + b -> 0",
		"p.go:14 f: result 1 is nil: h() -> nil",
		"p.go:14 f: + is -: + -> -",
		"p.go:17 h: result 0 is nil: func() error { return g(1) }() -> nil",
		"p.go:17 h: result 0 is nil: g(1) -> nil",
		"p.go:17 h: 1 is 2: 1 -> 2",
		"p.go:17 h: 1 is 0: 1 -> 0",
		"p.go:20 g: a condition is negated: n == 0 -> !(n == 0)",
		"p.go:20 g: == is !=: == -> !=",
		"p.go:20 g: 0 is 1: 0 -> 1",
		"p.go:20 g: 0 is -1: 0 -> -1",
		`p.go:23 g: a statement is left out: panic("g") -> `,
	}
	if !slices.Equal(got, want) {
		t.Errorf("\n%s", strings.Join(got, "\n"))
	}
}

// TestChoice: the same seed chooses the same changes, also when another function has changed, and
// another seed others.
func TestChoice(t *testing.T) {
	first := func(source string, seed uint64) []string {
		all := changes(t, source)
		choose(all, seed)
		var names []string
		for _, m := range all[:8] {
			_, name, _ := strings.Cut(m.String(), " ") // without the line
			names = append(names, name)
		}
		return names
	}
	one := first(source, 1)
	if more := first(strings.Replace(source, "import", "// More lines.\n\nimport", 1), 1); !slices.Equal(one, more) {
		t.Errorf("%q, then %q", one, more)
	}
	if two := first(source, 2); slices.Equal(one, two) {
		t.Errorf("seeds 1 and 2 both choose %q", one)
	}
}

func TestDiff(t *testing.T) {
	all := changes(t, source)
	want := "  --- /p/p.go:6\n  -\tif x := a; x < b && b > 3 {\n  +\tif x := a; x < b || b > 3 {\n"
	if got := all[1].diff(); got != want {
		t.Errorf("%q", got)
	}
}

// TestRun changes a module of which one function is tested: what it tests is noticed, also what
// spins and what does not compile, the rest is not, and no file is changed.
func TestRun(t *testing.T) {
	files := map[string]string{
		"go.mod": "module p\n\ngo 1.26\n",
		"p.go": "package p\n\nfunc Tested(n int) int {\n\tfor n > 9 {\n\t\tn -= 10\n\t}\n\treturn n\n}\n\n" +
			"func Untested(a, b int) int { return a + b }\n",
		"p_test.go": "package p\n\nimport \"testing\"\n\nfunc TestTested(t *testing.T) {\n\tif Tested(25) != 5 || Tested(9) != 9 {\n\t\tt.Fatal()\n\t}\n}\n",
	}
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	p, err := load(t.Context(), ".")
	if err != nil {
		t.Fatal(err)
	}
	r := &run{dir: t.TempDir(), limit: 1e12}
	s := &suite{pkg: *p}
	if err := r.calibrate(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	s.used = -1e9 // a mutant has two seconds
	got := map[string]string{}
	for _, m := range changes(t, files["p.go"]) {
		if m.file = filepath.Join(p.Dir, "p.go"); !slices.Contains([]string{"n -= 10", "+", ">"}, m.old()) {
			continue
		}
		o, err := r.try(t.Context(), m, []*suite{s})
		if err != nil || !o.compiles {
			t.Fatalf("%s: %+v, %v", m, o, err)
		}
		got[m.what], _, _ = strings.Cut(o.killer, " after")
	}
	want := map[string]string{"a statement is left out": "signal killed", "+ is -": "", "> is >=": "TestTested"}
	if !maps.Equal(got, want) {
		t.Errorf("%q", got)
	}
	broken := &mutant{file: filepath.Join(p.Dir, "p.go"), source: []byte(files["p.go"]), start: 0, end: 7, new: "nothing"}
	if o, err := r.try(t.Context(), broken, []*suite{s}); err != nil || o.compiles {
		t.Errorf("%+v, %v", o, err)
	}
	for name, text := range files {
		if now, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(now) != text {
			t.Errorf("%s: %v\n%s", name, err, now)
		}
	}
}
