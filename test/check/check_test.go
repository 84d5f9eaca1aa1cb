package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseBudget(t *testing.T) {
	b, err := parseBudget("# comment\n* 4 plain\ntest/e2e 80 plain # jobs\ncollective 9.5 race\n")
	if err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]line{"plan": {"plan", 4, plain, nil}, "test/e2e": {"test/e2e", 80, plain, nil}, "collective": {"collective", 9.5, race, nil}} {
		if got := b.of(dir); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", dir, got, want)
		}
	}
	byKind, err := b.split([]string{"plan", "collective"})
	if err == nil || !strings.Contains(err.Error(), "test/e2e is no package") {
		t.Errorf("a line without a package: %v", err)
	}
	if !slices.Equal(byKind[plain], []string{"plan"}) || !slices.Equal(byKind[race], []string{"collective"}) {
		t.Errorf("%v", byKind)
	}
	for text, want := range map[string]string{
		"":                              "no line for *",
		"* 4 plain\na 3":                "budget.txt:2: ",
		"* 4 plain\na b race":           "no number",
		"* NaN plain":                   "no number",
		"* 4 plain\na 3 fast":           `no kind "fast"`,
		"* 4 plain\n* 5 race":           "a second line for *",
		"* 4 plain\na 1 race\na 2 race": "a second line for a",
		"* 4 plain\n\tTestA":            "budget.txt:2: tests that run plain",
		"a 4 plain\n TestA":             "budget.txt:2: tests that run plain",
	} {
		if _, err := parseBudget(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// TestExceeded: a package exceeds its budget if it takes more than its line and a larger share of
// it than others do of theirs. If all packages take more on a machine, none exceeds it.
func TestExceeded(t *testing.T) {
	b, err := parseBudget("* 4 plain\na 10 race\nb 10 plain\nc 100 plain\n")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		a, b, c, plan float64
		want          []string
	}{
		"nothing":                       {5, 5, 50, 2, nil},
		"a line":                        {10.1, 5, 50, 2, []string{"a took 10.1 s"}},
		"no line":                       {5, 5, 50, 4.1, []string{"plan took 4.1 s"}},
		"a slow machine":                {20, 20, 200, 8, nil},
		"slow on a slow machine":        {50, 20, 200, 8, []string{"a took 50.0 s"}},
		"fast machine, expensive share": {9, 1, 10, 0.4, nil}, // within its line
	} {
		over := b.exceeded([]usage{{Dir: "a", Seconds: c.a}, {Dir: "b", Seconds: c.b}, {Dir: "c", Seconds: c.c}, {Dir: "plan", Seconds: c.plan}})
		if !slices.EqualFunc(over, c.want, strings.HasPrefix) {
			t.Errorf("%s: %q, want %q", name, over, c.want)
		}
	}
	if over := b.exceeded([]usage{{Dir: "plan", Seconds: 4.1}}); len(over) != 1 {
		t.Errorf("without another package to compare with: %q", over)
	}
}

// TestDivided: if the budget lists some tests of a package as plain, the package runs once with
// these tests only and once with the others.
func TestDivided(t *testing.T) {
	b, err := parseBudget("* 4 plain\na 9 race\n\tTestTCP TestHosts # compute\n  TestSparse\nb 10 race\n")
	if err != nil {
		t.Fatal(err)
	}
	byKind, err := b.split([]string{"a", "b", "c"})
	if err != nil || !slices.Equal(byKind[plain], []string{"a", "c"}) || !slices.Equal(byKind[race], []string{"b", "a"}) {
		t.Errorf("%v, %v; the highest limit is to be first", byKind, err)
	}
	these := "^(TestTCP|TestHosts|TestSparse)$"
	for k, want := range map[kind]string{plain: "-test.run=" + these, race: "-test.skip=" + these} {
		if got := b.of("a").flags(k); !slices.Equal(got, []string{want}) {
			t.Errorf("%s: %q, want %s", k, got, want)
		}
	}
	for _, pkg := range []string{"b", "c"} {
		if got := b.of(pkg).flags(b.of(pkg).kind); len(got) > 0 {
			t.Errorf("%s: %q", pkg, got)
		}
	}
	file := filepath.Join(t.TempDir(), "usage")
	for range 2 {
		if err := record(file, usage{Dir: "/module/a", Seconds: 5, Wall: 1}); err != nil {
			t.Fatal(err)
		}
	}
	all, err := readUsage(file, "/module")
	if err != nil || len(all) != 1 || all[0].Seconds != 10 || all[0].Wall != 2 {
		t.Errorf("two runs of 5 s are %+v, %v", all, err)
	}
}

// TestBudget: the table in the repository can be parsed, and the tests that it names exist.
func TestBudget(t *testing.T) {
	b, err := parseBudget(budgetText)
	if err != nil {
		t.Fatal(err)
	}
	for dir, l := range b.lines {
		var sources strings.Builder
		files, err := filepath.Glob(filepath.Join("..", "..", dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			sources.Write(text)
		}
		for _, test := range l.plain {
			if !strings.Contains(sources.String(), "func "+test+"(t *testing.T)") {
				t.Errorf("%s has no test %s", dir, test)
			}
		}
	}
	flags, err := chosen(race) // of this package
	if err != nil || len(flags) > 0 {
		t.Errorf("%q, %v", flags, err)
	}
}

func digested(t *testing.T, text string) (outcome, string) {
	t.Helper()
	var printed strings.Builder
	s := suite{kind: race, args: []string{"-race"}, env: []string{"A=b"}}
	d := digest{suite: s, out: &printer{w: &printed}, outputs: map[[2]string]*tail{}, builds: map[string]*tail{}}
	if err := d.read(strings.NewReader(text)); err != nil {
		t.Fatal(err)
	}
	d.out.failures(d.failures)
	return d.outcome, printed.String()
}

func TestDigest(t *testing.T) {
	const events = `{"Action":"run","Package":"github.com/hvdrun/hvdrun/plan","Test":"TestA"}
{"Action":"output","Package":"github.com/hvdrun/hvdrun/plan","Test":"TestA","Output":"=== RUN   TestA\n"}
{"Action":"output","Package":"github.com/hvdrun/hvdrun/plan","Test":"TestA/sub","Output":"plan_test.go:7: wrong\n"}
{"Action":"fail","Package":"github.com/hvdrun/hvdrun/plan","Test":"TestA/sub"}
{"Action":"fail","Package":"github.com/hvdrun/hvdrun/plan","Test":"TestA"}
{"Action":"pass","Package":"github.com/hvdrun/hvdrun/plan","Test":"TestB"}
{"Action":"skip","Package":"github.com/hvdrun/hvdrun/plan","Test":"TestC"}
{"Action":"fail","Package":"github.com/hvdrun/hvdrun/plan"}
{"Action":"output","Package":"github.com/hvdrun/hvdrun/notify","Test":"TestHangs","Output":"panic: test timed out\n"}
{"Action":"fail","Package":"github.com/hvdrun/hvdrun/notify"}
{"ImportPath":"github.com/hvdrun/hvdrun/driver","Action":"build-output","Output":"driver.go:3: undefined: x\n"}
{"Action":"fail","Package":"github.com/hvdrun/hvdrun/driver","FailedBuild":"github.com/hvdrun/hvdrun/driver"}
{"Action":"pass","Package":"github.com/hvdrun/hvdrun"}
`
	o, text := digested(t, events)
	if o.passed != 1 || o.failed != 3 || o.skipped != 1 || o.packages != 4 {
		t.Errorf("%+v", o)
	}
	for _, want := range []string{
		"ok       . (race)\n", "FAIL     plan (race)\n",
		"== FAILED: plan TestA\nplan_test.go:7: wrong\nto repeat it:\n    A=b go test -count=1 -race -run '^TestA$' ./plan\n",
		"== FAILED: notify\npanic: test timed out\nto repeat it:\n    A=b go test -count=1 -race ./notify\n",
		"== FAILED: driver\ndriver.go:3: undefined: x\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("printed\n%s\nwithout\n%s", text, want)
		}
	}
}

func TestTail(t *testing.T) {
	var short, long tail
	short.add("all")
	if short.String() != "all" {
		t.Errorf("%q", short.String())
	}
	for range 10000 {
		long.add("line of ten\n")
	}
	long.add("the end")
	if text := long.String(); len(text) > 2*keptOutput || !strings.HasPrefix(text, "line of ten") ||
		!strings.HasSuffix(text, "the end") || !strings.Contains(text, " bytes are left out") {
		t.Errorf("%d bytes: %.40q … %q", len(text), text, text[len(text)-40:])
	}
}

// TestUnder: the processor time of grandchildren counts, and a process that is left behind is
// killed and named. The command under test runs in another process, because it waits for all of its
// children.
func TestUnder(t *testing.T) {
	if grace, err := time.ParseDuration(os.Getenv("CHECK_UNDER")); err == nil {
		os.Exit(under(os.Args[len(os.Args)-2], []string{"sh", "-c", os.Args[len(os.Args)-1]}, grace))
	}
	for name, c := range map[string]struct {
		script string
		code   int
		says   string
		least  float64
		grace  string
	}{
		"well":   {"exit 0", 0, "", 0, "1h"},
		"fails":  {"exit 3", 3, "", 0, "1h"},
		"killed": {"kill -9 $$", 1, "ended by signal killed", 0, "1h"},
		"works":  {"(setsid sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done' &)", 0, "", 0.02, "1h"},
		"left":   {"trap '' TERM; (setsid sleep 1000 &)", 1, "left behind:\n\t", 0, "0s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "usage")
			cmd := exec.Command(os.Args[0], "-test.run=^TestUnder$", "--", file, c.script)
			cmd.Env = append(os.Environ(), "CHECK_UNDER="+c.grace)
			pipe, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(pipe)
			if err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // its exit status is compared
			if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(text), c.says) {
				t.Errorf("exit status %d, want %d:\n%s", code, c.code, text)
			}
			all, err := readUsage(file, "/")
			if err != nil || len(all) != 1 || all[0].Seconds < c.least || (name == "left") != (len(all[0].Left) == 1) {
				t.Errorf("%+v, %v", all, err)
			}
		})
	}
}

