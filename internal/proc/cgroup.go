package proc

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/retry"
)

// cgroupName begins the names of all cgroups that this package creates.
const cgroupName = "hvdrun-"

// cgroupLooks is the backoff between checks whether a cgroup is empty.
var cgroupLooks = retry.Backoff{First: time.Millisecond, Most: 10 * time.Millisecond}

// noCgroups is set once a worker could not be started in a cgroup: later workers get none.
var noCgroups atomic.Bool

// cgroup is a control group (version 2, without a controller) that holds a worker and every process
// that it starts, whatever their session, parent and environment. A nil cgroup holds no process.
type cgroup struct {
	path string
	dir  *os.File
}

// cgroupPrefix returns the prefix of the paths of this process's cgroups, or "" if it cannot create
// any. It removes what ended processes have left behind.
var cgroupPrefix = sync.OnceValue(func() string {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return ""
	}
	parent := cgroupDir(string(own), string(mounts))
	if parent == "" {
		return ""
	}
	sweepCgroups(parent, time.Now().Add(-time.Minute))
	prefix := filepath.Join(parent, cgroupName+rand.Text())
	if err := os.Mkdir(prefix, 0o755); err != nil {
		return ""
	}
	defer os.Remove(prefix)
	if err := unix.Access(filepath.Join(prefix, "cgroup.kill"), unix.W_OK); err != nil {
		return "" // Linux before 5.14
	}
	return prefix + "-"
})

// cgroupDir returns the folder of a process's own cgroup, from the text of /proc/PID/cgroup and of
// /proc/PID/mountinfo. It returns "" if no hierarchy of version 2 with that cgroup is mounted.
func cgroupDir(own, mounts string) string {
	path := ""
	for line := range strings.Lines(own) {
		if p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			path = p
		}
	}
	return mountedAt(path, mounts, func(kind, _ string) bool { return kind == "cgroup2" })
}

// mountedAt returns the folder of the cgroup with a path in its hierarchy, on the first mount that
// the function accepts. It returns "" if the cgroup is not mounted here or is outside this
// process's namespace.
func mountedAt(path, mounts string, is func(kind, options string) bool) string {
	if !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "/..") {
		return ""
	}
	for line := range strings.Lines(mounts) {
		before, after, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		fields := strings.Split(before, " ") // not Fields: mountinfo escapes only some white space
		about := strings.Split(after, " ")
		if len(fields) < 5 || len(about) < 3 || !is(about[0], about[2]) {
			continue
		}
		root, point := fields[3], unescape.Replace(fields[4])
		if below, err := filepath.Rel(root, path); err == nil && filepath.IsLocal(below) {
			return filepath.Join(point, below)
		}
	}
	return ""
}

// unescape decodes the escapes of mountinfo.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// sweepCgroups removes the cgroups without processes that were created before the given time.
func sweepCgroups(parent string, then time.Time) {
	for _, path := range cgroupsIn(parent) {
		if fi, err := os.Stat(path); err == nil && fi.ModTime().Before(then) && !(&cgroup{path: path}).populated() {
			removeCgroup(path)
		}
	}
}

// removeCgroup removes a cgroup without processes. Where the worker was itself a launcher that was
// killed, the cgroups of its workers are below it: they are removed first.
func removeCgroup(path string) {
	for _, below := range cgroupsIn(path) {
		removeCgroup(below)
	}
	_ = unix.Rmdir(path)
}

func cgroupsIn(folder string) []string {
	paths, _ := filepath.Glob(filepath.Join(folder, cgroupName+"*")) // the pattern is well-formed
	return paths
}

// newCgroup creates the cgroup of a worker that is to be started. It returns nil if none can be
// created and Command.Cgroup demands none.
func (c Command) newCgroup() (*cgroup, error) {
	if c.Cgroup != "" {
		prefix, err := CgroupsBelow(c.Cgroup)
		if err != nil {
			return nil, err
		}
		return makeCgroup(prefix)
	}
	prefix := cgroupPrefix()
	if prefix == "" || noCgroups.Load() {
		return nil, nil
	}
	g, _ := makeCgroup(prefix) // nil: the worker runs without one
	return g, nil
}

func makeCgroup(prefix string) (*cgroup, error) {
	g := &cgroup{path: prefix + rand.Text()}
	if err := os.Mkdir(g.path, 0o755); err != nil {
		return nil, fmt.Errorf("the worker's cgroup: %w", err)
	}
	dir, err := os.Open(g.path)
	if err != nil {
		_ = unix.Rmdir(g.path)
		return nil, fmt.Errorf("the worker's cgroup: %w", err)
	}
	g.dir = dir
	return g, nil
}

// ownCgroups is part of the names of all cgroups that this process creates below given folders.
var ownCgroups = sync.OnceValue(rand.Text)

// CgroupsBelow returns the prefix of the paths of the cgroups that this process creates below a
// folder, or the reason why it cannot create any. It removes what ended processes have left behind
// there.
func CgroupsBelow(folder string) (prefix string, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(folder, &fs); err != nil {
		return "", &os.PathError{Op: "cgroup", Path: folder, Err: err}
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return "", fmt.Errorf("%s is not a cgroup of version 2", folder)
	}
	if err := unix.Access(folder, unix.W_OK); err != nil {
		return "", &os.PathError{Op: "cgroup", Path: folder, Err: err}
	}
	sweepCgroups(folder, time.Now().Add(-time.Minute))
	return filepath.Join(folder, cgroupName+ownCgroups()) + "-", nil
}

// enter makes a process that is to be started begin in the cgroup.
func (g *cgroup) enter(attr *syscall.SysProcAttr) {
	if g != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, int(g.dir.Fd())
	}
}

// kill sends SIGKILL to all processes of the cgroup and to those that they start meanwhile. It does
// not block.
func (g *cgroup) kill() error {
	if g == nil {
		return errors.ErrUnsupported
	}
	return os.WriteFile(filepath.Join(g.path, "cgroup.kill"), []byte("1"), 0)
}

// populated returns whether there is a process in the cgroup.
func (g *cgroup) populated() bool {
	if g == nil {
		return false
	}
	events, err := os.ReadFile(filepath.Join(g.path, "cgroup.events"))
	return err == nil && bytes.Contains(events, []byte("populated 1"))
}

// empty kills all processes of the cgroup, and blocks until they have ended, or for killBound.
func (g *cgroup) empty() {
	if !g.populated() || g.kill() != nil {
		return
	}
	deadline := time.Now().Add(killBound)
	for looks := 1; g.populated() && time.Now().Before(deadline); looks++ {
		time.Sleep(cgroupLooks.After(looks))
	}
}

// remove removes the cgroup if it holds no process. It must be the last call.
func (g *cgroup) remove() {
	if g == nil {
		return
	}
	_ = g.dir.Close()
	removeCgroup(g.path) // a later process of hvdrun sweeps what remains
}
