// Package netif describes the network interfaces of this host: which interface has an address, how
// fast its link is, and whether one may have gone down.
package netif

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Card is a network interface. The zero value is an unknown one.
type Card struct {
	Name string `json:"name"`
	// Bits is the speed of its link in bits per second; 0: unknown. Virtual interfaces have none:
	// the speed that the kernel reports for them means nothing.
	Bits int64 `json:"bits,omitempty"`
	// Up: the interface is on and has a link.
	Up bool `json:"up"`
}

// String returns the name and the speed of the link, such as "eth0 (25 Gbit/s)".
func (c Card) String() string {
	if c.Bits == 0 {
		return c.Name
	}
	return fmt.Sprintf("%s (%s)", c.Name, Rate(float64(c.Bits)))
}

// Rate formats bits per second, such as "25 Gbit/s" or "9.4 Gbit/s".
func Rate(bits float64) string {
	unit := "Mbit/s"
	if bits /= 1e6; bits >= 1000 {
		bits, unit = bits/1000, "Gbit/s"
	}
	digits := 1
	if bits >= 100 || bits == float64(int64(bits)) {
		digits = 0
	}
	return strconv.FormatFloat(bits, 'f', digits, 64) + " " + unit
}

// Own returns the addresses of this host with their interfaces, without the speeds of the links;
// nil if the kernel does not report them.
func Own() map[netip.Addr]Card {
	all, err := net.Interfaces()
	if err != nil {
		return nil
	}
	own := make(map[netip.Addr]Card)
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue // the interface has been removed
		}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok {
				if addr, ok := netip.AddrFromSlice(n.IP); ok {
					own[addr.Unmap()] = Card{Name: i.Name, Up: i.Flags&net.FlagUp != 0 && i.Flags&net.FlagRunning != 0}
				}
			}
		}
	}
	return own
}

// Of returns the interface of this host that has the address, or the zero value.
func Of(addr netip.Addr) Card {
	c := Own()[addr.Unmap()]
	c.Bits = bits("/sys", c.Name)
	return c
}

// bits returns the speed of an interface's link, according to the file system at root (/sys).
func bits(root, name string) int64 {
	if name == "" {
		return 0
	}
	dir := filepath.Join(root, "class/net", name)
	_, device := os.Stat(filepath.Join(dir, "device"))
	_, bond := os.Stat(filepath.Join(dir, "bonding"))
	if device != nil && bond != nil {
		return 0
	}
	text, err := os.ReadFile(filepath.Join(dir, "speed"))
	if err != nil {
		return 0 // it is down, or its driver does not report it
	}
	mega, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 32)
	if err != nil || mega <= 0 {
		return 0
	}
	return mega * 1_000_000
}

// Watch calls changed, in the calling goroutine, whenever the kernel reports that an interface or
// one of its addresses has changed. It blocks until ctx ends, and then returns nil. It returns an
// error if the kernel sends no reports to this process.
func Watch(ctx context.Context, changed func()) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netif: netlink: %w", err)
	}
	groups := uint32(unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR)
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return fmt.Errorf("netif: netlink: %w", err)
	}
	socket := os.NewFile(uintptr(fd), "netlink")
	stop := context.AfterFunc(ctx, func() { socket.Close() })
	defer func() {
		if stop() {
			socket.Close()
		}
	}()
	message := make([]byte, 16<<10)
	for {
		_, err := socket.Read(message) // its contents are ignored, since reports may be lost
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil, errors.Is(err, syscall.ENOBUFS):
			changed()
		default:
			return fmt.Errorf("netif: netlink: %w", err)
		}
	}
}
