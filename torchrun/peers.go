package torchrun

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/tcpstore"
)

// Peers connects the agents of a job to each other's stores: over TCP with mutual TLS, with
// credentials that all agents derive from one key. The caller must call Close.
type Peers struct {
	// Host is the name or the address at which other nodes reach this one. Empty: the address on
	// which it listens, or Route if it listens on all addresses.
	Host string
	// Route is the address from which this machine reaches the others.
	Route string

	life  string          // differs for each process
	alive context.Context // ends when this node leaves for good
	end   context.CancelFunc
	creds *identity.Credentials // nil: nobody is authenticated
	log   logrus.FieldLogger
	ln    *identity.Listener // nil: this node only dials

	moving *movingStore // the store of a dynamic rendezvous, set by Meet; nil: none, or another one

	mu      sync.Mutex
	answers map[service]*answer
	conns   map[net.Conn]bool
	lives   map[string]*watchedLife // by name of the member
	closed  bool
	idle    *sync.Cond // uses mu; signals that conns has become empty
	wg      sync.WaitGroup
}

// service is what an agent requests from another when it connects: its highest byte is the kind,
// and the rest a number whose meaning depends on the kind.
type service uint64

type kind uint8

// The kinds of services, followed by the meaning of their numbers. No kind equals the first byte
// that a client of a TCPStore sends.
const (
	workersStore kind = 0x80 + iota // the store of a round's workers; the round
	agentsStore                     // the store that agents of a static rendezvous share, for the life of an agent; its node
	agentsWatch                     // the same store, for further connections
	attendance                      // how the node with rank 0 of a round and the others notice each other's end; the round
	agentLife                       // a connection that stays open as long as an agent lives: see serveLife
	versionStore                    // the store with versions of a dynamic rendezvous
	leaderIs                        // informs an agent at the endpoint which agent has that store
	storeCopy                       // a node's copy of that store
	journalCopy                     // a node's copy of the job's journal
)

func (k kind) of(number int) service { return service(k)<<56 | service(number) }

func (s service) kind() kind { return kind(s >> 56) }

// dialTimeout bounds one attempt to connect to another agent.
const dialTimeout = 20 * time.Second

// helloTimeout is how long an agent that has accepted a connection may take to send its first
// answer.
const helloTimeout = 5 * time.Second

// NewPeers returns the Peers of the job with the given run id, whose agents all have the key.
// Without a key, anyone who reaches the agents' ports is admitted, and can read and change the
// stores. NewPeers does not listen.
func NewPeers(key []byte, runID, host string, log logrus.FieldLogger) (*Peers, error) {
	p := &Peers{Host: host, life: rand.Text(), log: log,
		answers: make(map[service]*answer), conns: make(map[net.Conn]bool), lives: make(map[string]*watchedLife)}
	p.alive, p.end = context.WithCancel(context.Background())
	p.idle = sync.NewCond(&p.mu)
	if key == nil {
		return p, nil
	}
	authority, err := identity.ForCluster(key, "torchrun")
	if err != nil {
		return nil, err
	}
	p.creds, err = authority.Issue(identity.Subject{RunID: runID, Role: identity.Driver})
	return p, err
}

// Listen serves the stores at an address. It may be called only once. If the address's host is a
// name that this machine resolves only to loopback, as with Debian's /etc/hosts, it listens on all
// addresses, and tells other nodes the name, which they resolve to another address.
func (p *Peers) Listen(addr string) (net.Addr, error) {
	if host, port, err := net.SplitHostPort(addr); err == nil && IsLoopbackName(host) {
		addr = net.JoinHostPort("", port)
		p.Host = cmp.Or(p.Host, host)
	}
	ln, err := identity.TorchPeers.Listen(addr)
	if err != nil {
		return nil, fmt.Errorf("torchrun: listening for other nodes: %w", err)
	}
	p.mu.Lock()
	p.ln = ln
	p.mu.Unlock()
	p.wg.Go(func() { ln.Serve(p.log, "torchrun", p.serve) })
	return ln.Addr(), nil
}

// serve authenticates the other end of a connection, and serves the service that it requests.
func (p *Peers) serve(raw *identity.Conn) {
	defer raw.Close()
	var conn net.Conn = raw
	if p.creds != nil {
		secure := tls.Server(raw, p.creds.ServerTLS(identity.Driver))
		if err := secure.Handshake(); err != nil {
			p.ln.WarnRefused(p.log, "torchrun", raw.RemoteAddr(), refused(err))
			return
		}
		conn = secure
	}
	var hello [8]byte
	if _, err := io.ReadFull(conn, hello[:]); err != nil || !raw.Proven() {
		return
	}
	if tcpstore.IsQuery(hello[:]) {
		p.ln.WarnRefused(p.log, "torchrun", raw.RemoteAddr(), errTorch)
		return
	}
	of := service(binary.BigEndian.Uint64(hello[:]))
	if of.kind() == agentLife {
		keepAlive(raw)
		p.serveLife(conn)
		return
	}
	a := p.answerTo(of)
	if a == nil {
		return
	}
	defer a.serving.Done()
	if !p.keep(raw) {
		return
	}
	defer p.forget(raw)
	keepAlive(raw)
	logServed(p.log, fmt.Sprintf("the connection of %v", raw.RemoteAddr()), a.serve(conn))
}

