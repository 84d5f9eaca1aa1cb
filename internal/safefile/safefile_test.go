package safefile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const stranger = 65534

// calls are all functions that open or create one file, by name.
var calls = map[string]func(path string) (*os.File, error){
	"append":       func(p string) (*os.File, error) { return Append(p, os.O_WRONLY, Private) },
	"append plain": func(p string) (*os.File, error) { return AppendPlain(p, os.O_WRONLY, Private) },
	"append read":  func(p string) (*os.File, error) { return Append(p, os.O_RDWR, Private) },
	"update":       func(p string) (*os.File, error) { return Update(p, Private, true) },
	"old":          func(p string) (*os.File, error) { return Update(p, Private, false) },
	"create":       func(p string) (*os.File, error) { return Create(p, Private) },
	"own":          ReadOwn,
	"rewrite":      func(p string) (*os.File, error) { return Rewrite(p, Private) },
	"secret":       request{streams: true, secret: true}.open,
}

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root may give files to another user")
	}
}

func write(t *testing.T, path, text string, mode fs.FileMode) string {
	t.Helper()
	if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
	return path
}

func mode(t *testing.T, path string) fs.FileMode {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Mode().Perm()
}

func give(t *testing.T, path string) {
	t.Helper()
	if err := os.Lchown(path, stranger, stranger); err != nil {
		t.Fatal(err)
	}
}

// refused checks that a call fails with an error that contains all of says, and has not changed the
// victim.
func refused(t *testing.T, name, path, victim string, says ...string) {
	t.Helper()
	before, _ := os.ReadFile(victim)
	f, err := calls[name](path)
	if err == nil {
		f.Close()
		t.Errorf("%s of %s has succeeded", name, path)
		return
	}
	for _, text := range says {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v; want %q", name, err, text)
		}
	}
	if after, _ := os.ReadFile(victim); string(after) != string(before) {
		t.Errorf("%s has changed %s to %q", name, victim, after)
	}
}

