package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// event is a line of the output of go test -json (go doc test2json).
type event struct {
	Action, Package, Test, Output, ImportPath, FailedBuild string
}

// failure is a test that failed, or a package that failed outside its tests or did not build.
type failure struct {
	dir, test string
	output    string // from its start; the middle can be missing
	repeat    string // the command that repeats it
}

// outcome counts the results of tests.
type outcome struct {
	passed, failed, skipped int // tests, without subtests
	failures                []failure
	packages                int
}

func (o *outcome) add(more outcome) {
	o.passed += more.passed
	o.failed += more.failed
	o.skipped += more.skipped
	o.packages += more.packages
	o.failures = append(o.failures, more.failures...)
}

// keptOutput is the number of bytes of a failed test's output that are kept: half from its
// beginning and half from its end.
const keptOutput = 16 << 10

// tail is an output without its middle if it is long.
type tail struct {
	head, rest []byte
	left       int
}

func (t *tail) add(text string) {
	n := min(len(text), keptOutput/2-len(t.head))
	t.head = append(t.head, text[:n]...)
	t.rest = append(t.rest, text[n:]...)
	if over := len(t.rest) - keptOutput; over > 0 {
		t.left += over + keptOutput/2
		t.rest = append([]byte(nil), t.rest[over+keptOutput/2:]...)
	}
}

func (t *tail) String() string {
	if t.left == 0 {
		return string(t.head) + string(t.rest)
	}
	return fmt.Sprintf("%s\n… %d bytes are left out …\n%s", t.head, t.left, t.rest)
}

// suite is one run of go test.
type suite struct {
	kind    kind
	args    []string // of go test, without packages
	env     []string // added to the environment
	dirs    []string // of the packages
	process int      // how many packages are compiled and tested at a time
}

// run runs the tests, prints a line for each package, and returns the results. The error is not nil
// if go test itself could not run.
func (s suite) run(ctx context.Context, out *printer, under string) (outcome, error) {
	if len(s.dirs) == 0 {
		return outcome{}, nil
	}
	args := slices.Concat([]string{"test", "-json", "-vet=off", "-count=1", "-timeout=20m", fmt.Sprintf("-p=%d", s.process),
		"-exec=" + under + " " + string(s.kind)}, s.args)
	for _, dir := range s.dirs {
		args = append(args, "./"+dir)
	}
	cmd := command(ctx, "go", args...)
	cmd.Env = append(os.Environ(), s.env...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return outcome{}, err
	}
	var stderr tail
	cmd.Stderr = writer(func(text []byte) { stderr.add(string(text)) })
	if err := cmd.Start(); err != nil {
		return outcome{}, err
	}
	d := digest{suite: s, out: out, outputs: map[[2]string]*tail{}, builds: map[string]*tail{}}
	readErr := d.read(stdout)
	if err := cmd.Wait(); err != nil && d.failed == 0 && len(d.failures) == 0 {
		return d.outcome, fmt.Errorf("go test: %w\n%s", err, stderr.String())
	}
	return d.outcome, readErr
}

type writer func([]byte)

func (w writer) Write(text []byte) (int, error) { w(text); return len(text), nil }

// command returns a command that gets SIGTERM, together with all processes that it started, when
// ctx ends.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	return cmd
}

// digest collects the events of a run of go test.
type digest struct {
	suite   suite
	out     *printer
	outputs map[[2]string]*tail // by package and test
	builds  map[string]*tail    // of packages that are not built, by import path
	outcome
}