// logServed logs why a store has ended a connection, because the other end sees only the end. It
// does not warn about a failed connection.
func logServed(log logrus.FieldLogger, what string, err error) {
	var network net.Error
	switch {
	case err == nil:
	case errors.As(err, &network), errors.Is(err, net.ErrClosed), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.ErrClosedPipe):
		log.Debugf("torchrun: %s: %v", what, err)
	default:
		log.Warnf("torchrun: %s is closed: %v", what, err)
	}
}

// answer has the function that serves connections for a service. serve returns the reason why it
// has ended a connection.
type answer struct {
	serve   func(net.Conn) error
	serving sync.WaitGroup // the connections that are being served
}

// answer makes serve handle the connections for a service, in place of an earlier function, until
// refuse is called.
func (p *Peers) answer(of service, serve func(net.Conn) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answers[of] = &answer{serve: serve}
}

// refuse ends answer. Connections that are being served continue; the caller may wait for them.
func (p *Peers) refuse(of service) (serving *sync.WaitGroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.answers[of]
	delete(p.answers, of)
	if a == nil {
		return new(sync.WaitGroup)
	}
	return &a.serving
}

// answerTo returns the answer for a service, or nil. The caller must call Done of its serving
// afterwards.
func (p *Peers) answerTo(of service) *answer {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.answers[of]
	if a != nil {
		a.serving.Add(1)
	}
	return a
}

func (p *Peers) keep(conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.conns[conn] = true
	}
	return !p.closed
}

func (p *Peers) forget(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, conn)
	if len(p.conns) == 0 {
		p.idle.Broadcast()
	}
}

// Addr returns the address, host:port, at which other nodes reach this one. It returns "" if this
// node does not listen.
func (p *Peers) Addr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln == nil {
		return ""
	}
	at := p.ln.Addr().(*net.TCPAddr).AddrPort()
	host := at.Addr().Unmap().String()
	if at.Addr().IsUnspecified() {
		host = p.Route
	}
	return net.JoinHostPort(cmp.Or(p.Host, host), strconv.Itoa(int(at.Port())))
}

// dial connects to a service of another node.
func (p *Peers) dial(ctx context.Context, addr string, of service) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("torchrun: %w", err)
	}
	keepAlive(conn)
	if p.creds != nil {
		secure := tls.Client(conn, p.creds.ClientTLS(identity.Subject{Role: identity.Driver}))
		hello, cancel := context.WithTimeout(ctx, helloTimeout)
		defer cancel()
		if err := secure.HandshakeContext(hello); err != nil {
			conn.Close()
			if hello.Err() != nil && ctx.Err() == nil {
				return nil, fmt.Errorf("torchrun: %s: %w", addr, errOtherProgram)
			}
			return nil, fmt.Errorf("torchrun: the agent at %s: %w (have all nodes the same key_file and --rdzv-id?)", addr, identity.Explain(err, time.Now()))
		}
		conn = secure
	}
	if _, err := conn.Write(binary.BigEndian.AppendUint64(nil, uint64(of))); err != nil {
		conn.Close()
		return nil, fmt.Errorf("torchrun: the agent at %s: %w", addr, err)
	}
	return conn, nil
}

// keepAlive makes the kernel notice when the other machine is gone.
func keepAlive(conn net.Conn) {
	if c, ok := conn.(*identity.Conn); ok {
		conn = c.NetConn()
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 5})
	}
}

// Close ends all services and closes all connections. It waits for connections of others until ctx
// ends.
func (p *Peers) Close(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.idle.Broadcast()
	})
	defer stop()
	p.mu.Lock()
	for len(p.conns) > 0 && ctx.Err() == nil {
		p.idle.Wait()
	}
	p.closed = true
	for conn := range p.conns {
		conn.Close()
	}
	ln := p.ln
	p.mu.Unlock()
	p.end()
	if ln != nil {
		ln.Close()
	}
	p.wg.Wait()
}

// WorkerStore is the torch.distributed store that the workers of a round share. Those that this
// process has started reach it at a loopback port, which admits only them and their children.
type WorkerStore struct {
	*tcpstore.Door
	named string // its address as named on the command line; empty: none
	log   logrus.FieldLogger
	end   func()
	used  atomic.Bool // a worker has connected to it
}

