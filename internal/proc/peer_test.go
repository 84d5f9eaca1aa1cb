package proc

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestOwnPeer: connections of this process and of its children are accepted; another process's
// connection is not.
func TestOwnPeer(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "[::1]:0", "[::]:0"} {
		t.Run(at, func(t *testing.T) {
			ln, err := net.Listen("tcp", at)
			if err != nil {
				t.Skip(err)
			}
			defer ln.Close()
			_, port, _ := net.SplitHostPort(ln.Addr().String())
			host := "127.0.0.1"
			if at == "[::1]:0" {
				host = "::1"
			}
			own, err := net.Dial("tcp", net.JoinHostPort(host, port))
			if err != nil {
				t.Fatal(err)
			}
			defer own.Close()
			accepted, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer accepted.Close()
			if err := OwnPeer(accepted); err != nil {
				t.Errorf("of this process: %v", err)
			}
			if err := OwnPeer(own); err != nil {
				t.Errorf("the accepting end: %v", err)
			}
			if host != "127.0.0.1" {
				return
			}
			child := exec.Command("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/"+port+"; echo; read line")
			hold, err := child.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := child.Start(); err != nil {
				t.Fatal(err)
			}
			of, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer of.Close()
			if err := OwnPeer(of); err != nil {
				t.Errorf("of a child: %v", err)
			}
			hold.Close()
			_ = child.Wait()
			if err := OwnPeer(of); !errors.Is(err, errStranger) {
				t.Errorf("of a process that has gone: %v", err)
			}
		})
	}
}

// TestFindInode tests rows of IPv4, of IPv6, and an IPv4 address in an IPv6 row.
func TestFindInode(t *testing.T) {
	const rows = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 0100007F:A001 01 00000000:00000000 00:00000000 00000000  1000        0 11 1
   1: 0100007F:A001 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 22 1
   2: 0000000000000000FFFF00000100007F:A002 0000000000000000FFFF00000100007F:1F90 01 0:0 0:0 0  1000 0 33 1
   3: 00000000000000000000000001000000:A003 00000000000000000000000001000000:1F90 01 0:0 0:0 0  1000 0 44 1
   4: 0100007F:A004 0100007F:1F90 06 0:0 0:0 0  0 0 0 1
   5: 0100007F:1F90 00000000:0000 0A 0:0 0:0 0  0 0 55 1
   6: 00000000000000000000000000000000:1F91 00000000000000000000000000000000:0000 0A 0:0 0:0 0  0 0 66 1
`
	path := t.TempDir() + "/tcp"
	if err := os.WriteFile(path, []byte(rows), 0o600); err != nil {
		t.Fatal(err)
	}
	for from, want := range map[string]string{
		"127.0.0.1:40961": "22", "127.0.0.1:40962": "33", "[::1]:40963": "44", "127.0.0.1:40964": "", "127.0.0.1:1": "",
	} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		to := "127.0.0.1:8080"
		if strings.HasPrefix(from, "[") {
			to = "[::1]:8080"
		}
		got := findInode(f, connection(addrPort(t, from), addrPort(t, to)))
		f.Close()
		if got != want {
			t.Errorf("%s: %q, want %q", from, got, want)
		}
	}
	for at, want := range map[string]string{"127.0.0.1:8080": "55", "127.0.0.2:8080": "", "127.0.0.2:8081": "66", "[::1]:8081": "66", "127.0.0.1:40961": ""} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		got := findInode(f, listening(addrPort(t, at)))
		f.Close()
		if got != want {
			t.Errorf("who listens at %s: %q, want %q", at, got, want)
		}
	}
}

// TestListener: the process that listens at an address is found, with the name of its program.
func TestListener(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := addrPort(t, ln.Addr().String())
	if pid, program := Listener(at); pid != os.Getpid() || program != Program(os.Getpid()) || program == "" {
		t.Errorf("process %d, %q", pid, program)
	}
	ln.Close()
	if pid, _ := Listener(at); pid != 0 {
		t.Errorf("process %d listens, and it has ended that", pid)
	}
}

func addrPort(t *testing.T, text string) netip.AddrPort {
	t.Helper()
	a, err := netip.ParseAddrPort(text)
	if err != nil {
		t.Fatal(err)
	}
	return a
}
