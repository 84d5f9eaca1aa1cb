package main

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// narrow moves this thread, and the processes that it starts later, into a network namespace in
// which connections have buffers of this number of bytes. It needs CAP_SYS_ADMIN.
func narrow(bytes int) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("no network namespace: %w", err)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo); err != nil {
		return err
	}
	lo.SetUint32(uint32(max(1500, bytes/8))) // so that a window holds several packets, as on a real network
	if err := unix.IoctlIfreq(s, unix.SIOCSIFMTU, lo); err != nil {
		return err
	}
	sizes := []byte(fmt.Sprintf("%d %d %d", min(bytes, 4096), bytes, bytes))
	for _, name := range []string{"tcp_wmem", "tcp_rmem"} {
		if err := os.WriteFile("/proc/sys/net/ipv4/"+name, sizes, 0); err != nil {
			return err
		}
	}
	return nil
}

// socket is a TCP connection in /proc.
type socket struct {
	local, remote  string
	unsent, unread int // bytes
}

// parseSockets parses /proc/PID/net/tcp: established connections by inode.
func parseSockets(text string) map[string]socket {
	all := map[string]socket{}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 || f[3] != "01" {
			continue
		}
		unsent, unread, _ := strings.Cut(f[4], ":")
		number := func(text string) int {
			n, _ := strconv.ParseInt(text, 16, 64)
			return int(n)
		}
		all[f[9]] = socket{f[1], f[2], number(unsent), number(unread)}
	}
	return all
}

// queues lists the connections between ranks with unread or unsent bytes.
func (c *crew) queues() string {
	type end struct {
		rank int
		socket
	}
	byLocal := map[string]end{}
	for _, m := range c.ranks {
		dir := fmt.Sprintf("/proc/%d", m.cmd.Process.Pid)
		text, err := os.ReadFile(dir + "/net/tcp")
		if m.gone || err != nil {
			continue
		}
		all := parseSockets(string(text))
		files, _ := os.ReadDir(dir + "/fd")
		for _, f := range files {
			target, _ := os.Readlink(dir + "/fd/" + f.Name())
			inode := strings.TrimSuffix(strings.TrimPrefix(target, "socket:["), "]")
			if s, is := all[inode]; is {
				byLocal[s.local+s.remote] = end{m.rank, s}
			}
		}
	}
	var lines []string
	for _, e := range byLocal {
		if peer, known := byLocal[e.remote+e.local]; known && e.unsent+peer.unread > 0 {
			lines = append(lines, fmt.Sprintf("connection from rank %d to %d: %d bytes unsent or under way, %d unread\n", e.rank, peer.rank,
				e.unsent, peer.unread))
		}
	}
	if lines == nil {
		return "no connection between ranks holds bytes: what is unsent is in the ranks\n"
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}
