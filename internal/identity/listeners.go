package identity

import (
	"net"
	"time"
)

// Bounds describes the listeners of one kind: their process, which peers they admit, and what a
// connection may cost before it is authenticated. testdata/listeners.txt is generated from All.
type Bounds struct {
	// Name is the listener's purpose, Process its process, and Address its address, unless --listen
	// or another setting changes it.
	Name, Process, Address string
	// Admits describes the proof that a connection must give.
	Admits string
	// Unproven is the maximum number of connections that have not given the proof yet. Together
	// they use at most a quarter of the process's descriptors.
	Unproven int
	// Bytes bounds what is read from one unproven connection, and Total from all together. Total 0:
	// Unproven times Bytes.
	Bytes, Total int64
	// Deadline is how long a connection may be without a proof.
	Deadline time.Duration

	network Network
}

// On returns the bounds for listeners of a network.
func (b Bounds) On(n Network) Bounds {
	b.network = n
	return b
}

const (
	// HandshakeTime bounds TLS handshakes. Hundreds of processes on one CPU need many seconds, and
	// each abandoned attempt costs as much as the first.
	HandshakeTime = 20 * time.Second
	// helloBytes is several times the size of what a client sends in a handshake.
	helloBytes = 16 << 10
)

// The listeners of a job and of a cluster.
var (
	// Data accepts connections from all other workers. Unproven and Deadline grow with the world:
	// see package collective.
	Data = Bounds{
		Name: "data", Process: "worker", Address: "loopback; other addresses once a host is another machine",
		Admits:   "members of the same world: proof of its key, with --encrypt-data within TLS 1.3",
		Unproven: 256, Bytes: helloBytes, Deadline: 5 * time.Second,
	}
	// Drivers accepts the drivers of an agent.
	Drivers = Bounds{
		Name: "drivers", Process: "agent", Address: "loopback for an agent that its driver has started on its own machine; else all addresses",
		Admits: "drivers of the job or the cluster: TLS 1.3, certificate of its authority", Unproven: 128, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// Door serves workers that do not use the sockets they inherit.
	Door = Bounds{
		Name: "workers", Process: "agent; driver that starts workers without an agent", Address: "the address at which the driver has reached the agent; loopback",
		Admits:   "workers of the job on this machine: TLS 1.3, certificate of the job's authority, ticket of a worker",
		Unproven: 256, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// Gossip must read a whole message before it can authenticate it: the state of a cluster of
	// 2,000 members takes less than 2 MiB.
	Gossip = Bounds{
		Name: "gossip", Process: "agent, driver with --gossip-join or --slurm", Address: "all addresses; port 7946 for an agent",
		Admits:   "members of the cluster: messages encrypted with the gossip key; packets over UDP are dropped one by one",
		Unproven: 256, Bytes: 2 << 20, Total: 4 << 20, Deadline: 10 * time.Second,
	}
	// Enrollment accepts agents that enroll or renew their certificates.
	Enrollment = Bounds{
		Name: "enrollment", Process: "hvdrun cluster serve", Address: "all addresses",
		Admits:   "agents of the cluster, and holders of a join token: TLS 1.3, certificate of either",
		Unproven: 128, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// TorchWorkers is an agent's store for its workers under hvdrun torchrun.
	TorchWorkers = Bounds{
		Name: "torchrun's workers", Process: "hvdrun torchrun", Address: "loopback",
		Admits:   "the agent's workers and what they start: whose socket it is, by /proc",
		Unproven: 256, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// WorkerStore is the driver's store for a program that uses its worker's socket.
	WorkerStore = Bounds{
		Name: "store of a worker", Process: "agent, or driver for its own machine, once a worker has said hello by its socket", Address: "loopback",
		Admits:   "the worker and what it starts: whose socket it is, by /proc",
		Unproven: 64, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// TorchPeers connects agents of hvdrun torchrun to each other's stores.
	TorchPeers = Bounds{
		Name: "torchrun's agents", Process: "hvdrun torchrun, on several nodes", Address: "all addresses, or --local-addr",
		Admits:   "agents of the job: TLS 1.3, certificate by the key of key_file; anyone with insecure=true",
		Unproven: 128, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// TorchHealth requires no proof: the deadline ends each connection.
	TorchHealth = Bounds{
		Name: "torchrun's health", Process: "hvdrun torchrun, where it is asked for", Address: "loopback, or --health-check-addr",
		Admits:   "anyone: it says that the agent is alive, and closes",
		Unproven: 16, Bytes: 4 << 10, Deadline: 10 * time.Second,
	}
	// Metrics requires no proof: each connection serves one scrape, and the deadline ends it.
	Metrics = Bounds{
		Name: "metrics", Process: "driver and agent with --metrics-listen", Address: "loopback where a port alone is given",
		Admits:   "anyone who reaches it, as Prometheus expects: numbers, host names and the run id; with --metrics-token-file, holders of that token",
		Unproven: 32, Bytes: 16 << 10, Deadline: 20 * time.Second,
	}
	// TaskClients is a unix socket in the job's folder.
	TaskClients = Bounds{
		Name: "clients of tasks", Process: "driver", Address: "unix socket in the job's folder, mode 0600",
		Admits: "processes of the same user and of root: SO_PEERCRED", Unproven: 16, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// TaskGateway accepts programs on other machines that submit tasks.
	TaskGateway = Bounds{
		Name: "clients of tasks elsewhere", Process: "hvdrun tasks gateway", Address: "the one that is given",
		Admits: "holders of an invitation: TLS 1.3, certificate of the job's authority", Unproven: 128, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// Values provides the stored values of a worker's host.
	Values = Bounds{
		Name: "values of tasks", Process: "worker that runs tasks", Address: "the address that is used towards its launcher",
		Admits: "workers and the driver of the job: TLS 1.3, certificate of the job's authority", Unproven: 128, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// Dashboard serves the page to browsers. The first request with a token counts as a
	// connection's proof.
	Dashboard = Bounds{
		Name: "dashboard", Process: "hvdrun dashboard, driver with --dashboard-listen", Address: "loopback, or --listen and --dashboard-listen, with TLS",
		Admits: "browsers with a token of the page, for watching or for steering", Unproven: 64, Bytes: helloBytes, Deadline: HandshakeTime,
	}
	// Control is a unix socket in the job's folder.
	Control = Bounds{
		Name: "control", Process: "driver", Address: "unix socket in the job's folder, mode 0600",
		Admits: "processes of the same user and of root: SO_PEERCRED", Unproven: 16, Bytes: helloBytes, Deadline: HandshakeTime,
	}
)

// Listen listens on a TCP address, as net.Listen does. The caller must call Close.
func (b Bounds) Listen(addr string) (*Listener, error) {
	l := b.Listener()
	if _, err := l.Open(addr); err != nil {
		return nil, err
	}
	return l, nil
}

// Guard bounds the connections of a listener. Close closes that listener.
func (b Bounds) Guard(ln net.Listener) *Listener {
	l := b.Listener()
	_ = l.add(ln) // fails only after Close
	return l
}

// Listener returns a listener without an address; Open adds one.
func (b Bounds) Listener() *Listener {
	return &Listener{Pending: NewPending(b), network: b.network, conns: make(chan *Conn), failed: make(chan error), done: make(chan struct{})}
}
