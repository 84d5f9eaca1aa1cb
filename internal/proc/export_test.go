package proc

import "path/filepath"

// HasCgroups returns whether each worker has a cgroup of its own here.
func HasCgroups() bool { return cgroupPrefix() != "" }

// Cgroups returns the paths of those that there are.
func Cgroups() ([]string, error) { return filepath.Glob(cgroupPrefix() + "*") }

// GuardPID returns the process id of the guard.
func GuardPID(g *Guard) int { return g.waiter.Process.Pid }

// WithoutShell has guards wait without a shell, as where there is none.
func WithoutShell() { guardShell = "/nothing" }
