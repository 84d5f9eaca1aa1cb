package gossip

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/sirupsen/logrus"
)

// errClosed means that a member or a source has left the cluster.
var errClosed = errors.New("gossip: closed")

// conflictError means that a host already has another agent, which is kept.
type conflictError struct {
	// Host is the name that both agents claim.
	Host string
	// Kept and Refused are the addresses at which they gossip.
	Kept, Refused string
	// Since is when the agent that is kept started.
	Since time.Time
}

// Error names both addresses.
func (e *conflictError) Error() string {
	return fmt.Sprintf("gossip: host %q has an agent already: the one at %s, started %s, is kept; the one at %s is refused",
		e.Host, e.Kept, e.Since.Format(time.RFC3339), e.Refused)
}

// Member is a member of a cluster. Its methods are safe for concurrent use.
type Member struct {
	cfg  Config
	log  logrus.FieldLogger
	list *memberlist.Memberlist
	keys *memberlist.Keyring
	name
	life
	heard    atomic.Int64  // when another member last gave a sign of life, in Unix nanoseconds
	speaking chan struct{} // holds one token, because only one call of memberlist's UpdateNode and Leave may run at a time

	mu sync.Mutex // guards the fields below
	statement
	others
	left bool // no further goroutine may start
}

// name is the name and address by which the others know this member.
type name struct{ node, addr string }

// life holds what ends with this member.
type life struct {
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	all     sync.WaitGroup
	closing sync.Once
	closed  error
}

// statement is what this member advertises about its host.
type statement struct {
	meta    *Meta // nil: an observer
	encoded []byte
}

// others are the other members of the cluster.
type others struct {
	roster      *roster
	seen        *view                // result of the last look; nil: it may have changed
	changed     chan struct{}        // closed at the next change of the roster
	lost        map[string]time.Time // addresses of members that vanished, and when
	notUnder    map[string]bool      // nodes that were logged as not understood
	silentSince time.Time            // since when deaths are not reported
}

