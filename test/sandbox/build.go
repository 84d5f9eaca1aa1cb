package sandbox

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"syscall"
)

// Build builds the programs of packages, which are import paths of this module, into the folder
// dir, each under the last element of its path. They are built without cgo, the race detector and
// debugging information. Programs are kept beside Go's build cache, so that the tests of several
// packages link each of them once. Build returns after the build.
func Build(dir string, packages ...string) error {
	root, kept, unlock, err := folders()
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return fmt.Errorf("sandbox: %w", err)
	}
	args := []string{"build", "-buildvcs=false", "-ldflags=-w", "-o", kept + string(filepath.Separator)}
	cmd := exec.Command("go", append(args, packages...)...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "GOFLAGS=-trimpath", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("sandbox: go %s: %w\n%s", strings.Join(cmd.Args[1:], " "), err, out)
	}
	for _, pkg := range packages {
		name := path.Base(pkg)
		if err := link(filepath.Join(kept, name), filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("sandbox: %w", err)
		}
	}
	return nil
}

// Once returns the contents of a file that make makes at a path. It calls make only where no file
// made from the same parts is kept beside Go's build cache.
func Once(parts string, make func(path string) error) ([]byte, error) {
	_, kept, unlock, err := folders()
	if err != nil {
		return nil, err
	}
	defer unlock()
	path := filepath.Join(kept, fmt.Sprintf("%x", sha256.Sum256([]byte(parts))))
	if text, err := os.ReadFile(path); err == nil {
		return text, nil
	}
	part := path + ".new" // not complete yet
	if err := make(part); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(part)
	if err := errors.Join(err, os.Rename(part, path)); err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	return text, nil
}

// folders returns the root of this module and the folder that keeps its programs, which no other
// process changes until unlock is called: a program's file is complete when it is linked.
func folders() (root, kept string, unlock func(), err error) {
	mod, err1 := goEnv("GOMOD")
	cache, err2 := goEnv("GOCACHE")
	root = filepath.Dir(mod)
	name := fmt.Sprintf("%x", sha256.Sum256([]byte(root)))[:16]
	kept = filepath.Join(cache, "hvdrun-programs", name)
	if err := errors.Join(err1, err2); err != nil {
		return "", "", nil, err
	}
	if err := os.MkdirAll(kept, 0o777); err != nil {
		return "", "", nil, fmt.Errorf("sandbox: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(kept, ".lock"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return "", "", nil, fmt.Errorf("sandbox: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", "", nil, errors.Join(fmt.Errorf("sandbox: locking %s: %w", lock.Name(), err), lock.Close())
	}
	return root, kept, func() { lock.Close() }, nil
}

func goEnv(name string) (string, error) {
	out, err := exec.Command("go", "env", name).Output()
	if value := strings.TrimSpace(string(out)); err == nil && value != "" && value != os.DevNull {
		return value, nil
	}
	return "", fmt.Errorf("sandbox: go env %s: %q, %w", name, out, errors.Join(err, errors.New("tests build programs of this module")))
}

// link makes from available as to, by a copy if the file system cannot link them.
func link(from, to string) error {
	if os.Link(from, to) == nil {
		return nil
	}
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o777)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}
