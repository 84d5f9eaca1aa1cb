package tcpstore

import (
	"bufio"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// python returns the Python that has torch, or skips the test: torch takes seconds to load.
func python(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("PyTorch's own store is NOT compared (make check-torch does)")
	}
	const path = "/usr/bin/python3"
	if _, err := os.Stat("/usr/lib/python3/dist-packages/torch"); err != nil {
		t.Skip("python3-torch is not installed: PyTorch's own store is NOT compared (make check-torch brings it)")
	}
	return path
}

// listen serves a store at a port of loopback until the test ends.
func listen(t *testing.T, store *Store) (host, port string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				if err := Serve(conn, store); err != nil && !strings.Contains(err.Error(), "reset by peer") {
					t.Error(err)
				}
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	host, port, _ = net.SplitHostPort(ln.Addr().String())
	return host, port
}

// TestTorchAsClient tests every call of PyTorch's TCPStore.
func TestTorchAsClient(t *testing.T) {
	python := python(t)
	host, port := listen(t, new(Store))
	out, err := exec.Command(python, "testdata/calls.py", host, port).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "all calls answered") {
		t.Fatalf("%v\n%s", err, out)
	}
}

// TestTorchGloo: four ranks of gloo connect to each other.
func TestTorchGloo(t *testing.T) {
	python := python(t)
	host, port := listen(t, new(Store))
	var wg sync.WaitGroup
	for _, rank := range []string{"0", "1", "2", "3"} {
		wg.Go(func() {
			cmd := exec.Command(python, "testdata/gloo.py")
			cmd.Env = append(os.Environ(), "MASTER_ADDR="+host, "MASTER_PORT="+port, "RANK="+rank, "WORLD_SIZE=4",
				"TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_RESTART_COUNT=0", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1")
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), "sum 10") {
				t.Errorf("rank %s: %v\n%s", rank, err, out)
			}
		})
	}
	wg.Wait()
}

// TestTorchAsServer: PyTorch's store serves the client, which speaks the older protocol, that of
// PyTorch 1.13.
func TestTorchAsServer(t *testing.T) {
	cmd := exec.Command(python(t), "testdata/serve.py")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	lines.Scan()
	conn, err := net.Dial("tcp", "127.0.0.1:"+lines.Text())
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(conn, true)
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if err := c.Set(ctx, "/from-go", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	value, err := c.Get(ctx, "/from-go")
	same(t, string(value), "hello", err)
	sum, err := c.Add(ctx, "n", 41)
	same(t, sum, 41, err)
	sum, err = c.Add(ctx, "n", 1)
	same(t, sum, 42, err)
	value, err = c.CompareSet(ctx, "n", []byte("42"), []byte("43"))
	same(t, string(value), "43", err)
	all, err := c.Check(ctx, "n", "never")
	same(t, all, false, err)
	was, err := c.Delete(ctx, "n")
	same(t, was, true, err)
	if _, err := c.Len(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(ctx, "/from-go"); err != nil {
		t.Fatal(err)
	}
	c.Close()
	stdin.Close()
	lines.Scan()
	if lines.Text() != "hello" {
		t.Errorf("the store had %q", lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
