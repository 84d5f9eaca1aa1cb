package proc

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// errStranger is returned by PeerBelow if neither root nor a process below it holds the other end.
var errStranger = errors.New("proc: the connection comes from a process that may not use this port")

// OwnPeer is like PeerBelow, with this process as the root.
func OwnPeer(conn net.Conn) error { return PeerBelow(conn, os.Getpid()) }

// PeerBelow returns nil if the process root, or one below it that it has started or inherited,
// holds the other end of a TCP connection. It reads /proc, and both ends must be on this machine.
func PeerBelow(conn net.Conn, root int) error {
	local, ok1 := conn.LocalAddr().(*net.TCPAddr)
	remote, ok2 := conn.RemoteAddr().(*net.TCPAddr)
	if !ok1 || !ok2 {
		return errStranger
	}
	inode, err := inodeOf(connection(remote.AddrPort(), local.AddrPort()))
	if err != nil {
		return err
	}
	own, ok := below([]int{root})
	if !ok {
		own = map[int]int{root: 0}
		for _, pid := range Descendants(root) {
			own[pid] = 0
		}
	}
	link := "socket:[" + inode + "]"
	for pid := range own {
		if holds(pid, link) {
			return nil
		}
	}
	return errStranger
}

// holds returns whether a process has a descriptor whose link in /proc is link.
func holds(pid int, link string) bool {
	dir := "/proc/" + strconv.Itoa(pid) + "/fd"
	fds, err := os.Open("/proc/" + strconv.Itoa(pid) + "/fd")
	if err != nil {
		return false
	}
	defer fds.Close()
	names, _ := fds.Readdirnames(-1)
	for _, name := range names {
		if to, err := os.Readlink(dir + "/" + name); err == nil && to == link {
			return true
		}
	}
	return false
}

// Listener returns the process of this machine that listens at a TCP address, or at all addresses
// with its port, and the file name of its program. pid is 0 if nobody listens, or if this process
// may not inspect the one that does. It reads /proc.
func Listener(addr netip.AddrPort) (pid int, program string) {
	inode, err := inodeOf(listening(addr))
	if err != nil {
		return 0, ""
	}
	for _, pid := range processIDs() {
		if holds(pid, "socket:["+inode+"]") {
			return pid, Program(pid)
		}
	}
	return 0, ""
}

// Program returns the file name of a process's program, or "" if it is unknown.
func Program(pid int) string {
	path, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe")
	if err != nil {
		return ""
	}
	return filepath.Base(strings.TrimSuffix(path, " (deleted)"))
}

// wanted selects a socket by its ends and its state in /proc/net/tcp.
type wanted func(near, far netip.AddrPort, state string) bool

// connection selects the socket with these ends.
func connection(near, far netip.AddrPort) wanted {
	near, far = unmapped(near), unmapped(far)
	return func(a, b netip.AddrPort, _ string) bool { return a == near && b == far }
}

// listening selects a socket that listens at the address, or at all addresses with its port.
func listening(addr netip.AddrPort) wanted {
	const listens = "0A"
	addr = unmapped(addr)
	return func(near, _ netip.AddrPort, state string) bool {
		return state == listens && near.Port() == addr.Port() && (near.Addr() == addr.Addr() || near.Addr().IsUnspecified())
	}
}

// inodeOf returns the inode number of the selected socket of this machine.
func inodeOf(is wanted) (string, error) {
	for _, table := range []string{"tcp", "tcp6"} {
		f, err := os.Open("/proc/self/net/" + table)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("proc: %w", err)
		}
		inode := findInode(f, is)
		f.Close()
		if inode != "" {
			return inode, nil
		}
	}
	return "", errStranger
}

// findInode reads lines as "sl local rem st tx:rx tr:when retrnsmt uid timeout inode …".
func findInode(table *os.File, is wanted) string {
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		fields := bytes.Fields(lines.Bytes())
		if len(fields) < 10 || len(fields[1]) < 13 {
			continue
		}
		near, ok := parseEnd(fields[1])
		if !ok {
			continue
		}
		if far, ok := parseEnd(fields[2]); ok && string(fields[9]) != "0" && is(near, far, string(fields[3])) {
			return string(fields[9])
		}
	}
	return ""
}

func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// parseEnd parses an address such as 0100007F:1F90: words in the machine's byte order, and the
// port.
func parseEnd(text []byte) (netip.AddrPort, bool) {
	words, portText, _ := bytes.Cut(text, []byte(":"))
	raw := make([]byte, hex.DecodedLen(len(words)))
	if _, err := hex.Decode(raw, words); err != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	addr, ok := netip.AddrFromSlice(raw)
	port, err := strconv.ParseUint(string(portText), 16, 16)
	return unmapped(netip.AddrPortFrom(addr, uint16(port))), ok && err == nil
}

// Below returns whether a process is the root, or below it with all processes between them alive.
func Below(pid, root int) bool {
	for steps := 0; pid > 1 && steps < 1<<16; steps++ {
		if pid == root {
			return true
		}
		parent, ok := parentOf(pid)
		if !ok {
			return false
		}
		pid = parent
	}
	return false
}
