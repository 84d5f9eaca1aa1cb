package scaler

// The kit of the tests: programs of the real Scaler, whose frames are compared with golden files,
// and a listener for tests that act as the scheduler.

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

var update = flag.Bool("update", false, "rewrite the golden frames")

// realSources returns the folder of the real Scaler, which is not part of this repository, or skips
// the test if it is not available. HVDRUN_SCALER names a folder with the sources of version 1.7.14.
// They need Debian's packages python3-zmq, python3-bidict, python3-psutil, python3-tblib and
// python3-cloudpickle.
func realSources(t *testing.T) string {
	t.Helper()
	folder := os.Getenv("HVDRUN_SCALER")
	if folder == "" {
		t.Skip("HVDRUN_SCALER is not set")
	}
	return folder
}

// process is a process that a test has started.
type process struct {
	*exec.Cmd
	// Out is its standard output, and In its standard input.
	Out  *bufio.Reader
	In   io.Writer
	seen bytes.Buffer
}

// startProcess runs a command. Unless split is set, Out has both its standard output and its
// standard error.
func startProcess(t *testing.T, split bool, env []string, name string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(name, args...)}
	p.Env = append(os.Environ(), env...)
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.Stdout, p.Stderr = w, w
	if split {
		p.Stderr = &p.seen
	}
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.In = in
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	p.Out = bufio.NewReader(r)
	t.Cleanup(func() {
		_ = syscall.Kill(-p.Process.Pid, syscall.SIGKILL) // including its child processes
		_ = p.Wait()
		r.Close()
		if t.Failed() {
			t.Logf("%s: %s", name, &p.seen)
		}
	})
	return p
}

// Until reads lines until one contains text, and returns that line.
func (p *process) Until(t *testing.T, text string) string {
	t.Helper()
	for {
		line, err := p.Out.ReadString('\n')
		p.seen.WriteString(line)
		if strings.Contains(line, text) {
			return line
		}
		if err != nil {
			t.Fatalf("%q does not come: %v\n%s", text, err, &p.seen)
		}
	}
}

// listener accepts workers for a test that acts as Scaler's scheduler.
type listener struct {
	t  *testing.T
	ln net.Listener
}

// listenAsScheduler listens on loopback until the test ends, at an address that no other process
// uses: nobody takes the port between the two parts of Restart.
func listenAsScheduler(t *testing.T) *listener {
	t.Helper()
	network, err := sandbox.Net()
	if err != nil {
		t.Fatal(err)
	}
	l := &listener{t: t}
	l.listen(network + "1:0")
	return l
}

func (l *listener) listen(addr string) {
	l.t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { ln.Close() })
	l.ln = ln
}

// Restart closes the listener and listens again on the same address.
func (l *listener) Restart() {
	l.t.Helper()
	l.ln.Close()
	l.listen(l.ln.Addr().String())
}

// Address returns the address to pass to a worker of Scaler.
func (l *listener) Address() string { return "tcp://" + l.ln.Addr().String() }

// Accept returns the connection of the next worker, after its handshake.
func (l *listener) Accept() *zmtp.Conn {
	l.t.Helper()
	conn, err := l.ln.Accept()
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { conn.Close() })
	c, err := zmtp.Handshake(conn, zmtp.Config{Role: zmtp.Router})
	if err != nil {
		l.t.Fatal(err)
	}
	return c
}

// frameLog are recorded messages: of each type and direction the first three. The zero value is
// empty.
type frameLog struct {
	mu    sync.Mutex
	lines []string
	most  map[string]int // number of messages of a type
}

// Note records a message. way is its direction: < or >.
func (r *frameLog) Note(way string, frames [][]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.most == nil {
		r.most = make(map[string]int)
	}
	kind := way + " " + string(frames[0])
	if r.most[kind]++; r.most[kind] > 3 {
		return
	}
	line := kind
	for _, frame := range frames[1:] {
		line += fmt.Sprintf(" %x.", frame)
	}
	r.lines = append(r.lines, line)
}

// Check compares the types of the recorded messages with those in the golden file, or writes that
// file with the flag -update. It compares only types, because identities and times differ from run
// to run. It ignores the request to disconnect: a worker that is shut down may find that the
// scheduler has ended before it leaves.
func (r *frameLog) Check(t *testing.T, name string) {
	t.Helper()
	lines := r.lines
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	types := func(lines []string) (found []string) {
		for _, line := range lines {
			if len(line) > 4 && line[:4] != "> DR" && !slices.Contains(found, line[:4]) {
				found = append(found, line[:4])
			}
		}
		slices.Sort(found)
		return found
	}
	if a, b := types(lines), types(strings.Split(string(golden), "\n")); !slices.Equal(a, b) {
		t.Errorf("messages of types %v, in the golden file %v", a, b)
	}
}

