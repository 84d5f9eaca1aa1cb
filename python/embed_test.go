package python

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// python3 is the interpreter of these tests, which skip without one.
func python3(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	program, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("there is no python3")
	}
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	return cmd
}

func init() { Version = "v1.2.3" }

// TestPython runs the tests of what needs no torch.
func TestPython(t *testing.T) {
	out, err := python3(t, "-m", "unittest", "tests.test_agree", "tests.test_parts", "tests.test_worker").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// TestInstallTogether: workers that start at the same time all find the package.
func TestInstallTogether(t *testing.T) {
	for range 20 {
		base := filepath.Join(t.TempDir(), "cache")
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				dir, err := Install(base, false)
				if err != nil {
					t.Error(err)
					return
				}
				for name, want := range contents().files {
					if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, want) {
						t.Errorf("%s has %d bytes, %v", name, len(got), err)
					}
				}
			})
		}
		wg.Wait()
	}
}

// TestInstall: the package is found, a second Install keeps it, and repairs a file that has
// changed.
func TestInstall(t *testing.T) {
	base := filepath.Join(t.TempDir(), "cache")
	dir, err := Install(base, false)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "hvdrun", "torch.py")
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, whole[:100], 0o600); err != nil {
		t.Fatal(err)
	}
	if again, err := Install(base, false); err != nil || again != dir {
		t.Fatal(again, err)
	}
	if now, err := os.ReadFile(file); err != nil || string(now) != string(whole) {
		t.Errorf("the file has %d bytes, %v", len(now), err)
	}
	cmd := python3(t, "-c", "import hvdrun, hvdrun._worker; print(hvdrun.__file__, hvdrun.__version__, dir(hvdrun))")
	cmd.Dir = base // the working folder is in the path
	cmd.Env = AddPath(cmd.Env, dir)
	out, err := cmd.CombinedOutput()
	if want := filepath.Join(dir, "hvdrun", "__init__.py") + " 1.2.3 ['__version__']"; err != nil || strings.TrimSpace(string(out)) != want {
		t.Errorf("%v, %s; want %s", err, out, want)
	}
}

// TestGivesWay: a package hvdrun of the user is imported, wherever it is in the path; a folder of
// that name is not one.
func TestGivesWay(t *testing.T) {
	dir, err := Install(t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	own := t.TempDir()
	if err := os.Mkdir(filepath.Join(own, "hvdrun"), 0o700); err != nil {
		t.Fatal(err)
	}
	path := dir + ":" + own
	imported := func() string {
		cmd := python3(t, "-c", "import hvdrun; print(hvdrun.__file__)")
		cmd.Dir = t.TempDir() // the working folder is in the path
		cmd.Env = append(cmd.Env, "PYTHONPATH="+path)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return filepath.Dir(filepath.Dir(strings.TrimSpace(string(out))))
	}
	if got := imported(); got != dir {
		t.Errorf("beside an empty folder %s is imported, want %s", got, dir)
	}
	if err := os.WriteFile(filepath.Join(own, "hvdrun", "__init__.py"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := imported(); got != own {
		t.Errorf("%s is imported, want %s", got, own)
	}
}

func TestAddPath(t *testing.T) {
	for _, c := range []struct{ env, want []string }{
		{nil, []string{"PYTHONPATH=/p"}},
		{[]string{"A=1", "PYTHONPATH=/x"}, []string{"A=1", "PYTHONPATH=/x:/p"}},
		{[]string{"PYTHONPATH=/x", "A=1"}, []string{"A=1", "PYTHONPATH=/x:/p"}},
		{[]string{"PYTHONPATH="}, []string{"PYTHONPATH=/p"}},
	} {
		if got := AddPath(c.env, "/p"); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.env, got, c.want)
		}
	}
}

// TestEnviron: the package is at the end of the last PYTHONPATH, of programs that want it; if it
// cannot be installed, Python programs get a message.
func TestEnviron(t *testing.T) {
	home := t.TempDir()
	file := filepath.Join(home, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		program, home, no string
		added, told       bool
	}{
		{"true", home, "", true, false},
		{"true", home, "1", false, false},
		{"true", "", "", false, false},
		{"/usr/bin/python3", file, "", false, true},
		{"train.py", file, "", false, true},
		{"true", file, "", false, false},
	} {
		var said bytes.Buffer
		env := []string{"HOME=" + c.home, "HVD_NO_PYTHON_PATH=" + c.no, "PYTHONPATH=/x"}
		got := Environ(slices.Clone(env), c.program, false, &said)
		added := strings.HasPrefix(got[len(got)-1], "PYTHONPATH=/x:"+filepath.Join(home, ".cache", "hvdrun"))
		if added != c.added || !added && !slices.Equal(got, env) || (said.Len() > 0) != c.told {
			t.Errorf("%+v: %q, said %q", c, got, said.String())
		}
	}
}
