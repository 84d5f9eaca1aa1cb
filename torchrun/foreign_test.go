package torchrun

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// keys are those of jobs that ask who is there, and that do not.
var keys = map[string][]byte{"key": make([]byte, identity.ClusterKeyLen), "insecure": nil}

// TestTorchrunJoins: where an agent of PyTorch's torchrun asks, the log says that it is one.
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

// TestTorchrunIsThere: where PyTorch's torchrun has the endpoint, a node says so at once.
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
		if key == nil { // the first bytes would be the beginning of a query: no answer comes
			continue
		}
		s := &Static{Node: 1, Nodes: 2, Addr: addr, Peers: peers, Log: discard()}
		if _, err := s.Next(t.Context(), false); !errors.Is(err, errTorch) {
			t.Errorf("static, %s: %v", name, err)
		}
	}
}
