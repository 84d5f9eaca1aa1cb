package crowd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/agent/client"
)

// A connection between the driver's process and a host's process carries JSON objects: first a
// client.Hello and a client.Ready, then orders and news.

// order is a message from the driver's process to a host's process.
type order struct {
	// Whole is the generation of a world that all members have received. Over is the generation of
	// a world that all members must leave, because some have died or because of an update.
	Whole uint64 `json:",omitempty"`
	Over  uint64 `json:",omitempty"`
	// Kill, if not 0, kills at once each worker whose rank in the world Over is a multiple of it.
	Kill int `json:",omitempty"`
}

// news is a message from a host's process. World is the generation of a world of Size members.
// Members of them on this host have received it, the last at At, in nanoseconds since 1970, and
// Committed have reported a commit. If Heard is set, all members on the host have received this
// update.
type news struct {
	World                    uint64
	Size, Members, Committed int
	Heard                    uint64
	At                       int64
}

// fleet is the processes of all hosts. It implements client.Starter.
type fleet struct {
	hosts int // number of hosts once all are started

	// told receives news about all hosts together: all members have received World, or have
	// committed in it, or have received the update Heard.
	told chan news

	mu        sync.Mutex
	begun     int // processes that were started
	processes []*process
	muster    muster
	listening sync.WaitGroup
}

// process is the process of a host.
type process struct {
	host string
	cmd  *exec.Cmd
	conn net.Conn
	dec  *json.Decoder
	err  error // the error that ended its news; nil: the process has ended

	sending sync.Mutex
	enc     *json.Encoder
}

// muster collects what the hosts have reported of the newest world.
type muster struct {
	world     uint64
	size      int
	whole     bool              // all members have received it
	committed bool              // and reported a commit
	of        map[*process]news // the last news of each
	heard     map[*process]news // the last news of each with Heard
}

func newFleet(hosts int) *fleet { return &fleet{hosts: hosts, told: make(chan news, 64)} }

// Start implements client.Starter.
func (f *fleet) Start(ctx context.Context, host string, hello client.Hello) (ready client.Ready, err error) {
	p, at, err := f.start(host)
	if err != nil {
		return ready, err
	}
	defer context.AfterFunc(ctx, func() { _ = p.cmd.Process.Kill() })()
	hello.Version, hello.Listen = client.HelloVersion, at.String()
	if err = p.enc.Encode(hello); err == nil {
		err = p.dec.Decode(&ready)
	}
	if err != nil {
		_ = p.cmd.Process.Kill()
		return ready, fmt.Errorf("the process of %s: %w", host, errors.Join(err, p.cmd.Wait(), p.conn.Close()))
	}
	ready.Addresses = []string{hello.Listen}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.processes = append(f.processes, p)
	f.listening.Go(func() { p.err = errors.Join(f.listen(p), p.cmd.Wait()) })
	return ready, nil
}

// start starts the process of a host, and returns the host's address.
func (f *fleet) start(host string) (p *process, at netip.Addr, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	near, far, err := ends()
	if err != nil {
		return nil, at, err
	}
	defer far.Close()
	conn, err := connOf(near)
	if err != nil {
		return nil, at, err
	}
	p = &process{host: host, conn: conn, dec: json.NewDecoder(conn), enc: json.NewEncoder(conn)}
	if p.cmd, err = self(far, f.hosts); err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		return nil, at, errors.Join(err, conn.Close())
	}
	f.begun++
	return p, netip.AddrFrom4([4]byte{127, 1, byte(f.begun >> 8), byte(f.begun)}), nil
}

// descriptors returns how many of this process's descriptors belong to the fleet and not to the
// driver: a connection and a pidfd for the process of each host.
func (f *fleet) descriptors() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return 2 * len(f.processes)
}

// ends returns the two ends of a connection.
func ends() (near, far *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "near"), os.NewFile(uintptr(fds[1]), "far"), nil
}

// connOf returns the connection of which f is one end. It closes f.
func connOf(f *os.File) (net.Conn, error) {
	defer f.Close() // FileConn has its own descriptor
	return net.FileConn(f)
}

// close ends the processes that have no agent's session, and waits until all have ended; the others
// end with their session.
func (f *fleet) close() error {
	var all []error
	for _, p := range f.processes {
		all = append(all, p.conn.(*net.UnixConn).CloseWrite())
	}
	f.listening.Wait()
	for _, p := range f.processes {
		all = append(all, p.err, p.conn.Close())
	}
	return errors.Join(all...)
}

// processor returns the CPU time of the processes, which have ended.
func (f *fleet) processor() (sum time.Duration) {
	for _, p := range f.processes {
		sum += p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
	}
	return sum
}

// listen handles the news of a host until its process has closed the connection.
func (f *fleet) listen(p *process) error {
	for {
		var n news
		if err := p.dec.Decode(&n); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := f.hear(p, n); err != nil {
			return err
		}
	}
}

// hear records what a host has reported of a world, sends the order that follows from it, and
// delivers the news about all hosts.
func (f *fleet) hear(p *process, n news) error {
	f.mu.Lock()
	all, o := f.muster.take(p, n)
	f.mu.Unlock()
	if all == (news{}) {
		return nil
	}
	if o != (order{}) {
		if err := f.sendAll(o); err != nil {
			return err
		}
	}
	f.told <- all
	return nil
}

// take records a host's news. It returns the news about all hosts and the order that follows, or
// the zero news if some hosts have not reported yet.
func (m *muster) take(p *process, n news) (all news, o order) {
	if n.World > m.world {
		*m = muster{world: n.World, size: n.Size, of: make(map[*process]news), heard: make(map[*process]news)}
	}
	switch {
	case n.World < m.world:
		return news{}, o
	case n.Heard > 0:
		return m.takeHeard(p, n)
	}
	m.of[p] = n
	for _, of := range m.of {
		all.Members += of.Members
		all.Committed += of.Committed
		all.At = max(all.At, of.At)
	}
	all.World, all.Size = n.World, n.Size
	switch {
	case !m.whole && all.Members == n.Size:
		m.whole = true
		return all, order{Whole: n.World}
	case !m.committed && all.Committed == n.Size:
		m.committed = true
		return all, o
	}
	return news{}, o
}

func (m *muster) takeHeard(p *process, n news) (all news, o order) {
	m.heard[p], all.Heard = n, n.Heard
	for member := range m.of {
		h := m.heard[member]
		if h.Heard == 0 {
			return news{}, o
		}
		all.Heard, all.At = min(all.Heard, h.Heard), max(all.At, h.At)
	}
	return all, order{Over: n.World}
}

func (p *process) send(o order) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return p.enc.Encode(o)
}

func (f *fleet) sendAll(o order) error {
	f.mu.Lock()
	all := f.processes[:len(f.processes):len(f.processes)]
	f.mu.Unlock()
	for _, p := range all {
		if err := p.send(o); err != nil {
			return fmt.Errorf("the process of %s: %w", p.host, err)
		}
	}
	return nil
}

// kill makes every n-th worker end as if killed, where n is the argument one, and returns the
// number of the others. These notice the deaths at once, as peers in training do.
func (f *fleet) kill(one int) (left int, err error) {
	f.mu.Lock()
	world, size := f.muster.world, f.muster.size
	f.mu.Unlock()
	return size - (size+one-1)/one, f.sendAll(order{Over: world, Kill: one})
}

// members returns how many members of the newest world are on the hosts from first on, in the order
// of their names.
func (f *fleet) members(first string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for p, of := range f.muster.of {
		if p.host >= first {
			n += of.Members
		}
	}
	return n
}
