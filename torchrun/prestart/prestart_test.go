package prestart

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/launch"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		command string
		want    Program
		err     string
	}{
		{"python3 a.py -x", Program{Interpreter: []string{"python3"}, Args: []string{"a.py", "-x"}}, ""},
		{"/opt/bin/python3.11 -u -O a.py", Program{Interpreter: []string{"/opt/bin/python3.11", "-u", "-O"}, Args: []string{"a.py"}}, ""},
		{"python -u -m pkg.train -m x", Program{Interpreter: []string{"python", "-u"}, Module: true, Args: []string{"pkg.train", "-m", "x"}}, ""},
		{"python3 -c pass", Program{}, "the option -c of python3 is not understood before the program"},
		{"python3 -X dev a.py", Program{}, "the option -X of python3"},
		{"python3 -m", Program{}, "the option -m of python3"},
		{"python3 -u", Program{}, "python3 has no program"},
		{"sh a.py", Program{}, "the command is not python"},
		{"", Program{}, "the command is not python"},
	} {
		got, err := Parse(strings.Fields(c.command))
		switch {
		case c.err == "" && err != nil, c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
			t.Errorf("%q: error %v, want %q", c.command, err, c.err)
		case !slices.Equal(got.Interpreter, c.want.Interpreter) || !slices.Equal(got.Args, c.want.Args) || got.Module != c.want.Module:
			t.Errorf("%q: %+v, want %+v", c.command, got, c.want)
		}
	}
}

// run runs an interpreter to its end and returns its output.
func run(t *testing.T, p Program, code string, args, env []string) string {
	t.Helper()
	i, err := New(p, code)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := i.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(i.dir); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", i.dir, err)
		}
	}()
	var out, errs bytes.Buffer
	err = launch.Local{}.Run(context.Background(), &launch.Spec{
		Command: i.Command(), Env: os.Environ(), Dir: t.TempDir(), Stdout: &out, Stderr: &errs,
	}, func(int) {
		if err := i.Run(args, env); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	return out.String()
}

// TestRun: files and modules run with exactly the given arguments and environment, whatever bytes
// they contain and however long they are.
func TestRun(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is not installed")
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "program.py")
	text := `import os, sys
print(sys.argv, sorted(os.environb), os.environb[b"BYTES"], len(os.environ["LONG"]), __name__, prestart_was_here)
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	env := []string{"BYTES=\xff\xfe=é", "LONG=" + strings.Repeat("x", 300<<10), "PYTHONPATH=" + dir, "BYTES=\xff"}
	const code = "import builtins; builtins.prestart_was_here = 1"
	got := run(t, Program{Interpreter: []string{python}, Args: []string{file}}, code, []string{file, "a b", "\xfe"}, env)
	want := `['` + file + `', 'a b', '\udcfe'] [b'BYTES', b'LONG', b'PYTHONPATH'] b'\xff' 307200 __main__ 1` + "\n"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	got = run(t, Program{Interpreter: []string{python}, Module: true}, code, []string{"json.tool", "--help"}, nil)
	if !strings.HasPrefix(got, "usage: ") {
		t.Errorf("a module printed %q", got)
	}
}