func (d *digest) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		text, err := lines.ReadBytes('\n')
		if len(text) > 0 {
			var e event
			if bad := json.Unmarshal(text, &e); bad != nil {
				return fmt.Errorf("go test -json wrote %q: %w", text, bad)
			}
			d.take(e)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (d *digest) take(e event) {
	dir := strings.TrimPrefix(strings.TrimPrefix(e.Package, module), "/")
	if dir == "" {
		dir = "."
	}
	key := [2]string{e.Package, e.Test}
	top, _, isSub := strings.Cut(e.Test, "/")
	switch e.Action {
	case "build-output":
		if d.builds[e.ImportPath] == nil {
			d.builds[e.ImportPath] = &tail{}
		}
		d.builds[e.ImportPath].add(e.Output)
	case "output":
		if strings.HasPrefix(e.Output, "=== ") {
			return
		}
		d.add(key, e.Output)
	case "pass", "skip", "fail":
		if e.Test == "" {
			d.ended(dir, e)
			return
		}
		if isSub {
			if e.Action == "fail" { // its output is printed with that of the test
				d.add([2]string{e.Package, top}, d.output(key))
			}
			delete(d.outputs, key)
			return
		}
		switch e.Action {
		case "pass":
			d.passed++
		case "skip":
			d.skipped++
		case "fail":
			d.failed++
			d.failures = append(d.failures, failure{dir, top, d.output(key), d.suite.repeat(dir, top)})
		}
		delete(d.outputs, key)
	}
}

func (d *digest) add(key [2]string, output string) {
	if d.outputs[key] == nil {
		d.outputs[key] = &tail{}
	}
	d.outputs[key].add(output)
}

func (d *digest) output(key [2]string) string {
	if t := d.outputs[key]; t != nil {
		return t.String()
	}
	return ""
}

// ended handles the end of a package.
func (d *digest) ended(dir string, e event) {
	d.packages++
	key := [2]string{e.Package, ""}
	if e.Action == "fail" && !slices.ContainsFunc(d.failures, func(f failure) bool { return f.dir == dir }) {
		text := d.output(key)
		if e.FailedBuild != "" && d.builds[e.FailedBuild] != nil {
			text = d.builds[e.FailedBuild].String()
		}
		// The output of a test that was running when the process ended belongs to no failed test.
		for other, t := range d.outputs {
			if other[0] == e.Package && other[1] != "" {
				text += t.String()
			}
		}
		d.failed++
		d.failures = append(d.failures, failure{dir, "", text, d.suite.repeat(dir, "")})
	}
	verdict := map[string]string{"pass": "ok", "skip": "no tests", "fail": "FAIL"}[e.Action]
	d.out.line("%-8s %s (%s)", verdict, dir, d.suite.kind)
	for k := range d.outputs {
		if k[0] == e.Package {
			delete(d.outputs, k)
		}
	}
}

// repeat returns the command that repeats a test.
func (s suite) repeat(dir, test string) string {
	words := append(slices.Clone(s.env), "go", "test", "-count=1")
	words = append(words, s.args...)
	if test != "" {
		words = append(words, "-run", "'^"+test+"$'")
	}
	return strings.Join(append(words, "./"+dir), " ")
}

// printer prints lines for several goroutines.
type printer struct {
	mu sync.Mutex
	w  io.Writer
}

func (p *printer) line(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.w, format+"\n", args...)
}

// failures prints a block for each failure: what failed, its output, and the command that repeats
// it.
func (p *printer) failures(all []failure) {
	for _, f := range all {
		what := f.dir
		if f.test != "" {
			what += " " + f.test
		}
		p.line("\n== FAILED: %s\n%s\nto repeat it:\n    %s", what, strings.TrimRight(f.output, "\n"), f.repeat)
	}
}

// packages returns the folders of this module's packages that have tests, compiled with the build
// tag tags if it is not "".
func packages(ctx context.Context, tags string) (dirs []string, err error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-tags", tags, "-f",
		"{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}}{{end}}", "./...").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	root, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	for dir := range strings.Lines(string(out)) {
		rel, err := filepath.Rel(root, strings.TrimSpace(dir))
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, rel)
	}
	return dirs, nil
}

// module is the path of this module.
const module = "github.com/hvdrun/hvdrun"