// joinFrames encodes frames of at most 255 bytes each as one string, for a fuzzer.
func joinFrames(frames [][]byte) []byte {
	var out []byte
	for _, frame := range frames {
		out = append(append(out, byte(len(frame))), frame...)
	}
	return out
}

// splitFrames decodes what joinFrames has encoded. Any string is valid.
func splitFrames(text []byte) (frames [][]byte) {
	for len(text) > 0 {
		n := min(int(text[0]), len(text)-1)
		frames = append(frames, text[1:1+n])
		text = text[1+n:]
	}
	return frames
}

// blankAny is like blank, for the types of all messages of this package.
func blankAny(kind string) incoming {
	switch kind {
	case "TR":
		return new(taskResult)
	case "OR":
		return new(objectRequest)
	case "HB":
		return new(heartbeat)
	case "DR":
		return new(disconnectRequest)
	}
	return blank(kind)
}

// decodeAny is like decode, for all messages of this package.
func decodeAny(all [][]byte) (anyMessage, error) {
	m, err := decodeAs(all, blankAny)
	if err != nil {
		return nil, err
	}
	return m.(anyMessage), nil
}

// anyMessage is a message at either end of a connection.
type anyMessage interface {
	incoming
	outgoing
}

// The rest of what Scaler's scheduler sends.
const (
	noObject = 'N' // kind of an objectResponse
	leave    = 'D' // kind of a disconnect, which ends only the client
	argTask  = 'T' // kind of an argument, in graphs of tasks, which workers never receive
)

// The scheduler's end of the codec.

func (m *taskCancel) encode() [][]byte {
	return [][]byte{m.ID, {truth(m.Force), truth(m.Retrieve)}}
}

func (m *taskResult) decode(f *frames) error {
	m.ID, m.Status = f.next("id"), taskStatus(f.one("status", "SFCNKW"))
	m.Profile.decode(f.next("profile"), f)
	m.Results = f.all("results")
	return f.err
}

func (p *profile) decode(b []byte, f *frames) {
	switch len(b) {
	case 0:
		*p = profile{Absent: true}
	case 12:
		*p = profile{Duration: math.Float32frombits(binary.BigEndian.Uint32(b)), Memory: binary.BigEndian.Uint64(b[4:])}
	default:
		f.fail("a profile of %d bytes", len(b))
	}
}

func (m *objectRequest) decode(f *frames) error {
	f.one("kind", "A")
	m.IDs = f.all("ids")
	return f.err
}

func (f *frames) all(what string) [][]byte { return f.several(what, uint64(len(f.rest))) }

func (m *objectResponse) encode() [][]byte {
	return append([][]byte{{m.Kind}}, m.objects.encode()...)
}

func (m *heartbeat) decode(f *frames) error {
	b := f.sized("heartbeat", 33)
	*m = heartbeat{
		CPU: loadOf(b), RSS: order.Uint64(b[8:]), Free: order.Uint64(b[16:]), Queued: int(order.Uint16(b[24:])),
		LatencyUS: order.Uint32(b[28:]), Locked: b[32] != 0,
	}
	for len(f.rest) > 0 && f.err == nil {
		m.Processors = append(m.Processors, processorOf(f.sized("processor", 24)))
	}
	return f.err
}

func processorOf(b []byte) processor {
	return processor{
		PID: order.Uint32(b), Initialized: b[4] != 0, HasTask: b[5] != 0, Suspended: b[6] != 0,
		CPU: loadOf(b[8:]), RSS: order.Uint64(b[16:]),
	}
}

func loadOf(b []byte) float64 { return float64(order.Uint16(b)) / 1000 }

// nothing is the content of messages without content: one empty frame, because Scaler's programs
// drop messages of fewer than two frames.
var nothing = [][]byte{{}}

func (*heartbeatEcho) encode() [][]byte { return nothing }

func (m *disconnect) encode() [][]byte { return [][]byte{{m.Kind}} }

func (m *disconnectResponse) encode() [][]byte { return [][]byte{m.Worker} }

func (m *disconnectRequest) decode(f *frames) error {
	m.Worker = f.next("worker")
	return f.err
}
