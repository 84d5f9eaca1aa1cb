package launch

import (
	"io"
	"path/filepath"
)

// HasCgroups tells whether each worker has a cgroup of its own here.
func HasCgroups() bool { return cgroupPrefix() != "" }

// Cgroups returns the paths of those that there are.
func Cgroups() ([]string, error) { return filepath.Glob(cgroupPrefix() + "*") }

// GuardPID returns the process id of the guard.
func GuardPID(g *Guard) int { return g.shell.Process.Pid }

// TaggedWriter returns an end with a tag of its own.
func TaggedWriter(o *Output, tag string, rank func() int) io.WriteCloser {
	return &LineWriter{output: o, tag: tag, rank: rank}
}

// MaxPiece is the most text of one line that is held back.
const MaxPiece = maxPiece
