package launch_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/launch"
)

// TestPlantedOutput: in a folder in which others can create files, hvdrun does not follow a link in
// place of a rank's file, and still writes the rest of the job's output.
func TestPlantedOutput(t *testing.T) {
	dir, victim := t.TempDir(), filepath.Join(t.TempDir(), "victim")
	rank := filepath.Join(dir, "rank.0")
	if err := errors.Join(os.WriteFile(victim, []byte("precious"), 0o600), os.Mkdir(rank, 0o777),
		os.Symlink(victim, filepath.Join(rank, "stdout"))); err != nil {
		t.Fatal(err)
	}
	var out sink
	o := &launch.Output{Stdout: &out, Dir: dir}
	stdout, stderr := o.Worker(always(0))
	write(t, stdout, "a\n")
	write(t, stderr, "b\n")
	if err := o.Close(); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("a link in place of stdout: %v", err)
	}
	if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
		t.Errorf("what the link names holds %q, %v", text, err)
	}
	if text, err := os.ReadFile(filepath.Join(rank, "stderr")); err != nil || string(text) != "[0]<stderr>:b\n" || out.text() != "[0]<stdout>:a\n" {
		t.Errorf("%q, %q, %v", text, out.text(), err)
	}
}

// TestLinkedOutput: the folder of the output, and that of a rank, can be links of this user, for
// example to another disk, but not links of other users.
func TestLinkedOutput(t *testing.T) {
	dir, disk := filepath.Join(t.TempDir(), "logs"), t.TempDir()
	if err := errors.Join(os.Symlink(disk, dir), os.Mkdir(filepath.Join(disk, "elsewhere"), 0o700),
		os.Symlink("elsewhere", filepath.Join(disk, "rank.1"))); err != nil {
		t.Fatal(err)
	}
	say := func(rank int) error {
		o := &launch.Output{Dir: dir}
		stdout, _ := o.Worker(always(rank))
		write(t, stdout, "a\n")
		return o.Close()
	}
	for rank, path := range []string{"rank.0/stdout", "elsewhere/stdout"} {
		if err := say(rank); err != nil {
			t.Error(err)
		}
		if text, err := os.ReadFile(filepath.Join(disk, path)); err != nil || len(text) == 0 {
			t.Errorf("%s: %q, %v", path, text, err)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("only root may give links to another user")
	}
	if err := os.Lchown(filepath.Join(disk, "rank.1"), 65534, -1); err != nil {
		t.Fatal(err)
	}
	if err := say(1); err == nil || !strings.Contains(err.Error(), "symbolic link of user 65534") {
		t.Errorf("a link of another user in place of a folder: %v", err)
	}
	path := filepath.Join(disk, "rank.0", "stdout")
	if err := os.Chown(path, 65534, -1); err != nil {
		t.Fatal(err)
	}
	if err := say(0); err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
		t.Errorf("a file of another user: %v", err)
	}
}

func TestOutputModes(t *testing.T) {
	for _, umask := range []int{0, 0o077} {
		old := syscall.Umask(umask)
		for shared, want := range map[bool][2]os.FileMode{false: {0o700, 0o600}, true: {0o755, 0o644}} {
			o := &launch.Output{Dir: filepath.Join(t.TempDir(), "logs"), Shared: shared}
			stdout, _ := o.Worker(always(0))
			write(t, stdout, "a\n")
			if err := o.Close(); err != nil {
				t.Fatal(err)
			}
			rank := filepath.Join(o.Dir, "rank.0")
			for path, want := range map[string]os.FileMode{o.Dir: want[0], rank: want[0], filepath.Join(rank, "stdout"): want[1]} {
				if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != want {
					t.Errorf("umask %#o, shared %v: %s has mode %v, want %v, %v", umask, shared, path, fi.Mode().Perm(), want, err)
				}
			}
		}
		syscall.Umask(old)
	}
}