func TestChoose(t *testing.T) {
	chosen, err := choose([]string{"torch", "slurm"})
	if err != nil || len(chosen) != 2 || chosen[1].name != "slurm" {
		t.Errorf("%v, %v", chosen, err)
	}
	if _, err := choose([]string{"torhc"}); err == nil || !strings.Contains(err.Error(), `no part "torhc"`) {
		t.Error(err)
	}
}

// TestGoroutinesAreRaced: a package that starts goroutines has its own line in the table, so
// that somebody decides whether its tests run under the race detector.
func TestGoroutinesAreRaced(t *testing.T) {
	b, err := parseBudget(budgetText)
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join("..", "..")
	starts := map[string]bool{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		if err != nil || d.IsDir() {
			if err == nil && (name == "testdata" || name == "bin" || strings.HasPrefix(name, ".") && len(name) > 2) {
				return fs.SkipDir
			}
			if _, statErr := os.Stat(filepath.Join(path, "go.mod")); err == nil && statErr == nil && path != root {
				return fs.SkipDir // another module
			}
			return err
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || strings.HasSuffix(name, ".pb.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		ast.Inspect(f, func(n ast.Node) bool {
			if _, is := n.(*ast.GoStmt); is {
				starts[dir] = true
			}
			if s, is := n.(*ast.SelectorExpr); is && s.Sel.Name == "Go" {
				starts[dir] = true
			}
			return true
		})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for dir := range starts {
		tests, err := filepath.Glob(filepath.Join(root, dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		if _, has := b.lines[dir]; !has && len(tests) > 0 {
			t.Errorf("%s starts goroutines, and has no line in budget.txt that says whether its tests run under the race detector", dir)
		}
	}
}
