package bench

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
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

	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
)

// Peer is another library to measure.
type Peer struct {
	Name string
	// compiler compiles source with library. launcher is another required program, and remote one
	// that is required on hosts other than this machine.
	compiler, source, library, launcher, remote string
	// packages are the Debian packages that contain them.
	packages string
	lacks    []Op
	// command returns what starts all ranks. The words of program run one of them.
	command func(program []string, folder string, at Place) []string
	// worker says that ranks on other machines are workers of a job.
	worker bool
}

// Place is where the ranks of a peer run.
type Place struct {
	Ranks int
	// Hosts are the hosts in order of rank, of which at least one is another machine. None: all
	// ranks run on this machine.
	Hosts []plan.Host
	// Shell is a command that runs another one on a host, whose name and command line must be
	// appended. It is used if there are Hosts.
	Shell []string
	// Interfaces are the network interfaces between Hosts. None: the library chooses.
	Interfaces []string
}

// mpirun returns a command for mpirun. Its flags permit more ranks than cores, and keep mpirun's
// traffic on loopback if there is one machine.
func mpirun(more ...string) func(program []string, folder string, at Place) []string {
	return func(program []string, _ string, at Place) []string {
		words := []string{"mpirun", "--allow-run-as-root", "--oversubscribe"}
		interfaces := "lo"
		if len(at.Hosts) > 0 {
			interfaces = strings.Join(at.Interfaces, ",")
			slots := make([]string, len(at.Hosts))
			for i, h := range at.Hosts {
				slots[i] = h.Name + ":" + strconv.Itoa(h.Slots)
			}
			words = append(words, "-H", strings.Join(slots, ","), "-wdir", "/",
				"--mca", "plm_rsh_agent", strings.Join(at.Shell, " "), "--mca", "plm_rsh_no_tree_spawn", "1")
		}
		if interfaces != "" {
			words = append(words, "--mca", "oob_tcp_if_include", interfaces, "--mca", "btl_tcp_if_include", interfaces)
		}
		words = append(append(words, more...), "-n", strconv.Itoa(at.Ranks))
		return append(words, program...)
	}
}

const openMPIPackages = "openmpi-bin libopenmpi-dev"

// Peers are all peers: Open MPI with its default transports, Open MPI over TCP only, and Gloo.
var Peers = []Peer{
	{Name: "openmpi", compiler: "mpicc", source: "mpi.c", launcher: "mpirun", remote: "orted", packages: openMPIPackages,
		command: mpirun()},
	{Name: "openmpi-tcp", compiler: "mpicc", source: "mpi.c", launcher: "mpirun", remote: "orted", packages: openMPIPackages,
		command: mpirun("--mca", "pml", "ob1", "--mca", "btl", "self,tcp")},
	{Name: "gloo", compiler: "g++", source: "gloo.cc", library: "-lgloo", packages: "g++ libgloo-dev", lacks: []Op{ReduceScatter},
		worker: true,
		command: func(program []string, folder string, at Place) []string {
			return append(program, strconv.Itoa(at.Ranks), folder)
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
	if slices.Contains(p.lacks, op) || op == Async || op == SendRecv || op == Gradients {
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
	sources, err := fs.Sub(programs, "peers")
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

// Command returns the command that starts all ranks of the compiled program for spec. Its temporary
// files are in folder. If InJob is true it returns the command of a worker, which is one rank.
func (p Peer) Command(folder string, at Place, spec Spec) ([]string, error) {
	program := append([]string{p.program(folder)}, spec.words()...)
	if len(at.Hosts) > 0 {
		if i := slices.IndexFunc(at.Shell, func(word string) bool { return strings.ContainsAny(word, " :") }); i >= 0 && !p.worker {
			return nil, fmt.Errorf("cannot be started: the command of ssh has the word %q, and %s takes no blanks and colons there",
				at.Shell[i], p.launcher)
		}
		var err error
		if program, err = carried(p.program(folder), spec.words()); err != nil || p.worker {
			return program, err
		}
	}
	meeting, err := os.MkdirTemp(filepath.Join(folder, p.Name), "meeting")
	if err != nil {
		return nil, err
	}
	return p.command(program, meeting, at), nil
}

// words are the arguments by which a peer's program knows what to measure.
func (s Spec) words() []string {
	sizes := make([]string, len(s.Sizes))
	for i, n := range s.Sizes {
		sizes[i] = strconv.Itoa(n)
	}
	seconds := strconv.FormatFloat(s.Time.Seconds(), 'g', -1, 64)
	return []string{string(s.Op), seconds, strings.Join(sizes, ",")}
}

// InJob reports whether the ranks must be workers of a job.
func (p Peer) InJob(at Place) bool { return p.worker && len(at.Hosts) > 0 }

// carriedScript unpacks the program, which is in the $1 arguments after the first, and runs it with
// the other arguments.
const carriedScript = `d=$(mktemp -d) || exit; trap 'rm -rf "$d"' EXIT; trap 'exit 1' HUP INT TERM; n=$1; shift; ` +
	`while [ "$n" -gt 0 ]; do printf %s "$1" >>"$d/packed"; shift; n=$((n-1)); done; ` +
	`base64 -d <"$d/packed" | gunzip >"$d/program" && chmod 700 "$d/program" || exit; "$d/program" "$@"`

// maxPiece is the length of the pieces in which a program goes into a command: a word has 128 KiB
// at most.
const maxPiece = 100 << 10

// maxProgram bounds the size of a peer's program in bytes; a command has 2 MiB in most systems.
const maxProgram = 4 << 20

// carried returns a command that runs a program on any host: it contains the program, which need
// not be there. The libraries that the program is linked with must be.
func carried(path string, arguments []string) ([]string, error) {
	program, err := safefile.OwnText(path, maxProgram)
	if err != nil {
		return nil, err
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write(program); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	text := base64.StdEncoding.EncodeToString(packed.Bytes())
	var pieces []string
	for piece := range slices.Chunk([]byte(text), maxPiece) {
		pieces = append(pieces, string(piece))
	}
	command := []string{"sh", "-c", carriedScript, "sh", strconv.Itoa(len(pieces))}
	return append(append(command, pieces...), arguments...), nil
}

// Probe returns a command that succeeds if the peer can be used on a host other than this machine;
// nil: there is nothing to look for. Its failure must be given to Unusable.
func (p Peer) Probe(at Place, host string) []string {
	if p.remote == "" || p.InJob(at) {
		return nil
	}
	return append(slices.Clone(at.Shell), host, "command -v "+p.remote)
}

// unreachable is the exit status of ssh when it has not run the command.
const unreachable = 255

// Unusable returns, as a single line, why the peer cannot be used on a host whose Probe has ended
// with this exit code and output.
func (p Peer) Unusable(host string, code int, output string) error {
	if code == unreachable {
		lines := strings.Split(strings.TrimSpace(output), "\n")
		return fmt.Errorf("host %s cannot be reached by ssh, as %s needs: %s", host, p.launcher, lines[len(lines)-1])
	}
	return fmt.Errorf("host %s: %s is not installed (Debian: apt-get install %s)", host, p.launcher, p.packages)
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
