package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/tcpstore"
	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// asAnother runs f on a thread that has the identity and rights of another user of this machine,
// also for its sockets. The thread ends with f.
func asAnother(t *testing.T, f func()) {
	t.Helper()
	const nobody = 65534
	failed := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked
		_, _, err1 := unix.RawSyscall(unix.SYS_SETRESGID, nobody, nobody, nobody)
		_, _, err2 := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody)
		if err1 != 0 || err2 != 0 {
			failed <- fmt.Errorf("becoming another user: %w, %w", err1, err2)
			return
		}
		f()
		failed <- nil
	}()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

// answered returns what a listener answers to another user who sends text, until it closes the
// connection. The error reports that connecting failed or that the connection stays open.
func answered(t *testing.T, network, at, text string) (answer []byte, refused error) {
	t.Helper()
	asAnother(t, func() {
		var c net.Conn
		if c, refused = net.Dial(network, at); refused != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(sandbox.Limit())
		_, _ = io.WriteString(c, text) // the connection may be closed
		answer, refused = io.ReadAll(c)
		if !errors.Is(refused, os.ErrDeadlineExceeded) {
			refused = nil
		}
	})
	return answer, refused
}

// withinTLS is answered over a TLS connection without a client certificate.
func withinTLS(t *testing.T, at, text string) (answer []byte) {
	t.Helper()
	asAnother(t, func() {
		raw, err := net.Dial("tcp", at)
		if err != nil {
			return
		}
		defer raw.Close()
		_ = raw.SetDeadline(sandbox.Limit())
		c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
		_, _ = io.WriteString(c, text)
		answer, _ = io.ReadAll(c)
	})
	return answer
}

// questions returns what a client of a PyTorch store sends to add 1 to a value, in both versions of
// the protocol, followed by the end of a line for servers that wait for one.
func questions() (all []string) {
	for _, older := range []bool{false, true} {
		var sent recorder
		if c, err := tcpstore.NewClient(&sent, older); err == nil {
			_, _ = c.Add(context.Background(), "stranger", 1)
		}
		all = append(all, sent.String()+"\r\n\r\n")
	}
	return all
}

// recorder is a connection that only records what is written.
type recorder struct {
	net.Conn
	strings.Builder
}

func (r *recorder) Write(b []byte) (int, error) { return r.Builder.Write(b) }

func (r *recorder) Read([]byte) (int, error) { return 0, io.EOF }

// unixListeners returns the unix sockets on which a process listens. Those that begin with @ are
// abstract: they are in no folder.
func unixListeners(t *testing.T, pid int) (paths []string) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", pid))
	if err != nil {
		return nil // it has ended
	}
	own := map[string]bool{}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil {
			own[to] = true
		}
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		const accepts = "00010000"
		if len(f) == 8 && f[3] == accepts && own["socket:["+f[6]+"]"] {
			paths = append(paths, f[7])
		}
	}
	return paths
}