// ServeStore opens the store of a round in the process of rank 0. If peers is not nil, it must be
// listening, and other processes reach the store by it. The caller must call Close.
func ServeStore(number int, peers *Peers, log logrus.FieldLogger) (*WorkerStore, error) {
	return serveStore(number, peers, proc.OwnPeer, log)
}

// serveStore is like ServeStore. admit returns an error for a connection that must be refused.
func serveStore(number int, peers *Peers, admit func(net.Conn) error, log logrus.FieldLogger) (*WorkerStore, error) {
	store, end := new(tcpstore.Store), func() {}
	if of := workersStore.of(number); peers != nil {
		peers.answer(of, func(conn net.Conn) error { return tcpstore.Serve(conn, store) })
		end = func() { peers.refuse(of) }
	}
	return openStore(end, admit, log, func(_ *tcpstore.Door, conn net.Conn) {
		logServed(log, "a worker's connection to the store", tcpstore.Serve(conn, store))
	})
}

// ForwardStore opens the store of a round in another process: it forwards workers to the process of
// rank 0, whose Peers have the address addr. The caller must call Close.
func ForwardStore(addr string, number int, peers *Peers, log logrus.FieldLogger) (*WorkerStore, error) {
	open, end := context.WithCancel(context.Background())
	return openStore(end, proc.OwnPeer, log, func(d *tcpstore.Door, worker net.Conn) {
		far, err := peers.dial(open, addr, workersStore.of(number))
		switch {
		case err == nil:
			d.Carry(worker, far)
		case open.Err() == nil:
			log.Warnf("torchrun: a worker cannot reach the store of the node with rank 0: %v", err)
		}
	})
}

// openStore opens a store. serve serves one connection of a worker. Close calls end.
func openStore(end func(), admit func(net.Conn) error, log logrus.FieldLogger, serve func(d *tcpstore.Door, conn net.Conn)) (*WorkerStore, error) {
	s := &WorkerStore{log: log, end: end}
	var err error
	s.Door, err = tcpstore.OpenDoor(tcpstore.DoorConfig{Bounds: identity.TorchWorkers, Admit: admit, What: "torchrun", Log: log,
		Serve: func(d *tcpstore.Door, conn net.Conn) {
			s.used.Store(true)
			serve(d, conn)
		}})
	if err != nil {
		end()
		return nil, fmt.Errorf("torchrun: %w", err)
	}
	return s, nil
}

// also makes the store listen at further addresses, except those in use by other programs. Workers
// get the last one in their variables: newer versions of torch use the agent's store only if the
// program names the same address as the variables.
func (s *WorkerStore) also(addrs []string) {
	for _, addr := range addrs {
		at := addr
		if port, is := strings.CutPrefix(addr, "localhost:"); is {
			at = "127.0.0.1:" + port
		}
		if err := s.Open(at); err != nil {
			s.log.Warnf("torchrun: the workers' store cannot be reached at %s, which the command line names: %v", addr, err)
			continue
		}
		s.named = addr
	}
}

// Addr returns the address, host:port, that workers get in their variables.
func (s *WorkerStore) Addr() string { return cmp.Or(s.named, s.Door.Addr().String()) }

// asked reports whether a worker of this node has connected to the store.
func (s *WorkerStore) asked() bool { return s.used.Load() }

// Close closes all connections, and blocks until their goroutines have ended.
func (s *WorkerStore) Close() {
	s.end()
	s.Door.Close()
}

// OwnHost returns the address of this machine on the route to far, which may be this machine
// itself.
func OwnHost(far string) (string, error) {
	conn, err := net.Dial("udp", net.JoinHostPort(far, "9")) // selects a route, sends nothing
	if err != nil {
		return "", fmt.Errorf("torchrun: no address of this machine leads to %s: %w", far, err)
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap().String(), nil
}

// IsLoopbackName reports whether a name other than localhost resolves only to loopback on this
// machine.
func IsLoopbackName(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil || host == "" || host == "localhost" {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	return err == nil && len(addrs) > 0 && !slices.ContainsFunc(addrs, func(a netip.Addr) bool { return !a.Unmap().IsLoopback() })
}

// IsHere reports whether an address, or all addresses of a host name, belong to this machine.
func IsHere(ctx context.Context, host string) (bool, error) {
	if addr, err := netip.ParseAddr(host); err == nil {
		return identity.IsOwn(addr.Unmap()), nil
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return false, err
	}
	for _, addr := range addrs {
		if !identity.IsOwn(addr.Unmap()) {
			return false, nil
		}
	}
	return len(addrs) > 0, nil
}
