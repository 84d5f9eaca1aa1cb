// Package sandbox isolates tests and proving grounds from the machine, from the user that runs
// them, and from each other: each gets its own folders, variables and addresses.
package sandbox

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// foreign are the prefixes of variables that change what hvdrun and its workers do. A test sets the
// ones that it tests.
var foreign = []string{"HVD_", "HOROVOD_", "PET_", "TORCHELASTIC_", "SLURM_", "PBS_", "LSB_", "OMPI_", "PMI", "OTEL_", "KUBE", "XDG_", "NCCL_", "TORCH_"}

// Enter gives this process, and what it starts, a new home folder, runtime folder and folder for
// temporary files, and removes the variables of other jobs and batch systems. Processes that it
// starts do not ignore SIGHUP, also if this one was started by nohup. Go's caches stay
// where they are. leave removes the folders. Call Enter before the first test: it changes the
// environment of the process.
func Enter() (leave func() error, err error) {
	if err := keepCaches(); err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	if signal.Ignored(syscall.SIGHUP) {
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) // a caught signal has its default action in a child
	}
	// The path must be short: the path of a unix socket has at most 107 bytes.
	outer = os.TempDir()
	dir, err := os.MkdirTemp(outer, "hvd")
	if err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		for _, prefix := range foreign {
			if strings.HasPrefix(name, prefix) {
				err = errors.Join(err, os.Unsetenv(name))
			}
		}
	}
	for name, folder := range map[string]string{"HOME": "home", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"} {
		path := filepath.Join(dir, folder)
		err = errors.Join(err, os.Mkdir(path, 0o700), os.Setenv(name, path))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("sandbox: %w", err), os.RemoveAll(dir))
	}
	return func() error { return os.RemoveAll(dir) }, nil
}

// outer is the folder for temporary files outside of the sandbox.
var outer string

// Keep moves a folder out of the sandbox, so that it remains when the sandbox is left, and returns
// its new path.
func Keep(path string) (kept string, err error) {
	dir, err := os.MkdirTemp(outer, "hvd-kept-")
	if err != nil {
		return path, fmt.Errorf("sandbox: %w", err)
	}
	kept = filepath.Join(dir, filepath.Base(path))
	if err := os.Rename(path, kept); err != nil {
		return path, fmt.Errorf("sandbox: %w", err)
	}
	return kept, nil
}

// keepCaches sets the variables of Go's caches, whose defaults depend on HOME, to their present
// folders. It skips caches without a default.
func keepCaches() error {
	cache, _ := os.UserCacheDir()
	home, _ := os.UserHomeDir()
	for _, v := range [][3]string{
		{"GOCACHE", cache, "go-build"}, {"GOPATH", home, "go"}, {"STATICCHECK_CACHE", cache, "staticcheck"},
	} {
		if os.Getenv(v[0]) == "" && v[1] != "" {
			if err := os.Setenv(v[0], filepath.Join(v[1], v[2])); err != nil {
				return err
			}
		}
	}
	return nil
}

// Run runs the tests of a package in a sandbox, and returns the exit status of the process. If
// before is not nil, it runs first: it starts and builds what the tests share, with dir as its
// folder.
func Run(m *testing.M, before func(dir string) error) int {
	leave, err := Enter()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := 1
	if before != nil {
		err = before(os.TempDir())
	}
	if err == nil {
		code = m.Run()
	}
	if err := errors.Join(err, leave()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

// Tests runs the tests of a package in a sandbox, for functions that call its Run, such as
// goleak.VerifyTestMain and testscript.Main.
type Tests struct {
	*testing.M
	Before func(dir string) error // nil: nothing
}

// Run is [Run] for these tests.
func (t Tests) Run() int { return Run(t.M, t.Before) }

// Net reserves 254 addresses of the loopback interface and returns their common prefix, such as
// "127.9.8.": no other process of this network namespace gets them until this one ends.
func Net() (string, error) {
	for n := range 1 << 16 {
		// People and other programs use the addresses below 127.16.
		n = (n + os.Getpid()*7) % (1 << 16) % (239 << 8)
		prefix := fmt.Sprintf("127.%d.%d.", 16+n>>8, n&255)
		// An abstract socket disappears with its process, and all users share its name space.
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@hvdrun-test-net-" + prefix, Net: "unix"})
		if err == nil {
			reserved = append(reserved, l)
			return prefix, nil
		}
	}
	return "", errors.New("sandbox: all networks of 127.0.0.0/8 are taken")
}

// reserved keeps the sockets of Net open.
var reserved []*net.UnixListener
