package client

import (
	"net/netip"
	"os"
	"strings"
)

// Machine returns the value of Ready.Machine for this process: the kernel's boot id and the network
// namespace, which differs from container to container.
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

// noteMachine warns if the agent's host is the same machine as another host: both would use the
// same slots and GPUs.
func (a *Agents) noteMachine(j *jobAgent) {
	if j.ready.Machine == "" || plainLocal(j.host) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch first := a.machines[j.ready.Machine]; first {
	case "":
		a.machines[j.ready.Machine] = j.host
	case j.host:
	default:
		a.cfg.Log.Warnf("hosts %s and %s are the same machine: workers of both get its devices from the first on, so that two share a GPU; "+
			"list it once, with all its slots", first, j.host)
	}
}

// plainLocal returns whether the name is localhost or a loopback address. In a trial on one machine
// several such names may stand for several hosts.
func plainLocal(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}