// TestAnotherUser: no listener of a job, of torchrun or of their workers serves another user of the
// machine: not by HTTP, not as a client of a store, not by TLS without a certificate, and not by a
// unix socket. The test lists what is served to everybody.
func TestAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	job := start(t, Job{
		Flags: append(flags("-np", "2", "--min-np", "1", "--max-np", "3"), "--metrics-listen", "127.0.0.1:0", "--dashboard-listen", "127.0.0.1:0"),
		// A Go program trains, and a program that uses the socket protocol has a store.
		Command: []string{workerInC(t), "stop"}, Stages: []Stage{{Hosts: on(hostA, 2)}},
	})
	train := start(t, Job{Flags: flags("-np", "2", "--min-np", "1", "--encrypt-data"), Trainer: []string{"-steps", "100000", "-step-time", "10ms"}, Stages: []Stage{{Hosts: on(hostA, 2)}}})
	first := world(t, job, 0, 2)
	secrets := [][]byte{[]byte(statusOf(t, job).Job), []byte(strconv.Itoa(first.Slots[0].PID))}
	awaitWorld(t, train, 0, 2)
	torch, _ := background(t, "torchrun", "--nproc-per-node", "1", "--no-python", "sh", "-c", "exec sleep 1000 # another user's")
	processes := map[string][]int{"the job": append(job.Processes(), job.PID), "the trainer's": append(train.Processes(), train.PID), "torchrun": {torch.Process.Pid}}
	if !follow.Await(t, func() bool { return len(follow.Listening(torch.Process.Pid)) > 0 }) {
		t.Fatal("torchrun has no store")
	}

	public := map[string]int{} // what is served to everybody, by the first bytes of the answer
	listeners, sockets := 0, 0
	for of, pids := range processes {
		slices.Sort(pids)
		for _, pid := range slices.Compact(pids) {
			for _, path := range unixListeners(t, pid) {
				sockets++
				name := path
				if rest, is := strings.CutPrefix(path, "@"); is {
					name = "\x00" + rest
				}
				answer, err := answered(t, "unix", name, "GET / HTTP/1.1\r\n\r\n")
				if len(answer) > 0 || err != nil && !errors.Is(err, syscall.EACCES) {
					t.Errorf("%s, process %d, %s: %v, %q", of, pid, path, err, answer)
				}
			}
			for _, at := range follow.Listening(pid) {
				listeners++
				if at.Addr().IsUnspecified() {
					at = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), at.Port())
				}
				where := fmt.Sprintf("%s, process %d, %v", of, pid, at)
				for _, path := range []string{"/", "/metrics", "/api/view", "/api/stream", "/api/rights"} {
					text := "GET " + path + " HTTP/1.1\r\nHost: " + at.String() + "\r\nConnection: close\r\n\r\n"
					answer, err := answered(t, "tcp", at.String(), text)
					if err != nil {
						t.Errorf("%s: %v", where, err)
					}
					line, _, _ := bytes.Cut(answer, []byte("\r\n"))
					switch {
					case bytes.HasPrefix(answer, []byte("HTTP/1.1 200 ")) && path == "/metrics" && pid == job.PID:
						public["metrics"]++
					case bytes.HasPrefix(answer, []byte("HTTP/1.1 ")) && !bytes.HasPrefix(answer, []byte("HTTP/1.1 2")) && pid == job.PID:
						public[string(line)]++
						if slices.ContainsFunc(secrets, func(s []byte) bool { return bytes.Contains(answer, s) }) {
							t.Errorf("%s tells of the job: %s", where, answer)
						}
					case len(answer) > 0 && answer[0] != 0x15: // not a TLS alert
						t.Errorf("%s answers to %s: %q", where, path, answer)
					}
				}
				for _, text := range questions() {
					answer, err := answered(t, "tcp", at.String(), text)
					if err != nil || len(answer) == 8 && binary.NativeEndian.Uint64(answer) == 1 {
						t.Errorf("%s is a store for everybody: %v, %q", where, err, answer)
					}
				}
				if answer := withinTLS(t, at.String(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"); len(answer) > 0 {
					t.Errorf("%s answers within TLS: %q", where, answer)
				}
			}
		}
	}
	if public["metrics"] != 1 || len(public) < 3 {
		t.Errorf("served to everybody: %v", public)
	}
	// The listeners are those of the driver, the agents and the workers of two jobs, of the
	// metrics, the page, a worker's store and torchrun's store.
	if listeners < 9 || sockets < 2 {
		t.Errorf("only %d listeners and %d unix sockets were found", listeners, sockets)
	}
	for of, r := range map[string]*Running{"the job": job, "the trainer's": train} {
		text, err := os.ReadFile(r.OutputPath())
		if n := bytes.Count(text, []byte("WARN")); err != nil || n > 5 {
			t.Errorf("%s: %v, strangers have made %d warnings:\n%s", of, err, n, text)
		}
	}
	t.Logf("%d listeners, %d unix sockets; to everybody: %v", listeners, sockets, public)
	for _, r := range []*Running{job, train} {
		if s := statusOf(t, r); s.Generation != 1 {
			t.Errorf("the strangers have cost a world: generation %d", s.Generation)
		}
	}
	order(t, train, "being stopped", "stop")
	finish(t, train, 128+15, 100_000)
	order(t, job, "being stopped", "stop")
	if res, err := job.Wait(); err != nil || res.Status != 128+15 || len(res.Left) > 0 {
		t.Errorf("%v, status %d, left %q", err, res.Status, res.Left)
	}
}
