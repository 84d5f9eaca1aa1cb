package proc

import "path/filepath"

// HasCgroups returns whether each worker has its own cgroup here.
func HasCgroups() bool { return cgroupPrefix() != "" }

// Cgroups returns the paths of the existing cgroups.
func Cgroups() ([]string, error) { return filepath.Glob(cgroupPrefix() + "*") }

// GuardPID returns the process id of the guard.
func GuardPID(g *Guard) int { return g.waiter.Process.Pid }

// WithoutShell makes guards wait without a shell, as on a machine that lacks one.
func WithoutShell() { guardShell = "/nothing" }
