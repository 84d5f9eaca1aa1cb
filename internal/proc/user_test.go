package proc

import (
	"context"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// demanded creates a cgroup below this process's own, or skips the test.
func demanded(t *testing.T) string {
	t.Helper()
	if cgroupPrefix() == "" {
		t.Skip("this process can make no cgroups")
	}
	path, err := os.MkdirTemp(filepath.Dir(cgroupPrefix()), "test-")
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := syscall.Rmdir(path); err != nil {
			t.Errorf("something is left in the cgroup: %v", err)
		}
	})
	return path
}

// TestUserAndCgroup: a worker begins in its own cgroup below the requested one, as the requested
// user.
func TestUserAndCgroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start processes as another user")
	}
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Skip(err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	parent := demanded(t)
	out, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	tree, err := Fork(Command{
		Path: "/bin/sh", Args: []string{"sh", "-c", "id -u; id -g; id -G; cat /proc/self/cgroup"}, Dir: "/", Env: []string{"PATH=/usr/bin:/bin"},
		Files: []uintptr{null.Fd(), out.Fd(), out.Fd()}, Cgroup: parent,
		User: &User{Name: "nobody", UID: uint32(uid), GID: 12345, Groups: []uint32{12345, 23456}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Release()
	if status, ended := tree.Wait(context.Background(), Stop{}); !ended || status != 0 {
		t.Errorf("status %v, ended %v", status, ended)
	}
	said, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	if want := u.Uid + "\n12345\n12345 23456\n"; !strings.HasPrefix(string(said), want) {
		t.Errorf("it says %q, want %q", said, want)
	}
	if !strings.Contains(string(said), "/"+filepath.Base(parent)+"/"+cgroupName) {
		t.Errorf("its cgroup is not below %s: %s", parent, said)
	}
}

// TestCgroupIsDemanded: if the requested cgroup is not available, nothing is started.
func TestCgroupIsDemanded(t *testing.T) {
	for path, want := range map[string]string{"/": "not a cgroup of version 2", "/nowhere/at/all": "no such file"} {
		tree, err := Fork(Command{Path: "/bin/true", Args: []string{"true"}, Cgroup: path})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", path, tree, err)
		}
	}
}

func TestExplain(t *testing.T) {
	dir := t.TempDir()
	closed := filepath.Join(dir, "closed")
	if err := os.Mkdir(closed, 0o711); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(closed, "program")
	if err := os.WriteFile(program, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	own, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	st := own.Sys().(*syscall.Stat_t)
	for name, tt := range map[string]struct {
		user User
		err  error
		want string
	}{
		"the owner":    {User{Name: "u", UID: st.Uid, GID: 1}, syscall.EACCES, ""},
		"another":      {User{Name: "u", UID: st.Uid + 1, GID: st.Gid + 1}, syscall.EACCES, "user u may not run " + program + ", because of the mode of /"},
		"other errors": {User{Name: "u", UID: st.Uid + 1}, syscall.ENOENT, "no such file or directory"},
	} {
		err := tt.user.Explain(tt.err, "/", program)
		if tt.want != "" && !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", name, err, tt.want)
		}
	}
	var none *User
	if err := none.Explain(syscall.EACCES, "/", program); err != syscall.EACCES {
		t.Errorf("nobody in particular: %v", err)
	}
}
