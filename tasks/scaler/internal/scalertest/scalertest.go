// Package scalertest runs programs of the real Scaler for tests, and compares the frames that they
// send and receive with golden files. A Listener accepts workers for tests in which the test acts
// as the scheduler.
package scalertest

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
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
)

var update = flag.Bool("update", false, "rewrite the golden frames")

// Sources returns the folder of the real Scaler, which is not part of this repository, or skips the
// test if it is not available. HVDRUN_SCALER names a folder with the sources of version 1.7.14.
// They need Debian's packages python3-zmq, python3-bidict, python3-psutil, python3-tblib and
// python3-cloudpickle.
func Sources(t *testing.T) string {
	t.Helper()
	folder := os.Getenv("HVDRUN_SCALER")
	if folder == "" {
		t.Skip("HVDRUN_SCALER is not set")
	}
	return folder
}

// Process is a process that a test has started.
type Process struct {
	*exec.Cmd
	// Out is its standard output, and In its standard input.
	Out  *bufio.Reader
	In   io.Writer
	seen bytes.Buffer
}

// Start runs a command. Unless split is set, Out has both its standard output and its standard
// error.
func Start(t *testing.T, split bool, env []string, name string, args ...string) *Process {
	t.Helper()
	p := &Process{Cmd: exec.Command(name, args...)}
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
func (p *Process) Until(t *testing.T, text string) string {
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

// Listener accepts workers for a test that acts as Scaler's scheduler.
type Listener struct {
	t  *testing.T
	ln net.Listener
}

// Listen listens on loopback until the test ends.
func Listen(t *testing.T) *Listener {
	t.Helper()
	l := &Listener{t: t}
	l.listen("127.0.0.1:0")
	return l
}

func (l *Listener) listen(addr string) {
	l.t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { ln.Close() })
	l.ln = ln
}

// Restart closes the listener and listens again on the same address.
func (l *Listener) Restart() {
	l.t.Helper()
	l.ln.Close()
	l.listen(l.ln.Addr().String())
}

// Address returns the address to pass to a worker of Scaler.
func (l *Listener) Address() string { return "tcp://" + l.ln.Addr().String() }

// Accept returns the connection of the next worker, after its handshake.
func (l *Listener) Accept() *zmtp.Conn {
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

// Frames are recorded messages: of each type and direction the first three. The zero value is
// empty.
type Frames struct {
	mu    sync.Mutex
	lines []string
	most  map[string]int // number of messages of a type
}

// Note records a message. way is its direction: < or >.
func (r *Frames) Note(way string, frames [][]byte) {
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
func (r *Frames) Check(t *testing.T, name string) {
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

// Join encodes frames of at most 255 bytes each as one string, for a fuzzer.
func Join(frames [][]byte) []byte {
	var out []byte
	for _, frame := range frames {
		out = append(append(out, byte(len(frame))), frame...)
	}
	return out
}

// Split decodes what Join has encoded. Any string is valid.
func Split(text []byte) (frames [][]byte) {
	for len(text) > 0 {
		n := min(int(text[0]), len(text)-1)
		frames = append(frames, text[1:1+n])
		text = text[1+n:]
	}
	return frames
}
