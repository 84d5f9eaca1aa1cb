package client

import (
	"net/netip"
	"os"
	"strings"
)

// Machine returns what Ready.Machine has of this process: the boot of its kernel, and the network
// that it sees, of which each container has its own.
func Machine() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	network, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + " " + network
}

// noteMachine warns where the host of an agent is a machine that another host is too: its slots,
// and their GPUs, would be used twice.
func (a *Agents) noteMachine(j *jobAgent) {
	if j.ready.Machine == "" || plainLocal(j.host) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.machines == nil {
		a.machines = make(map[string]string)
	}
	switch first := a.machines[j.ready.Machine]; first {
	case "":
		a.machines[j.ready.Machine] = j.host
	case j.host:
	default:
		a.cfg.Log.Warnf("hosts %s and %s are the same machine: workers of both get its devices from the first on, so that two share a GPU; "+
			"list it once, with all its slots", first, j.host)
	}
}

// plainLocal returns whether a name can only mean the machine on which it is used. Such names stand
// for several hosts where a person tries what several hosts do.
func plainLocal(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}
