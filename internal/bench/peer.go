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

// Peer is another library that can be measured.
type Peer struct {
	Name string
	// compiler makes program of source, with the library that is named; launcher is what else must
	// be there.
	compiler, source, library, launcher string
	// packages are Debian's that have them.
	packages string
	lacks    []Op
	command  func(program, folder string, ranks int, plan []string) []string
}

// mpirun's flags keep its own traffic on loopback and let ranks outnumber cores.
func mpirun(more ...string) func(program, folder string, ranks int, plan []string) []string {
	return func(program, _ string, ranks int, plan []string) []string {
		words := []string{"mpirun", "--allow-run-as-root", "--oversubscribe",
			"--mca", "oob_tcp_if_include", "lo", "--mca", "btl_tcp_if_include", "lo"}
		words = append(append(words, more...), "-n", strconv.Itoa(ranks), program)
		return append(words, plan...)
	}
}

const openMPIPackages = "openmpi-bin libopenmpi-dev"

// Peers are all that there are: Open MPI with the transports that it takes by itself, Open MPI over
// TCP alone, and Gloo.
var Peers = []Peer{
	{Name: "openmpi", compiler: "mpicc", source: "mpi.c", launcher: "mpirun", packages: openMPIPackages, command: mpirun()},
	{Name: "openmpi-tcp", compiler: "mpicc", source: "mpi.c", launcher: "mpirun", packages: openMPIPackages,
		command: mpirun("--mca", "pml", "ob1", "--mca", "btl", "self,tcp")},
	{Name: "gloo", compiler: "g++", source: "gloo.cc", library: "-lgloo", packages: "g++ libgloo-dev", lacks: []Op{ReduceScatter},
		command: func(program, folder string, ranks int, plan []string) []string {
			return append(append([]string{program}, plan...), strconv.Itoa(ranks), folder)
		}},
}

// ParsePeers reads a list as openmpi,gloo.
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
			return nil, fmt.Errorf("%q is none of %s", word, strings.Join(names, ", "))
		case slices.ContainsFunc(found, func(p Peer) bool { return p.Name == names[i] }):
			return nil, fmt.Errorf("%s is there twice", names[i])
		}
		found = append(found, Peers[i])
	}
	return found, nil
}

// Prepare puts the peer's sources into a subfolder of its own, and returns the command that
// compiles them. Its error is one line that says why the peer cannot be measured here, and what to
// install.
func (p Peer) Prepare(folder string, op Op) (compile []string, err error) {
	if slices.Contains(p.lacks, op) {
		return nil, fmt.Errorf("there is no %s in it", op)
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

// Uncompiled is the error of a compiler that has failed with this output, in one line.
func (p Peer) Uncompiled(output string) error {
	return fmt.Errorf("%s fails: %s (Debian: apt-get install %s)", p.compiler, firstError(output), p.packages)
}

func (p Peer) program(folder string) string { return filepath.Join(folder, p.Name, "program") }

// firstError is the line of a compiler's output that tells most.
func firstError(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for _, l := range lines {
		if strings.Contains(l, "error") {
			return l
		}
	}
	return lines[0]
}

// Command is what measures as the spec says, once it is compiled. What it leaves in the folder is
// removed with it.
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

// ReadPeer reads the lines that a peer's program prints, one for each of the sizes.
func ReadPeer(out io.Reader, spec Spec) ([]Row, error) {
	var rows []Row
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		r := Row{Op: spec.Op}
		n, err := fmt.Sscanf(lines.Text(), "%d\t%d\t%g\t%g\t%g", &r.Bytes, &r.Samples, &r.Min, &r.Median, &r.P99)
		if n != 5 || err != nil || r.Samples < 1 || !(r.Min > 0 && r.Min <= r.Median && r.Median <= r.P99) {
			return nil, fmt.Errorf("a line that is none of a measurement: %q", lines.Text())
		}
		rows = append(rows, r)
	}
	for i, size := range spec.Sizes {
		if i >= len(rows) || rows[i].Bytes != size {
			return nil, errors.Join(fmt.Errorf("no line for the size %d", size), lines.Err())
		}
	}
	return rows, nil
}

// Patience is the longest that a peer may take for the whole spec: some of them hang rather than
// fail.
func (s Spec) Patience() time.Duration {
	return time.Minute + time.Duration(len(s.Sizes))*(4*s.Time+30*time.Second)
}
