//go:build netns

package netns

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestPoorNetworks: workers of one machine connect if it has only one address family, or cannot
// resolve any name.
func TestPoorNetworks(t *testing.T) {
	for name, c := range map[string]struct {
		before string // in the namespaces of the network, of mounts and of names
		hosts  []string
	}{
		"IPv6 alone":       {"ip addr del 127.0.0.1/8 dev lo", nil},
		"IPv6 by address":  {"ip addr del 127.0.0.1/8 dev lo", []string{"-H", "[::1]:2"}},
		"IPv4 alone":       {"ip addr del ::1/128 dev lo", nil},
		"no names":         {"hostname box-77.unknown; mount --bind /dev/null /etc/hosts; mount --bind $0/resolv.conf /etc/resolv.conf", []string{"-H", "box-77.unknown:2"}},
		"a short own name": {"hostname box-77.unknown; mount --bind /dev/null /etc/hosts; mount --bind $0/resolv.conf /etc/resolv.conf", []string{"-H", "box-77:2"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			args := []string{"--net", "--mount", "--uts", "sh", "-ec",
				"ip link set lo up; echo nameserver 203.0.113.1 >$0/resolv.conf; " + c.before + `; exec "$@"`, dir, binaries.Hvdrun, "-np", "2"}
			args = append(append(args, c.hosts...), binaries.Trainer, "-log", filepath.Join(dir, "steplog"), "-dir", dir, "-steps", "3")
			out, err := exec.CommandContext(t.Context(), "unshare", args...).CombinedOutput()
			if n := bytes.Count(out, []byte("size=2 step=3 ")); err != nil || n != 2 {
				t.Errorf("%v, %d workers have met\n%s", err, n, out)
			}
		})
	}
}
