package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/hvdrun/hvdrun/test/follow"
)

// place is the set of resources of the machine, other than processes, that a case uses. They are
// released at its end.
type place struct{ undo []func() error }

// close releases all resources in reverse order.
func (p *place) close() error {
	var errs []error
	for i := len(p.undo) - 1; i >= 0; i-- {
		errs = append(errs, p.undo[i]())
	}
	p.undo = nil
	return errors.Join(errs...)
}

// disk is a small file system for a case.
type disk struct{ path string }

// disk mounts a file system of this number of bytes on a directory, which it creates. On release
// its files are copied to a directory beside it if keep returns true.
func (p *place) disk(path string, bytes int64, keep func() bool) (*disk, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	if err := syscall.Mount("hvdrun-prove", path, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", bytes)); err != nil {
		return nil, fmt.Errorf("mount a tmpfs on %s: %w", path, err)
	}
	d := &disk{path}
	p.undo = append(p.undo, func() error {
		var err error
		d.free()
		if keep() {
			out, cerr := exec.Command("cp", "-a", path, path+".kept").CombinedOutput()
			if cerr != nil {
				err = fmt.Errorf("keep %s: %w: %s", path, cerr, out)
			}
		}
		return errors.Join(err, syscall.Unmount(path, syscall.MNT_DETACH))
	})
	return d, nil
}

const filler = "filler"

// fill uses up all free space.
func (d *disk) fill() error {
	f, err := os.OpenFile(filepath.Join(d.path, filler), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for n := 1 << 20; n > 0; {
		if _, err := f.Write(make([]byte, n)); errors.Is(err, syscall.ENOSPC) {
			n /= 2
		} else if err != nil {
			return err
		}
	}
	return nil
}

// free frees the space again.
func (d *disk) free() { _ = os.Remove(filepath.Join(d.path, filler)) } // it may not exist

// The directories of the controllers of cgroup version 1.
const (
	memoryCgroups  = "/sys/fs/cgroup/memory"
	freezerCgroups = "/sys/fs/cgroup/freezer"
)

// cgroup creates a cgroup of a controller and returns its directory.
func (p *place) cgroup(controller, name string, settings map[string]string) (string, error) {
	path := filepath.Join(controller, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		return "", err
	}
	p.undo = append(p.undo, func() error {
		// Killed processes leave the cgroup only after a moment.
		var err error
		follow.Poll(func() bool {
			if err = os.Remove(path); errors.Is(err, os.ErrNotExist) {
				err = nil
			}
			return err == nil
		})
		return err
	})
	for file, value := range settings {
		if err := os.WriteFile(filepath.Join(path, file), []byte(value), 0); err != nil {
			return "", err
		}
	}
	return path, nil
}

// freeze moves processes into a frozen cgroup, in which no signal reaches them, not even SIGKILL,
// until release or thaw.
func (p *place) freeze(name string, pids ...int) (thaw func() error, err error) {
	path, err := p.cgroup(freezerCgroups, name, nil)
	if err != nil {
		return nil, err
	}
	thaw = func() error { return os.WriteFile(filepath.Join(path, "freezer.state"), []byte("THAWED"), 0) }
	p.undo = append(p.undo, thaw)
	for _, pid := range pids {
		if err := os.WriteFile(filepath.Join(path, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
			return nil, err
		}
	}
	return thaw, os.WriteFile(filepath.Join(path, "freezer.state"), []byte("FROZEN"), 0)
}

// network is a set of hosts in network namespaces, connected by a bridge in its own namespace.
type network struct {
	*place
	prefix string
	hosts  []string
}

func (p *place) network() (*network, error) {
	n := &network{place: p, prefix: fmt.Sprintf("prove%d", os.Getpid())}
	if err := n.space("hub"); err != nil {
		return nil, err
	}
	return n, errors.Join(ip("-n", n.name("hub"), "link", "add", "bridge0", "type", "bridge"),
		ip("-n", n.name("hub"), "link", "set", "bridge0", "up"))
}

func (n *network) name(host string) string { return n.prefix + host }

func (n *network) space(host string) error {
	if err := ip("netns", "add", n.name(host)); err != nil {
		return err
	}
	n.undo = append(n.undo, func() error { return ip("netns", "del", n.name(host)) })
	return nil
}

// add creates a host and returns its address.
func (n *network) add(host string) (string, error) {
	if err := n.space(host); err != nil {
		return "", err
	}
	n.hosts = append(n.hosts, host)
	addr, space, hub := fmt.Sprintf("10.78.0.%d", len(n.hosts)), n.name(host), n.name("hub")
	return addr, errors.Join(
		ip("-n", space, "link", "set", "lo", "up"),
		ip("-n", hub, "link", "add", "to-"+host, "type", "veth", "peer", "name", "eth0", "netns", space),
		ip("-n", hub, "link", "set", "to-"+host, "master", "bridge0", "up"),
		ip("-n", space, "addr", "add", addr+"/24", "dev", "eth0"),
		ip("-n", space, "link", "set", "eth0", "up"))
}

// cable disconnects a host's link ("down") or connects it ("up").
func (n *network) cable(host, state string) error {
	return ip("-n", n.name("hub"), "link", "set", "to-"+host, state)
}

// on returns the words that run a command on the host, before the command.
func (n *network) on(host string) []string { return []string{"ip", "netns", "exec", n.name(host)} }

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// can tells which cases this machine supports.
type can struct{ root, spaces, killer, freezer bool }

func look() can {
	exists := func(path string) bool { _, err := os.Stat(path); return err == nil }
	c := can{root: os.Geteuid() == 0}
	if c.root {
		_, err := exec.LookPath("ip")
		c.spaces = err == nil && exec.Command("unshare", "--net", "true").Run() == nil
		c.killer = exists(filepath.Join(memoryCgroups, "memory.limit_in_bytes"))
		c.freezer = exists(filepath.Join(freezerCgroups, "tasks"))
	}
	return c
}
