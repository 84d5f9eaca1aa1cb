package e2e

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/test/follow"
	"github.com/hvdrun/hvdrun/test/steplog"
)

func TestListening(t *testing.T) {
	var want []string
	for _, addr := range []string{"127.0.0.2:0", "[::1]:0", "0.0.0.0:0"} {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			t.Logf("%s: %v", addr, err) // a machine can lack IPv6
			continue
		}
		defer ln.Close()
		at := ln.Addr().(*net.TCPAddr).AddrPort()
		want = append(want, netip.AddrPortFrom(at.Addr().Unmap(), at.Port()).String())
	}
	var got []string
	for _, at := range follow.Listening(os.Getpid()) {
		got = append(got, at.String())
	}
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("%s is not among %v", w, got)
		}
	}
}

// addresses returns the addresses on which the job's processes listen, by the kind of process.
func addresses(r *Running) map[string][]netip.Addr {
	found := map[string][]netip.Addr{}
	for _, pid := range append(r.Processes(), r.PID) {
		what := "worker"
		switch line := follow.CommandLine(pid); {
		case pid == r.PID:
			what = "driver"
		case strings.Contains(line, "agent --job"):
			what = "agent"
		}
		for _, at := range follow.Listening(pid) {
			found[what] = append(found[what], at.Addr())
		}
	}
	return found
}

// proceed creates the file for which a stage of the script waits.
func proceed(t *testing.T, r *Running, file string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(r.Dir, file), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestListensWhereNeeded: a job whose script lists only this machine listens only on loopback. When
// another machine is added, the workers that already run become reachable from there; with
// --listen, every listener stays at one address. The driver does not listen.
func TestListensWhereNeeded(t *testing.T) {
	s := server(t)
	far := []string{"--ssh-command", client(t, Host{Name: "far", Server: s}), "--remote-hvdrun", installed(t, s)}
	for name, test := range map[string]struct {
		flags  []string
		narrow netip.Addr
		wide   bool // other addresses follow
	}{
		"script":   {nil, netip.MustParseAddr("127.0.0.1"), true},
		"--listen": {[]string{"--listen", outward(t).String()}, outward(t), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, Job{
				Flags: flags(slices.Concat(test.flags, far, []string{"-np", "2", "--min-np", "2"})...),
				Stages: []Stage{
					{Hosts: on(hostA, 2)},
					{Step: 5, After: "narrow", Hosts: on(hostA, 2, "far", 1)},
					{Step: 10, After: "wide", Hosts: on(hostA, 2)},
				},
				Trainer: []string{"-hold", "5,10", "-steps", "15"},
			})
			awaitStep(t, r, 4)
			for what, all := range addresses(r) {
				for _, a := range all {
					if what == "driver" || a != test.narrow && !(test.flags != nil && a.IsLoopback()) {
						t.Errorf("the %s listens at %v, and all hosts are this machine", what, a)
					}
				}
			}
			proceed(t, r, "narrow")
			awaitStep(t, r, 8)
			now := addresses(r)
			outside := slices.ContainsFunc(now["worker"], func(a netip.Addr) bool { return a.IsUnspecified() })
			if outside != test.wide || len(now["driver"]) > 0 {
				t.Errorf("the workers listen at %v, the driver at %v, and there is another host", now["worker"], now["driver"])
			}
			proceed(t, r, "wide")
			res := finish(t, r, 0, 15)
			err := steplog.CheckWorlds(res.Lines, []steplog.World{
				{From: 1, To: 5, Generation: 1, Size: 2, Zero: "localhost:0", First: 0},
				{From: 6, To: 10, Generation: 2, Size: 3, Zero: "localhost:0", First: 0},
				{From: 11, To: 15, Generation: 3, Size: 2, Zero: "localhost:0", First: 0},
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// outward returns an address of this machine that is not loopback, or skips the test.
func outward(t *testing.T) netip.Addr {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && n.IP.To4() != nil {
			addr, _ := netip.AddrFromSlice(n.IP.To4())
			return addr
		}
	}
	t.Skip("this machine has loopback alone")
	return netip.Addr{}
}
