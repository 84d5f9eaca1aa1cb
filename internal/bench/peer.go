package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	programs "github.com/hvdrun/hvdrun/bench"
)

// Peer is another library to measure.
type Peer struct {
	Name string
	// compiler compiles source with library. launcher is another required program.
	compiler, source, library, launcher string
	// packages are the Debian packages that contain them.
	packages string
	lacks    []Op
	command  func(program, folder string, ranks int, plan []string) []string
}

// mpirun returns a command for mpirun. Its flags keep mpirun's traffic on loopback and permit more
// ranks than cores.
func mpirun(more ...string) func(program, folder string, ranks int, plan []string) []string {
	return func(program, _ string, ranks int, plan []string) []string {
		words := []string{"mpirun", "--allow-run-as-root", "--oversubscribe",
			"--mca", "oob_tcp_if_include", "lo", "--mca", "btl_tcp_if_include", "lo"}
		words = append(append(words, more...), "-n", strconv.Itoa(ranks), program)
		return append(words, plan...)
	}
}

const openMPIPackages = "openmpi-bin libopenmpi-dev"

// Peers are all peers: Open MPI with its default transports, Open MPI over TCP only, and Gloo.
var Peers = []Peer{
	{Name: "openmpi", compiler: "mpicc", source: "mpi.c", launcher: "mpirun", packages: openMPIPackages, command: mpirun()},
	{Name: "openmpi-tcp", compiler: "mpicc", source: "mpi.c", launcher: "mpirun", packages: openMPIPackages,
		command: mpirun("--mca", "pml", "ob1", "--mca", "btl", "self,tcp")},
	{Name: "gloo", compiler: "g++", source: "gloo.cc", library: "-lgloo", packages: "g++ libgloo-dev", lacks: []Op{ReduceScatter},
		command: func(program, folder string, ranks int, plan []string) []string {
			return append(append([]string{program}, plan...), strconv.Itoa(ranks), folder)
		}},
}

// ParsePeers parses a list such as openmpi,gloo.
func ParsePeers(text string) ([]Peer, error) {
	var found []Peer
	var names []string
	for _, p := range Peers {
		names = append(names, p.Name)
	}
	for word := range strings.SplitSeq(text, ",") {
		i := slices.Index(names, strings.TrimSpace(word))
		switch {
		case i < 0:
			return nil, fmt.Errorf("%q is not one of %s", word, strings.Join(names, ", "))
		case slices.ContainsFunc(found, func(p Peer) bool { return p.Name == names[i] }):
			return nil, fmt.Errorf("%s is listed twice", names[i])
		}
		found = append(found, Peers[i])
	}
	return found, nil
}

// Prepare writes the peer's sources to a subdirectory and returns the command that compiles them.
// Its error is a single line that says why the peer cannot be measured here and what to install.
func (p Peer) Prepare(folder string, op Op) (compile []string, err error) {
	if slices.Contains(p.lacks, op) || op == Async {
		return nil, fmt.Errorf("it has no %s", op)
	}
	for _, program := range []string{p.compiler, p.launcher} {
		if program == "" {
			continue
		}
		if _, err := exec.LookPath(program); err != nil {
			return nil, fmt.Errorf("%s is not installed (Debian: apt-get install %s)", program, p.packages)
		}
	}
	own := filepath.Join(folder, p.Name)
	sources, err := fs.Sub(programs.Peers, "peers")
	if err != nil {
		return nil, err
	}
	if err := os.CopyFS(own, sources); err != nil {
		return nil, err
	}
	compile = []string{p.compiler, "-O2", "-o", p.program(folder), filepath.Join(own, p.source)}
	if p.library != "" {
		compile = append(compile, p.library)
	}
	return compile, nil
}

// Uncompiled returns, as a single line, the error of a compiler with this output.
func (p Peer) Uncompiled(output string) error {
	return fmt.Errorf("%s fails: %s (Debian: apt-get install %s)", p.compiler, firstError(output), p.packages)
}

func (p Peer) program(folder string) string { return filepath.Join(folder, p.Name, "program") }

// firstError returns the most informative line of a compiler's output.
func firstError(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for _, l := range lines {
		if strings.Contains(l, "error") {
			return l
		}
	}
	return lines[0]
}

// Command returns the command of the compiled program for spec. Its temporary files are in folder.
func (p Peer) Command(folder string, ranks int, spec Spec) ([]string, error) {
	meeting, err := os.MkdirTemp(filepath.Join(folder, p.Name), "meeting")
	if err != nil {
		return nil, err
	}
	sizes := make([]string, len(spec.Sizes))
	for i, n := range spec.Sizes {
		sizes[i] = strconv.Itoa(n)
	}
	seconds := strconv.FormatFloat(spec.Time.Seconds(), 'g', -1, 64)
	plan := []string{string(spec.Op), seconds, strings.Join(sizes, ",")}
	return p.command(p.program(folder), meeting, ranks, plan), nil
}

// ReadPeer parses the output of a peer's program, one line per size.
func ReadPeer(out io.Reader, spec Spec) ([]Row, error) {
	var rows []Row
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		r := Row{Op: spec.Op}
		n, err := fmt.Sscanf(lines.Text(), "%d\t%d\t%g\t%g\t%g", &r.Bytes, &r.Samples, &r.Min, &r.Median, &r.P99)
		if n != 5 || err != nil || r.Samples < 1 || !(r.Min > 0 && r.Min <= r.Median && r.Median <= r.P99) {
			return nil, fmt.Errorf("the line is not a measurement: %q", lines.Text())
		}
		rows = append(rows, r)
	}
	for i, size := range spec.Sizes {
		if i >= len(rows) || rows[i].Bytes != size {
			return nil, errors.Join(fmt.Errorf("no line for size %d", size), lines.Err())
		}
	}
	return rows, nil
}

// Patience returns the time limit of a peer for the whole spec, because some hang instead of
// failing.
func (s Spec) Patience() time.Duration {
	return time.Minute + time.Duration(len(s.Sizes))*(4*s.Time+30*time.Second)
}
