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
	root, kept, err := folders()
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(kept, 0o777), os.MkdirAll(dir, 0o777)); err != nil {
		return fmt.Errorf("sandbox: %w", err)
	}
	// One process at a time builds: a program's file is complete when it is linked.
	lock, err := os.OpenFile(filepath.Join(kept, ".lock"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return fmt.Errorf("sandbox: %w", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("sandbox: locking %s: %w", lock.Name(), err)
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

// folders returns the root of this module and the folder that keeps its programs.
func folders() (root, kept string, err error) {
	mod, err1 := goEnv("GOMOD")
	cache, err2 := goEnv("GOCACHE")
	root = filepath.Dir(mod)
	name := fmt.Sprintf("%x", sha256.Sum256([]byte(root)))[:16]
	return root, filepath.Join(cache, "hvdrun-programs", name), errors.Join(err1, err2)
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
