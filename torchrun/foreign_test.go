package torchrun

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// keys are the keys of a job that authenticates its agents and of one that does not.
var keys = map[string][]byte{"key": make([]byte, identity.ClusterKeyLen), "insecure": nil}

// TestTorchrunJoins: if an agent of PyTorch's torchrun connects, the log says so.
func TestTorchrunJoins(t *testing.T) {
	for name, key := range keys {
		for _, older := range []bool{false, true} {
			log, hook := logtest.NewNullLogger()
			peers, err := NewPeers(key, "run", "", log)
			if err != nil {
				t.Fatal(err)
			}
			addr, err := peers.Listen("127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			conn, err := net.Dial("tcp", addr.String())
			if err != nil {
				t.Fatal(err)
			}
			client, err := tcpstore.NewClient(conn, older)
			if err == nil {
				_, err = client.Add(t.Context(), "init/", 1)
			}
			if err == nil {
				t.Errorf("%s: a stranger is served", name)
			}
			conn.Close()
			over, cancel := context.WithCancel(t.Context())
			cancel()
			peers.Close(over)
			if last := hook.LastEntry(); last == nil || last.Level != logrus.WarnLevel || !strings.Contains(last.Message, errTorch.Error()) {
				t.Errorf("%s, older %v: %+v", name, older, last)
			}
		}
	}
}

// TestTorchrunIsThere: if PyTorch's torchrun listens at the endpoint, a node says so at once.
func TestTorchrunIsThere(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { _ = tcpstore.Serve(conn, new(tcpstore.Store)) })
		}
	})
	defer serving.Wait()
	defer ln.Close()
	addr := ln.Addr().String()
	for name, key := range keys {
		peers, err := NewPeers(key, "run", "", discard())
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := peers.Meet(t.Context(), addr, false); !errors.Is(err, errTorch) {
			t.Errorf("c10d, %s: %v", name, err)
		}
		if key == nil { // the other end takes the first bytes for the beginning of a query and does not answer
			continue
		}
		s := &Static{Node: 1, Nodes: 2, Addr: addr, Peers: peers, Log: discard()}
		if _, err := s.Next(t.Context(), false); !errors.Is(err, errTorch) {
			t.Errorf("static, %s: %v", name, err)
		}
	}
}

// TestTalkerIsThere: the banner of another program is not taken for a job that has ended.
func TestTalkerIsThere(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var serving sync.WaitGroup
	serving.Go(func() {
		var open []net.Conn
		for {
			conn, err := ln.Accept()
			if err != nil {
				break
			}
			open = append(open, conn)
			_, _ = conn.Write([]byte("SSH-2.0-OpenSSH_10.0\r\n"))
			if len(open) == 4 {
				cancel()
			}
		}
		for _, conn := range open {
			conn.Close()
		}
	})
	defer serving.Wait()
	defer ln.Close()
	peers, err := NewPeers(nil, "run", "", discard())
	if err != nil {
		t.Fatal(err)
	}
	s := &Static{Node: 1, Nodes: 2, Addr: ln.Addr().String(), Peers: peers, Log: discard()}
	if _, err := s.Next(ctx, false); err == nil || errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// otherProgram returns an address at which another program accepts connections and never answers.
func otherProgram(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	f, err := ln.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() // and ln's: only cat listens then
	cat := exec.Command("cat")
	cat.ExtraFiles = []*os.File{f}
	end, err := cat.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cat.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		end.Close()
		_ = cat.Wait()
	})
	return ln.Addr().String()
}

// TestOtherProgramIsThere: if another program of this machine listens at the endpoint, a node says
// so and does not try again, with or without a key.
func TestOtherProgramIsThere(t *testing.T) {
	addr := otherProgram(t)
	want := regexp.MustCompile(`^torchrun: ` + addr + ` is in use by another program of this machine, process \d+ \(cat\): choose another port`)
	for name, key := range keys {
		peers, err := NewPeers(key, "run", "", discard())
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := peers.Meet(t.Context(), addr, false); err == nil || !want.MatchString(err.Error()) {
			t.Errorf("c10d, %s: %v", name, err)
		}
		s := &Static{Node: 1, Nodes: 2, Addr: addr, Peers: peers, Log: discard()}
		if _, err := s.Next(t.Context(), false); err == nil || !want.MatchString(err.Error()) {
			t.Errorf("static, %s: %v", name, err)
		}
	}
	// The process that listens can be an agent if it is this same program.
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if err := inUse(t.Context(), ln.Addr().String()); err != nil {
		t.Error(err)
	}
	for program, agent := range map[string]bool{"hvdrun": true, "hvdrun-old": true, proc.Program(os.Getpid()): true, "cat": false, "": false} {
		if mayBeAgent(program) != agent {
			t.Errorf("%q: %v", program, !agent)
		}
	}
	for err, other := range map[error]bool{
		io.EOF: false, syscall.ECONNRESET: false, errSilentStore: true, fmt.Errorf("x: %w", errOtherProgram): true, tls.RecordHeaderError{}: true,
	} {
		if isOther(err) != other {
			t.Errorf("%v: %v", err, !other)
		}
	}
}
