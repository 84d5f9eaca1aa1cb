package bench

import (
	"bufio"
	"bytes"
	"cmp"
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

// Peer is another library to measure, with its settings.
type Peer struct {
	Name string
	// compiler compiles source with library. launcher is another required program, and remote one
	// that is required on hosts other than this machine.
	compiler, source, library, launcher, remote string
	// suffix is appended to these names if several libraries have programs of the same names.
	suffix string
	// packages are the Debian packages that contain them.
	packages string
	lacks    []Op
	// settings are words of the launcher, preceded by environment variables as NAME=VALUE.
	settings string
	// version is a command whose first line says which version is installed.
	version []string
	// command returns the command that starts all ranks. The words of program run one of them.
	command func(p Peer, program []string, folder string, at Place) []string
	// worker says that ranks on other machines must be workers of a job.
	worker bool
	// local says that the ranks can only be measured on this machine.
	local bool
}

// Place is where the ranks of a peer run.
type Place struct {
	Ranks int
	// Hosts are the hosts in order of rank, at least one of them another machine. None: all ranks
	// run on this machine.
	Hosts []plan.Host
	// Shell is the command that runs a command on a host. The host's name and the command line must
	// be appended. It is used if there are Hosts.
	Shell []string
	// Interfaces are the network interfaces between Hosts. None: the library chooses.
	Interfaces []string
}

// openMPI starts ranks of Open MPI. Its flags permit more ranks than cores, and keep mpirun's
// traffic on loopback if there is one machine.
func openMPI(p Peer, program []string, _ string, at Place) []string {
	words := []string{p.tool("mpirun"), "--allow-run-as-root", "--oversubscribe"}
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
	return p.launch(words, append([]string{"-n", strconv.Itoa(at.Ranks)}, program...))
}

// mpich starts ranks of MPICH.
func mpich(p Peer, program []string, _ string, at Place) []string {
	return p.launch([]string{p.tool("mpirun")}, append([]string{"-n", strconv.Itoa(at.Ranks)}, program...))
}

// forked starts a program that starts its ranks itself.
func forked(_ Peer, program []string, folder string, at Place) []string {
	return append(program, strconv.Itoa(at.Ranks), folder)
}

// launch returns the words of a launcher's command, followed by the peer's settings and by more.
// Settings that are variables precede the command, as arguments of env.
func (p Peer) launch(words, more []string) []string {
	for word := range strings.FieldsSeq(p.settings) {
		if name, _, is := strings.Cut(word, "="); is && name == strings.ToUpper(name) {
			words = append([]string{"env", word}, words...)
		} else {
			words = append(words, word)
		}
	}
	return append(words, more...)
}

// tool returns the name of a program of the library.
func (p Peer) tool(name string) string {
	if p.suffix != "" {
		if _, err := exec.LookPath(name + p.suffix); err == nil {
			return name + p.suffix
		}
	}
	return name
}

// peers are all peers: the libraries with their defaults, Open MPI over TCP only, and those with
// the settings that make them fastest on one machine, each for some sizes and numbers of ranks.
var peers = slices.Concat(
	with(Peer{compiler: "mpicc", source: "mpi.c", launcher: "mpirun", suffix: ".openmpi", remote: "orted",
		packages: "openmpi-bin libopenmpi-dev", version: []string{"mpirun", "--version"}, command: openMPI},
		"openmpi", "",
		"openmpi-tcp", "--mca pml ob1 --mca btl self,tcp",
		"openmpi-nocma", noCMA,
		"openmpi-acoll", noCMA+largeSends+"--mca coll_acoll_priority 100 --mca coll_acoll_comm_size_thresh 1 --mca coll_acoll_without_smsc 1",
		"openmpi-xhc", noCMA+"--mca coll_xhc_priority 100 --mca coll_xhc_cico_max 67108864",
		"openmpi-ucx", "UCX_TLS=posix,self --mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any",
		"openmpi-linear", tuned+"1",
		"openmpi-rabenseifner", noCMA+largeSends+tuned+"6"),
	with(Peer{compiler: "mpicc", source: "mpi.c", launcher: "mpirun", suffix: ".mpich", packages: "mpich libmpich-dev",
		version: []string{"mpichversion"}, command: mpich, local: true},
		"mpich", "",
		"mpich-posix", "UCX_TLS=posix,self",
		"mpich-ucc", "UCX_TLS=posix,self MPIR_CVAR_CH4_UCX_ENABLE_UCC=1"),
	with(Peer{compiler: "python3", source: "pytorch.py", packages: "python3-torch", lacks: []Op{AllGather, ReduceScatter, AllToAll},
		version: []string{"python3", "-c", "import torch; print('PyTorch', torch.__version__)"}, command: forked, worker: true},
		"torch", ""),
	with(Peer{compiler: "g++", source: "gloo.cc", library: "-lgloo", packages: "g++ libgloo-dev", lacks: []Op{ReduceScatter},
		version: []string{"dpkg-query", "-W", "libgloo-dev"}, command: forked, worker: true},
		"gloo", ""),
)

// Settings of Open MPI: copying through shared memory instead of reading another process's memory,
// longer fragments for that, and the choice of an algorithm of its component tuned.
const (
	noCMA      = "--mca smsc ^cma "
	largeSends = "--mca btl_sm_max_send_size 131072 --mca btl_sm_eager_limit 32768 --mca btl_sm_rndv_eager_limit 131072 "
	tuned      = "--mca coll ^han --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm "
)

// with returns a library under several names. Each name is followed by its settings.
func with(library Peer, names ...string) (peers []Peer) {
	for pair := range slices.Chunk(names, 2) {
		library.Name, library.settings = pair[0], strings.TrimSpace(pair[1])
		peers = append(peers, library)
	}
	return peers
}

// Version returns a command whose first line of output names the installed version.
func (p Peer) Version() []string {
	return append([]string{p.tool(p.version[0])}, p.version[1:]...)
}

// About describes what was measured, given the first line of Version's output.
func (p Peer) About(version string) string {
	text := cmp.Or(strings.Join(strings.Fields(version), " "), "of an unknown version")
	if p.settings != "" {
		text += ", " + p.settings
	}
	return p.Name + ": " + text
}

// ParsePeers parses a list such as openmpi,gloo.
func ParsePeers(text string) ([]Peer, error) {
	var found []Peer
	var names []string
	for _, p := range peers {
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
		found = append(found, peers[i])
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
		if _, err := exec.LookPath(p.tool(program)); err != nil {
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
	source := filepath.Join(own, p.source)
	if p.source == "pytorch.py" {
		return []string{p.compiler, source, "prepare", p.program(folder)}, nil
	}
	compile = []string{p.tool(p.compiler), "-O2", "-o", p.program(folder), source}
	if p.library != "" {
		compile = append(compile, p.library)
	}
	return compile, nil
}

// Uncompiled returns the error of a compiler with this output, as a single line.
func (p Peer) Uncompiled(output string) error {
	return fmt.Errorf("%s fails: %s (Debian: apt-get install %s)", p.compiler, firstError(output), p.packages)
}

func (p Peer) program(folder string) string { return filepath.Join(folder, p.Name, "program") }

// firstError returns the most informative line of a compiler's output.
func firstError(out string) string {
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for _, l := range lines {
		if strings.Contains(strings.ToLower(l), "error") {
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
		if p.local {
			return nil, errors.New("is only measured on one machine")
		}
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
	return p.command(p, program, meeting, at), nil
}

// words returns the arguments that tell a peer's program what to measure.
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
// the remaining arguments.
const carriedScript = `d=$(mktemp -d) || exit; trap 'rm -rf "$d"' EXIT; trap 'exit 1' HUP INT TERM; n=$1; shift; ` +
	`while [ "$n" -gt 0 ]; do printf %s "$1" >>"$d/packed"; shift; n=$((n-1)); done; ` +
	`base64 -d <"$d/packed" | gunzip >"$d/program" && chmod 700 "$d/program" || exit; "$d/program" "$@"`

// maxPiece is the length in bytes of the pieces in which a command contains a program: an argument
// has at most 128 KiB.
const maxPiece = 100 << 10

// maxProgram bounds the size of a peer's program in bytes. Most systems limit a command to 2 MiB.
const maxProgram = 4 << 20

// carried returns a command that runs a program on any host: the command contains the program. The
// host needs only the libraries with which the program is linked.
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
// nil: nothing needs to be checked. If it fails, Unusable returns the reason.
func (p Peer) Probe(at Place, host string) []string {
	if p.remote == "" || p.InJob(at) {
		return nil
	}
	return append(slices.Clone(at.Shell), host, "command -v "+p.remote+" || command -v prted")
}

// unreachable is the exit status of ssh if it did not run the command.
const unreachable = 255

// Unusable returns, as a single line, the reason why the peer cannot be used on a host whose Probe
// ended with this exit code and output.
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
			return nil, errors.Join(fmt.Errorf("the output has no line for size %d", size), lines.Err())
		}
	}
	return rows, nil
}

// Patience returns the time limit of a peer for the whole spec. Some peers hang instead of failing.
func (s Spec) Patience() time.Duration {
	return time.Minute + time.Duration(len(s.Sizes))*(4*s.Time+30*time.Second)
}