// TestForeignLink: no call follows a link of another user, wherever it points.
func TestForeignLink(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	victim := write(t, filepath.Join(dir, "victim"), "precious", 0o600)
	for name := range calls {
		for _, target := range []string{victim, filepath.Join(dir, "nothing"), "/dev/null", "/proc/self/fd/0"} {
			link := filepath.Join(dir, "link")
			if err := os.Symlink(target, link); err != nil {
				t.Fatal(err)
			}
			give(t, link)
			says := []string{link, "symbolic link of user 65534", "remove"}
			if name == "create" {
				says = []string{"exists"}
			}
			refused(t, name, link, victim, says...)
			if _, err := os.Lstat(filepath.Join(dir, "nothing")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s has made what a link names: %v", name, err)
			}
			if err := os.Remove(link); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestForeignFile: a file of another user is not used, although root could.
func TestForeignFile(t *testing.T) {
	needsRoot(t)
	path := write(t, filepath.Join(t.TempDir(), "file"), "theirs", 0o600)
	give(t, path)
	for name := range calls {
		says := []string{path, "belongs to user 65534", "remove it, name another"}
		if name == "create" {
			says = []string{"exists"}
		}
		refused(t, name, path, path, says...)
	}
	f, err := Read(path)
	if err != nil {
		t.Errorf("what a person has asked to see: %v", err)
	} else {
		f.Close()
	}
	if err := Replace(path, []byte("ours"), Private); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || owner(fi) != uint32(os.Geteuid()) {
		t.Errorf("what replaces it belongs to %d, %v", owner(fi), err)
	}
}

// TestOwnLink: links of this user are followed, one after the other, even to a file that does not
// exist yet.
func TestOwnLink(t *testing.T) {
	dir, disk := t.TempDir(), t.TempDir()
	for link, target := range map[string]string{
		"folder": disk, "a": "b", "b": "folder/../" + filepath.Base(disk) + "/file", "loop": "loop",
	} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{"a", "folder/file"} {
		f, err := Append(filepath.Join(dir, path), os.O_WRONLY, Private)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString(path + "\n"); err != nil {
			t.Error(err)
		}
		f.Close()
	}
	if text, err := os.ReadFile(filepath.Join(disk, "file")); err != nil || string(text) != "a\nfolder/file\n" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := Append(filepath.Join(dir, "loop"), os.O_WRONLY, Private); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("an endless link: %v", err)
	}
	for _, name := range []string{"update", "old", "append plain"} {
		refused(t, name, filepath.Join(dir, "a"), filepath.Join(disk, "file"), "symbolic link", "remove")
	}
	if _, err := Create(filepath.Join(dir, "a"), Private); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a new file in place of a link: %v", err)
	}
	// Replace replaces the link itself.
	if err := Replace(filepath.Join(dir, "a"), []byte("new"), Private); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Lstat(filepath.Join(dir, "a")); err != nil || !fi.Mode().IsRegular() {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
}

// TestKinds: only regular files are opened unless the caller permits others, and nothing blocks.
func TestKinds(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, dir, "/dev/null"} {
		for _, name := range []string{"update", "old", "own"} {
			refused(t, name, path, "", path, "name a regular file")
		}
		if _, err := Read(path); err == nil {
			t.Errorf("%s was opened for reading", path)
		}
	}
	for _, name := range []string{"append", "secret"} {
		refused(t, name, dir, "", "is a folder")
	}
	for _, path := range []string{"/dev/null", pipe} {
		f, err := Append(path, os.O_RDWR, Private)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("x"); err != nil {
			t.Error(err)
		}
		f.Close()
	}
}

// TestInherited: /dev/fd/N is what the parent process has opened, of any kind and mode.
func TestInherited(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	log := write(t, filepath.Join(t.TempDir(), "log"), "", 0o644)
	file, err := os.OpenFile(log, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, fd := range []uintptr{w.Fd(), file.Fd()} {
		f, err := Append(fdPath(fd), os.O_WRONLY, Private)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("line\n"); err != nil {
			t.Error(err)
		}
		f.Close()
	}
	if text, err := os.ReadFile(log); err != nil || string(text) != "line\n" || mode(t, log) != 0o644 {
		t.Errorf("%q, mode %#o, %v", text, mode(t, log), err)
	}
	f, err := request{streams: true, secret: true}.open(fdPath(r.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w.Close()
	if text, err := io.ReadAll(f); err != nil || string(text) != "line\n" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := (request{streams: true, secret: true}).open(fdPath(file.Fd())); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a secret that others may read: %v", err)
	}
}

func fdPath(fd uintptr) string { return fmt.Sprint("/dev/fd/", fd) }

// TestModes: new files, and existing ones of this user, get the requested mode.
func TestModes(t *testing.T) {
	dir := t.TempDir()
	for _, umask := range []int{0, 0o022, 0o077, 0o277} {
		old := syscall.Umask(umask)
		for _, want := range []fs.FileMode{Private, Shared} {
			base := filepath.Join(dir, "made", want.String())
			if err := MakeDir(base, want); err != nil {
				t.Error(err)
			}
			for name, call := range map[string]func(string) (*os.File, error){
				"append": func(p string) (*os.File, error) { return Append(p, os.O_WRONLY, want) },
				"update": func(p string) (*os.File, error) { return Update(p, want, true) },
				"create": func(p string) (*os.File, error) { return Create(p, want) },
				"replace": func(p string) (*os.File, error) {
					if err := Replace(p, []byte("x"), want); err != nil {
						return nil, err
					}
					return os.Open(p)
				},
				"old": func(p string) (*os.File, error) {
					write(t, p, "", 0o666)
					return Append(p, os.O_RDWR, want)
				},
			} {
				path := filepath.Join(base, name)
				f, err := call(path)
				if err != nil {
					t.Errorf("umask %#o, %s: %v", umask, name, err)
					continue
				}
				f.Close()
				if got := mode(t, path); got != want {
					t.Errorf("umask %#o: %s made a file of mode %#o, want %#o", umask, name, got, want)
				}
			}
			if got := mode(t, base); got != map[fs.FileMode]fs.FileMode{Private: 0o700, Shared: 0o755}[want] {
				t.Errorf("umask %#o: a folder of mode %#o for files of mode %#o", umask, got, want)
			}
		}
		syscall.Umask(old)
		if err := os.RemoveAll(filepath.Join(dir, "made")); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReadersRefuse: files that others can write to are refused, and so are secrets that others can
// read.
func TestReadersRefuse(t *testing.T) {
	dir := t.TempDir()
	path := ""
	for i, c := range []struct {
		mode        fs.FileMode
		own, secret string // empty: accepted
	}{
		{0o600, "", ""}, {0o400, "", ""}, {0o644, "", "chmod 600"}, {0o602, "chmod go-w", "chmod 600"},
		{0o666, "chmod go-w", "chmod 600"}, {0o640, "", "chmod 600"},
	} {
		path = filepath.Join(dir, strconv.Itoa(i)) // a file of mode 0400 cannot be written again
		write(t, path, "x", c.mode)
		for name, want := range map[string]string{"own": c.own, "secret": c.secret} {
			f, err := calls[name](path)
			if err == nil {
				f.Close()
			}
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("mode %#o, %s: %v, want %q", c.mode, name, err, want)
			}
		}
	}
	if err := os.Chown(path, -1, os.Geteuid()+1); err == nil {
		write(t, path, "x", 0o660)
		refused(t, "own", path, path, "others may write")
	}
}

func TestFolders(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "open", "secret")
	if err := MakeDir(dir, Private); err != nil {
		t.Fatal(err)
	}
	if err := SecretDir(dir); err != nil {
		t.Error(err)
	}
	link := filepath.Join(base, "link")
	if err := os.Symlink("open/../open", link); err != nil {
		t.Fatal(err)
	}
	if err := SecretDir(filepath.Join(link, "secret")); err != nil {
		t.Errorf("by a link of this user: %v", err)
	}
	for _, c := range []struct {
		mode   fs.FileMode
		refuse bool
	}{{0o777, true}, {0o775, os.Getegid() != os.Geteuid()}, {0o777 | fs.ModeSticky, false}, {0o755, false}} {
		if err := os.Chmod(filepath.Join(base, "open"), c.mode); err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{dir, filepath.Join(link, "secret")} {
			if err := SecretDir(path); (err != nil) != c.refuse {
				t.Errorf("%s in a folder of mode %v: %v", path, c.mode, err)
			}
		}
		if err := PrivateDir(dir); err != nil {
			t.Errorf("in a folder of mode %v: %v", c.mode, err)
		}
	}
	if err := os.Chmod(dir, 0o710); err != nil {
		t.Fatal(err)
	}
	for _, check := range []func(string) error{PrivateDir, SecretDir} {
		if err := check(dir); err == nil || !strings.Contains(err.Error(), "chmod 700") {
			t.Errorf("a folder that others may enter: %v", err)
		}
		if err := check(write(t, filepath.Join(base, "file"), "", 0o600)); err == nil || !strings.Contains(err.Error(), "not a folder") {
			t.Error(err)
		}
	}
}

// TestForeignFolders: even root is refused folders and links of another user, and folders in them.
func TestForeignFolders(t *testing.T) {
	needsRoot(t)
	base := t.TempDir()
	theirs := filepath.Join(base, "theirs")
	inside := filepath.Join(theirs, "inside")
	if err := MakeDir(inside, Private); err != nil {
		t.Fatal(err)
	}
	give(t, theirs)
	if err := PrivateDir(theirs); err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
		t.Errorf("a folder of another user: %v", err)
	}
	if err := SecretDir(inside); err == nil || !strings.Contains(err.Error(), "could replace") {
		t.Errorf("a folder in one of another user: %v", err)
	}
	link := filepath.Join(base, "link")
	if err := os.Symlink(inside, link); err != nil {
		t.Fatal(err)
	}
	if err := SecretDir(link); err == nil {
		t.Error("a link into a folder of another user")
	}
	ours := filepath.Join(base, "ours")
	if err := errors.Join(os.Mkdir(ours, 0o700), os.Remove(link), os.Symlink(ours, link)); err != nil {
		t.Fatal(err)
	}
	if err := SecretDir(link); err != nil {
		t.Error(err)
	}
	give(t, link)
	for _, check := range []func(string) error{SecretDir, func(p string) error { return MakeDir(p, Private) }} {
		if err := check(link); err == nil || !strings.Contains(err.Error(), "symbolic link of user 65534") {
			t.Errorf("a link of another user: %v", err)
		}
	}
}

// TestSquashedOwner: on a file server that gives the files of all users to one owner, these files
// are not refused.
func TestSquashedOwner(t *testing.T) {
	needsRoot(t)
	path := write(t, filepath.Join(t.TempDir(), "file"), "", 0o666)
	give(t, path)
	local := networkName
	defer func() { networkName = local }()
	networkName = func(string) string { return "NFS" }
	if _, err := Update(path, Private, true); err == nil {
		t.Error("the server tells owners apart, and another's file was used")
	}
	probe := ownerOfNew
	defer func() { ownerOfNew = probe }()
	ownerOfNew = func(string) int { return stranger }
	f, err := Update(path, Private, true)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	networkName = local
	refused(t, "update", path, path, "belongs to user 65534")
}

func TestNetwork(t *testing.T) {
	for _, path := range []string{"/proc", "/dev/shm", "/no/such/path"} {
		if name := Network(path); name != "" {
			t.Errorf("%s is on %s", path, name)
		}
	}
}

// TestRaces: while a name changes all the time between a file and a link of another user, only the
// file is ever opened.
func TestRaces(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	victim, path := write(t, filepath.Join(dir, "victim"), "", 0o600), filepath.Join(dir, "name")
	link, plain := filepath.Join(dir, "link"), filepath.Join(dir, "plain")
	write(t, path, "", 0o600)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.Symlink(victim, link)
			_ = os.Lchown(link, stranger, stranger)
			_ = os.Rename(link, path)
			_ = os.WriteFile(plain, nil, 0o600)
			_ = os.Rename(plain, path)
		}
	}()
	for range 2000 {
		if f, err := Append(path, os.O_WRONLY, Private); err == nil {
			_, _ = f.WriteString("x")
			f.Close()
		}
	}
	close(stop)
	<-stopped
	if text, err := os.ReadFile(victim); err != nil || len(text) > 0 {
		t.Errorf("the victim holds %q, %v", text, err)
	}
}
