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
	"strconv"
)

// ErrStranger is returned by PeerBelow for a connection of another process.
var ErrStranger = errors.New("proc: the connection is not of a process that this one has started")

// OwnPeer is PeerBelow of this process.
func OwnPeer(conn net.Conn) error { return PeerBelow(conn, os.Getpid()) }

// PeerBelow returns nil if the other end of a TCP connection is held by the process root or by one
// below it, which it has started or inherited. It reads /proc, and the connection must be of this
// machine.
func PeerBelow(conn net.Conn, root int) error {
	local, ok1 := conn.LocalAddr().(*net.TCPAddr)
	remote, ok2 := conn.RemoteAddr().(*net.TCPAddr)
	if !ok1 || !ok2 {
		return ErrStranger
	}
	inode, err := inodeOf(remote.AddrPort(), local.AddrPort())
	if err != nil {
		return err
	}
	own, ok := below([]int{root})
	if !ok {
		own = belowOf(root, processes())
	}
	link := "socket:[" + inode + "]"
	for pid := range own {
		if holds(pid, link) {
			return nil
		}
	}
	return ErrStranger
}

// belowOf returns those of the processes that are below the root, and the root.
func belowOf(root int, parents map[int]int) map[int]int {
	own := map[int]int{root: 0}
	for pid := range parents {
		for at, steps := pid, 0; at > 1 && steps < len(parents); steps++ {
			if at == root {
				own[pid] = parents[pid]
				break
			}
			at = parents[at]
		}
	}
	return own
}

// holds returns whether a process has a descriptor that is that link in /proc.
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

// inodeOf returns the number of the socket of this machine with those ends.
func inodeOf(near, far netip.AddrPort) (string, error) {
	for _, table := range []string{"tcp", "tcp6"} {
		f, err := os.Open("/proc/self/net/" + table)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("proc: %w", err)
		}
		inode := findInode(f, near, far)
		f.Close()
		if inode != "" {
			return inode, nil
		}
	}
	return "", ErrStranger
}

// findInode reads lines as "sl local rem st tx:rx tr:when retrnsmt uid timeout inode …".
func findInode(table *os.File, near, far netip.AddrPort) string {
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		fields := bytes.Fields(lines.Bytes())
		if len(fields) < 10 || len(fields[1]) < 13 {
			continue
		}
		if a, ok := parseEnd(fields[1]); !ok || a != unmapped(near) {
			continue
		}
		if b, ok := parseEnd(fields[2]); ok && b == unmapped(far) && string(fields[9]) != "0" {
			return string(fields[9])
		}
	}
	return ""
}

func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// parseEnd reads an address as 0100007F:1F90: words in the byte order of the machine, and the port.
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

// Below returns whether a process is the root, or one that is below it and whose parents are alive.
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