// Join returns a member that has joined the cluster through the first seed that answered; it tries
// all seeds at once. It returns an error if none answers, unless KeepTrying is set. The error is
// one line that names each seed and, as far as it is known, its problem; errors.Is finds ErrKey. If
// the cluster has an older agent of the same host, Join waits for some seconds, because that agent
// may just have died, and then fails.
//
// ctx bounds only Join. The member runs until Close or Leave.
func Join(ctx context.Context, cfg Config) (*Member, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	m := newMember(cfg)
	if err := m.introduce(cfg.Meta); err != nil {
		return nil, err
	}
	if err := m.start(ctx); err != nil {
		m.cancel()
		return nil, err
	}
	m.all.Go(m.maintain)
	err = m.enter(ctx)
	if err == nil {
		err = m.claim(ctx)
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func newMember(cfg Config) *Member {
	m := &Member{
		cfg: cfg, log: cfg.Log, speaking: make(chan struct{}, 1),
		others: others{
			roster: newRoster(), changed: make(chan struct{}), lost: map[string]time.Time{}, notUnder: map[string]bool{},
		},
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	return m
}

// introduce sets the member's Meta and name.
func (m *Member) introduce(meta *Meta) error {
	var id [8]byte
	rand.Read(id[:])
	incarnation := hex.EncodeToString(id[:])
	if meta == nil {
		m.node = "observer~" + incarnation
		return nil
	}
	own := *meta
	own.BadSlots = slices.Clone(own.BadSlots)
	if own.Start.IsZero() {
		own.Start = time.Now()
	}
	if own.Incarnation == "" {
		own.Incarnation = incarnation
	}
	encoded, err := own.encode()
	if err != nil {
		return err
	}
	m.meta, m.encoded, m.node = &own, encoded, own.Name+"~"+own.Incarnation
	return nil
}

// start listens on the network and starts memberlist.
func (m *Member) start(ctx context.Context) error {
	lib, err := m.cfg.library(m.node)
	if err != nil {
		return err
	}
	lib.Logger, m.keys = newLibraryLog(m.log), lib.Keyring
	who := newMembers(m.cfg.Label, lib.Keyring)
	who.long = func(from net.Addr, bytes, most int64) {
		m.log.Warnf("gossip: %v announces a message of %d bytes, and %d are read before it is known who sends them: "+
			"it is no member, or the cluster has more than some 2,000 agents", from, bytes, most)
	}
	var t *transport
	if m.cfg.Transport != nil {
		t = newTransport(m.cfg.Transport, who, nil)
	} else {
		if t, err = listen(m.cfg.BindAddr, who, lib.Logger); err != nil {
			return err
		}
		if lib.AdvertiseAddr, lib.AdvertisePort, err = m.advertise(ctx, t); err != nil {
			t.Shutdown()
			return err
		}
	}
	lib.Transport = t
	d := &delegate{m}
	lib.Delegate, lib.Events, lib.Ping = d, d, d
	if m.list, err = memberlist.Create(lib); err != nil {
		t.Shutdown()
		return fmt.Errorf("gossip: %w", err)
	}
	m.addr = m.list.LocalNode().Address()
	return nil
}

// advertise returns the address at which others reach this member.
func (m *Member) advertise(ctx context.Context, t *transport) (string, int, error) {
	port := t.Transport.(*memberlist.NetTransport).GetAutoBindPort()
	if m.cfg.AdvertiseAddr != "" {
		return hostPort(m.cfg.AdvertiseAddr, port)
	}
	host, _, err := hostPort(m.cfg.BindAddr, port)
	if err == nil && net.ParseIP(host).IsUnspecified() {
		host, err = advertised(ctx, m.cfg.Join)
	}
	return host, port, err
}

// Addr returns the IP address and port at which others reach this member.
func (m *Member) Addr() string { return m.addr }

// Meta returns what this member advertises; false for an observer.
func (m *Member) Meta() (Meta, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.meta == nil {
		return Meta{}, false
	}
	meta := *m.meta
	meta.BadSlots = slices.Clone(meta.BadSlots)
	return meta, true
}

// SetMeta replaces the advertised Meta, and blocks until other members have it or ctx ends; the new
// Meta is advertised in both cases. Name, Start and Incarnation do not change. For an observer,
// which has no Meta, it returns an error.
func (m *Member) SetMeta(ctx context.Context, meta Meta) error {
	m.mu.Lock()
	if m.meta == nil {
		m.mu.Unlock()
		return errors.New("gossip: an observer announces no host")
	}
	meta.BadSlots = slices.Clone(meta.BadSlots)
	meta.Name, meta.Start, meta.Incarnation = m.meta.Name, m.meta.Start, m.meta.Incarnation
	encoded, err := meta.encode()
	if err == nil {
		m.meta, m.encoded = &meta, encoded
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	return m.speak(ctx, m.list.UpdateNode)
}

// speak calls a blocking method of memberlist that sends something to the cluster. It returns
// errClosed if the member has left, because then there is nothing more to send.
func (m *Member) speak(ctx context.Context, tell func(time.Duration) error) error {
	select {
	case m.speaking <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("gossip: %w", context.Cause(ctx))
	case <-m.ctx.Done():
		return errClosed
	}
	said := make(chan error, 1)
	m.mu.Lock()
	if m.left { // Close waits only for goroutines that start before this
		m.mu.Unlock()
		<-m.speaking
		return errClosed
	}
	m.all.Go(func() {
		defer func() { <-m.speaking }()
		timeout := spreadTime
		if deadline, ok := ctx.Deadline(); ok {
			timeout = max(time.Millisecond, min(timeout, time.Until(deadline)))
		}
		said <- tell(timeout)
	})
	m.mu.Unlock()
	select {
	case err := <-said:
		if err != nil {
			return fmt.Errorf("gossip: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("gossip: %w", context.Cause(ctx))
	}
}

// Leave leaves the cluster in order: it advertises that the host is draining, waits until the
// observers know, leaves the cluster, and closes the member. If a step cannot be completed before
// ctx ends, or within some seconds, Leave skips it and returns an error; it closes the member in
// any case. The workers should have ended before; SetMeta with Draining requests that.
func (m *Member) Leave(ctx context.Context) error {
	var err error
	if meta, ok := m.Meta(); ok {
		meta.Draining = true
		err = m.SetMeta(ctx, meta)
		if err == nil {
			m.tellObservers(ctx)
		}
	}
	if !errors.Is(err, errClosed) {
		err = errors.Join(err, m.speak(ctx, m.list.Leave))
	}
	return errors.Join(err, m.Close())
}

// tellObservers exchanges the full state with observers, which must not miss that this host is
// draining.
func (m *Member) tellObservers(ctx context.Context) {
	m.mu.Lock()
	var addrs []string
	for _, p := range m.roster.peers {
		if p.meta == nil && p.gone.IsZero() && len(addrs) < 16 {
			addrs = append(addrs, p.addr)
		}
	}
	m.mu.Unlock()
	told := make(chan struct{}, len(addrs))
	for _, addr := range addrs {
		if !m.spawn(func() {
			m.list.Join([]string{addr})
			told <- struct{}{}
		}) {
			return
		}
	}
	for range addrs {
		select {
		case <-told:
		case <-ctx.Done():
			return
		}
	}
}

// spawn starts a goroutine for which Close waits. It returns false if the member is closed.
func (m *Member) spawn(f func()) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left {
		return false
	}
	m.all.Go(f)
	return true
}

// Close ends the member without a message to the others, to which this looks like a crash. It waits
// for everything that the member has started, and for its connections. Current probes of memberlist
// end within two ProbeIntervals. Calling Close again is allowed.
func (m *Member) Close() error {
	m.closing.Do(func() {
		m.mu.Lock()
		m.left = true
		m.mu.Unlock()
		m.cancel()
		m.speaking <- struct{}{} // memberlist must not be shut down while it sends
		if m.closed = m.list.Shutdown(); m.closed != nil {
			m.closed = fmt.Errorf("gossip: %w", m.closed)
		}
		m.all.Wait()
	})
	return m.closed
}

// maintain contacts, until Close, members that this member should know but does not.
func (m *Member) maintain() {
	rivals := map[string]bool{}
	for {
		pause := m.cfg.RejoinInterval
		if m.alone() {
			pause = min(pause, time.Second)
		}
		select {
		case <-m.ctx.Done():
			return
		case <-time.After(pause):
		}
		m.rejoin()
		if p := m.rival(); p != nil && !rivals[p.node] {
			rivals[p.node] = true
			m.log.WithError(m.conflict(p)).Error("gossip: this agent gets no work")
		}
	}
}

// Members returns the number of members of the cluster as far as this member knows, including
// itself.
func (m *Member) Members() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 1
	for _, p := range m.roster.peers {
		if p.gone.IsZero() {
			n++
		}
	}
	return n
}

func (m *Member) alone() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.roster.peers {
		if p.gone.IsZero() {
			return false
		}
	}
	return true
}

// lostTime is how long to look for members that vanished. rejoinLost is how many of them to contact
// at a time.
const (
	lostTime   = time.Hour
	rejoinLost = 3
)

// rejoin contacts the seeds that are currently not members, and some of the members that vanished,
// because after a partition neither side would look for the other.
func (m *Member) rejoin() {
	m.mu.Lock()
	if m.meta != nil { // for an observer, look removes the dead, unless it withholds their deaths
		m.roster.purge(time.Now(), m.grace())
	}
	known := map[string]bool{m.addr: true}
	for _, p := range m.roster.peers {
		if p.gone.IsZero() {
			known[p.addr] = true
		}
	}
	var lost []string
	for addr, since := range m.lost {
		if known[addr] || time.Since(since) > lostTime {
			delete(m.lost, addr)
			continue
		}
		lost = append(lost, addr)
	}
	m.mu.Unlock()
	mathrand.Shuffle(len(lost), func(i, j int) { lost[i], lost[j] = lost[j], lost[i] })
	targets := lost[:min(len(lost), rejoinLost)]
	seeds := m.cfg.Join
	if m.cfg.Seeds != nil {
		seeds = append(slices.Clone(seeds), m.cfg.Seeds()...)
	}
	for _, seed := range seeds {
		addrs, err := resolve(m.ctx, seed)
		if err != nil {
			m.log.WithError(err).WithField("seed", seed).Debug("gossip: a seed cannot be found")
		}
		targets = append(targets, addrs...)
	}
	for _, addr := range targets {
		if known[addr] || m.ctx.Err() != nil {
			continue
		}
		known[addr] = true
		if err := m.contact(addr); err != nil {
			m.log.WithError(err).WithField("addr", addr).Debug("gossip: a member still cannot be reached")
		} else {
			m.log.WithField("addr", addr).Info("gossip: a member can be reached again")
		}
	}
}

// rival returns an older agent of the same host.
func (m *Member) rival() *peer {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.meta == nil {
		return nil
	}
	if p := m.roster.rival(time.Now(), m.grace(), m.node, m.addr, *m.meta); p != nil {
		found := *p
		return &found
	}
	return nil
}

func (m *Member) conflict(p *peer) *conflictError {
	return &conflictError{Host: p.meta.Name, Kept: p.addr, Refused: m.addr, Since: p.meta.Start}
}

// claim waits until no older agent claims the host, or returns a conflict after rivalTime.
func (m *Member) claim(ctx context.Context) error {
	limit := time.NewTimer(rivalTime)
	defer limit.Stop()
	for {
		changed := m.changes()
		p := m.rival()
		if p == nil {
			return nil
		}
		select {
		case <-changed:
		case <-time.After(m.cfg.ProbeInterval): // a dead agent's time ends without a change
		case <-limit.C:
			return m.conflict(p)
		case <-ctx.Done():
			return errors.Join(m.conflict(p), context.Cause(ctx))
		}
	}
}

// changes returns a channel that is closed at the next change of the roster.
func (m *Member) changes() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

// silentTime is how long an observer may hear no member before it fails.
const silentTime = 2 * time.Second

// look returns what the member knows about the agents. The caller must not change it. silent means
// that the member has not heard any other member for so long that the agents are unknown.
func (m *Member) look() (v view, silent bool) {
	m.mu.Lock()
	v, silent = m.see()
	m.mu.Unlock()
	for _, c := range v.conflicts {
		m.log.WithError(&conflictError{Host: c.kept.meta.Name, Kept: c.kept.addr, Refused: c.refused.addr,
			Since: c.kept.meta.Start}).Error("gossip: two agents claim one host")
	}
	return v, silent
}

// see is like look, without its log messages. It looks at the roster only if that has changed, or
// if the result depends on the time. The caller holds m.mu.
func (m *Member) see() (v view, silent bool) {
	if m.seen != nil {
		return *m.seen, false
	}
	now := time.Now()
	heard := now.Sub(time.Unix(0, m.heard.Load())) <= silence*m.cfg.ProbeInterval
	v = m.roster.look(now, m.grace(), heard)
	switch {
	case !v.withheld:
		m.silentSince = time.Time{}
	case m.silentSince.IsZero():
		m.silentSince = now
	}
	if v.withheld {
		v.next = now.Add(m.cfg.ProbeInterval)
		silent = now.Sub(m.silentSince) > silentTime
	}
	if v.next.IsZero() {
		m.seen = &view{agents: v.agents}
	}
	return v, silent
}

// grace returns the roster's grace for this member's settings. The caller holds m.mu.
func (m *Member) grace() time.Duration { return m.roster.grace(m.cfg.ProbeInterval, m.cfg.Patience) }

// sign records that another member is alive.
func (m *Member) sign() { m.heard.Store(time.Now().UnixNano()) }

// delegate holds the methods that memberlist calls, mostly under its lock. They copy their
// arguments and never block.
type delegate struct{ m *Member }

// NodeMeta returns the encoded Meta; encode has checked the limit.
func (d *delegate) NodeMeta(int) []byte {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	return d.m.encoded
}

// NotifyMsg, GetBroadcasts, LocalState and MergeRemoteState are for an application's own messages.
// A Member sends none.
func (d *delegate) NotifyMsg([]byte) {}

func (d *delegate) GetBroadcasts(int, int) [][]byte { return nil }

func (d *delegate) LocalState(bool) []byte { return nil }

func (d *delegate) MergeRemoteState([]byte, bool) {}

// AckPayload is called when this member answers a probe of another.
func (d *delegate) AckPayload() []byte {
	d.m.sign()
	return nil
}

// NotifyPingComplete is called when another member answers a probe of this one.
func (d *delegate) NotifyPingComplete(*memberlist.Node, time.Duration, []byte) { d.m.sign() }

// NotifyJoin is called for a member that is alive, or alive again.
func (d *delegate) NotifyJoin(n *memberlist.Node) { d.m.here(n) }

// NotifyUpdate is called when a member's Meta has changed.
func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.m.here(n) }

// NotifyLeave is called for a member that has left or died; memberlist does not distinguish the
// two.
func (d *delegate) NotifyLeave(n *memberlist.Node) {
	m := d.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if n.Name == m.node {
		return
	}
	if p := m.roster.away(time.Now(), n.Name); p != nil && len(m.lost) < 256 {
		m.lost[p.addr] = time.Now()
	}
	m.wake()
}

func (m *Member) here(n *memberlist.Node) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n.Name == m.node {
		return
	}
	addr := net.JoinHostPort(n.Addr.String(), strconv.Itoa(int(n.Port)))
	var meta *Meta
	if len(n.Meta) > 0 {
		if said, err := decodeMeta(n.Meta); err == nil {
			meta = &said
		} else if !m.notUnder[n.Name] {
			m.notUnder[n.Name] = true
			m.log.WithError(err).WithField("addr", addr).Warn("gossip: an agent is left out")
		}
	}
	m.roster.here(n.Name, addr, meta)
	delete(m.lost, addr)
	m.wake()
}

// wake notifies those who wait for a change of the roster. The caller holds m.mu.
func (m *Member) wake() {
	m.seen = nil
	close(m.changed)
	m.changed = make(chan struct{})
}
