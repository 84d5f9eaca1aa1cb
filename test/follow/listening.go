package follow

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Listening returns the TCP addresses on which a process listens, in its network namespace.
func Listening(pid int) (all []netip.AddrPort) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	own := map[string]bool{}
	fds, _ := filepath.Glob(dir + "/fd/*") // none: it has ended
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil {
			own[to] = true
		}
	}
	for _, table := range []string{"/net/tcp", "/net/tcp6"} {
		text, _ := os.ReadFile(dir + table)
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			const listening = "0A"
			if len(f) < 10 || f[3] != listening || !own["socket:["+f[9]+"]"] {
				continue
			}
			if at, ok := parseAddr(f[1]); ok {
				all = append(all, at)
			}
		}
	}
	return all
}

// parseAddr parses an address of /proc/net/tcp: words of 32 bits in the order of this machine.
func parseAddr(text string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(text, ":")
	b, err1 := hex.DecodeString(host)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if err1 != nil || err2 != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.BigEndian.PutUint32(b[i:], binary.NativeEndian.Uint32(b[i:]))
	}
	addr, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), ok
}
