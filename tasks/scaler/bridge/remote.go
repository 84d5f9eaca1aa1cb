package bridge

import (
	"context"
	"crypto/md5"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/tasks/scaler"
	"github.com/hvdrun/hvdrun/tasks/scaler/internal/zmtp"
)

const (
	// maxFrames bounds the frames of a message of a worker.
	maxFrames = 4096
	// maxProcessors bounds the tasks that a worker runs at a time.
	maxProcessors = 1024
	// maxUnclaimed bounds the objects of a worker for which no result has come.
	maxUnclaimed = 1024
	// maxUnclaimedBytes bounds those of all workers.
	maxUnclaimedBytes = 512 << 20
	// maxPending is how many bytes may wait for a worker that does not read.
	maxPending = 256 << 20
	// maxFunctions is how many functions a worker keeps that no task needs.
	maxFunctions = 64
	// deleteAt is how many objects a worker is told at a time to forget.
	deleteAt = 256
	// writeTime bounds how long a worker may take to read a message.
	writeTime = time.Minute
)

// errOver ends calls whose worker is over. Its session in the pool says what becomes of the tasks.
var errOver = fmt.Errorf("%w: the worker has gone", tasks.ErrAttemptLost)

// remote is a worker of Scaler, by one connection. Its router's lock guards it.
type remote struct {
	r    *router
	id   []byte
	name string // for people
	host string

	heard      time.Time
	processors int                     // 0: it has not joined
	leave      context.CancelCauseFunc // ends its session in the pool; nil: it has none
	isOver     bool                    // in the pool
	broken     bool                    // the connection has ended
	gone       *time.Timer             // ends it then
	calls      map[string]*attempt

	connection
	catalog
	uploads
}

// connection is what is written to a worker. The lock of news guards it.
type connection struct {
	raw      net.Conn
	conn     *zmtp.Conn
	out      [][][]byte // messages to be written
	outBytes int
	closed   bool
	ended    chan struct{} // closed with it
	news     sync.Cond
}

// queue has a message written, and returns whether the worker reads what it is sent.
func (c *connection) queue(frames [][]byte) (reads bool) {
	c.out = append(c.out, frames)
	c.outBytes += size(frames)
	c.news.Signal()
	return c.outBytes <= maxPending
}

func size(frames [][]byte) int {
	n := 64
	for _, f := range frames {
		n += len(f) + 32
	}
	return n
}

// write writes messages until the connection ends, and returns with the lock.
func (c *connection) write() {
	for {
		for len(c.out) == 0 && !c.closed {
			c.news.Wait()
		}
		if c.closed {
			return
		}
		frames := c.out[0]
		c.out[0] = nil
		c.out = c.out[1:]
		c.news.L.Unlock()
		_ = c.raw.SetWriteDeadline(time.Now().Add(writeTime))
		err := c.conn.Write(frames)
		c.news.L.Lock()
		c.outBytes -= size(frames)
		if err != nil {
			return
		}
	}
}

// end ends the connection, and returns whether it had not ended.
func (c *connection) end() bool {
	if c.closed {
		return false
	}
	c.closed, c.out = true, nil
	close(c.ended)
	c.news.Broadcast()
	_ = c.raw.Close()
	return true
}

// catalog is the objects that a worker may ask for.
type catalog struct {
	objects map[string]*offer
	idle    []*offer // functions that no task needs, the oldest first
	forget  [][]byte // objects of which the worker has not been told that they go
}

// use returns an object, which stays until it is released.
func (c *catalog) use(id []byte, name string, content []byte, function bool) *offer {
	o := c.objects[string(id)]
	if o == nil {
		o = &offer{id: string(id), name: name, content: content, function: function}
		c.objects[o.id] = o
		c.forget = slices.DeleteFunc(c.forget, func(f []byte) bool { return string(f) == o.id })
	}
	if i := slices.Index(c.idle, o); i >= 0 {
		c.idle = slices.Delete(c.idle, i, i+1)
	}
	o.users++
	return o
}

// release gives an object back.
func (c *catalog) release(o *offer) {
	if o.users--; o.users > 0 {
		return
	}
	if o.function {
		c.idle = append(c.idle, o)
		if len(c.idle) <= maxFunctions {
			return
		}
		o, c.idle = c.idle[0], slices.Delete(c.idle, 0, 1)
	}
	delete(c.objects, o.id)
	c.forget = append(c.forget, []byte(o.id))
}

// uploads are the objects of a worker that no result has claimed.
type uploads struct {
	results   map[string][]byte
	unclaimed int64 // bytes of them
}

// add adds an object, and returns how many bytes more there are.
func (u *uploads) add(id, content []byte) int64 {
	if _, ok := u.results[string(id)]; ok {
		return 0
	}
	u.results[string(id)] = content
	u.unclaimed += int64(len(content))
	return int64(len(content))
}

// claim returns an object, which is forgotten.
func (u *uploads) claim(id []byte) ([]byte, bool) {
	content, ok := u.results[string(id)]
	delete(u.results, string(id))
	u.unclaimed -= int64(len(content))
	return content, ok
}

// offer is an object for a worker.
type offer struct {
	id       string
	name     string
	content  []byte
	users    int
	function bool // it is kept
}

// attempt is one of a task, at a worker.
type attempt struct {
	id      string // of the task, unique for each attempt
	of      *remote
	objects []*offer
	done    chan outcomeOf // has room for the one value
}

// outcomeOf is how a call has ended.
type outcomeOf struct {
	content []byte
	err     error
}

func newRemote(r *router, raw net.Conn, conn *zmtp.Conn) *remote {
	p := &remote{
		r: r, id: conn.Peer(), heard: time.Now(), calls: map[string]*attempt{},
		connection: connection{raw: raw, conn: conn, ended: make(chan struct{})},
		catalog:    catalog{objects: map[string]*offer{}}, uploads: uploads{results: map[string][]byte{}},
	}
	p.news.L = &r.mu
	if len(p.id) == 0 {
		p.id = make([]byte, 16)
		rand.Read(p.id)
	}
	p.name, p.host = nameOf(p.id), hostOf(raw.RemoteAddr())
	return p
}

// nameOf returns how people know a worker: Scaler's identities are a process, a name and 32
// hexadecimal digits.
func nameOf(id []byte) string {
	parts := strings.Split(string(id), "|")
	text := fmt.Sprintf("%x", id[:min(len(id), 8)])
	if len(parts) == 3 {
		text = parts[1] + ":" + parts[0]
	}
	clean := strings.Map(func(c rune) rune {
		if !unicode.IsPrint(c) || c == unicode.ReplacementChar {
			return -1
		}
		return c
	}, text)
	return clean[:min(len(clean), 100)] + " (Scaler)"
}

// labelOf returns the name that a worker has given itself.
func labelOf(id []byte) string {
	if parts := strings.Split(string(id), "|"); len(parts) == 3 && len(parts[1]) <= 100 {
		return parts[1]
	}
	return ""
}

func hostOf(addr net.Addr) string {
	if tcp, ok := addr.(*net.TCPAddr); ok && !tcp.IP.IsLoopback() {
		return tcp.IP.String()
	}
	host, _ := os.Hostname()
	return host
}

// read handles what the worker says until the connection ends.
func (p *remote) read() error {
	for {
		frames, err := p.conn.Read()
		var large *zmtp.TooLargeError
		if errors.As(err, &large) {
			p.r.cfg.Log.Warnf("scaler: worker %s: %v", p.name, err)
			continue // the task whose result it is fails for the lack of it
		}
		if err != nil {
			return err
		}
		if p.r.cfg.record != nil {
			p.r.cfg.record("<", frames)
		}
		m, err := scaler.Decode(frames)
		var unknown *scaler.UnknownTypeError
		if errors.As(err, &unknown) {
			p.r.cfg.Log.Warnf("scaler: worker %s: %v", p.name, err)
			continue
		}
		if err == nil {
			err = p.message(time.Now(), m)
		}
		if err != nil {
			p.r.mu.Lock()
			p.r.drop(p, err)
			p.r.mu.Unlock()
			return err
		}
	}
}

// message does what the worker says. An error ends the connection.
func (p *remote) message(now time.Time, m scaler.Message) error {
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	p.heard = now
	switch m := m.(type) {
	case *scaler.Heartbeat:
		return p.heartbeat(m)
	case *scaler.ObjectRequest:
		p.send(p.answer(m))
	case *scaler.ObjectInstruction:
		return p.store(m)
	case *scaler.TaskResult:
		p.result(m)
	case *scaler.DisconnectRequest:
		p.disconnect(m)
	case *scaler.ClientHeartbeat:
		return errors.New("it is a client of Scaler: only workers can join a pool")
	default:
		return fmt.Errorf("it sends a message of type %s, which is not for schedulers", scaler.TypeOf(m))
	}
	return nil
}

func (p *remote) heartbeat(m *scaler.Heartbeat) error {
	p.send(&scaler.HeartbeatEcho{})
	p.deletes()
	if p.processors > 0 || p.isOver {
		return nil
	}
	if len(p.r.joined()) >= p.r.cfg.Workers {
		return fmt.Errorf("there are %d workers already", p.r.cfg.Workers)
	}
	_ = p.raw.SetDeadline(time.Time{})
	p.processors = min(max(len(m.Processors), 1), maxProcessors)
	ctx, leave := context.WithCancelCause(context.Background())
	p.leave = leave
	p.r.sessions.Go(func() { p.join(ctx) })
	return nil
}

// joined are the workers of the pool; the lock is held.
func (r *router) joined() (all []*remote) {
	for _, p := range r.peers {
		if p.processors > 0 {
			all = append(all, p)
		}
	}
	return all
}

// join is the worker in the pool until ctx ends.
func (p *remote) join(ctx context.Context) {
	family, err := tasks.NewFamily[[]byte](familyName, p.run)
	if err != nil {
		panic(err) // it is a constant
	}
	cfg := tasks.ServeConfig{
		Dial: p.r.cfg.Dial, Host: p.host, Name: p.name, Families: []*tasks.Family{family}, Grace: p.r.cfg.Grace, Log: p.r.cfg.Log,
		Offers: map[string]float64{"cpu": float64(p.processors)},
	}
	if label := labelOf(p.id); label != "" {
		cfg.Offers[Label(label)] = float64(p.processors)
	}
	p.r.cfg.Log.Infof("scaler: worker %s joins, with %d processors", p.name, p.processors)
	failures := retry.Row{Least: 10 * time.Second}
	for ctx.Err() == nil {
		if err := tasks.Serve(ctx, cfg); err == nil {
			return
		} else if ctx.Err() == nil {
			failures.Warn(p.r.cfg.Log, time.Now(), fmt.Sprintf("scaler: worker %s cannot join the pool", p.name), err)
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// run runs a task at the worker: it is the function of the family.
func (p *remote) run(ctx context.Context, name string, serializer, code []byte, args ...[]byte) ([]byte, error) {
	c := p.begin(name, serializer, code, args)
	select {
	case o := <-c.done:
		if o.err == errOver {
			<-ctx.Done() // the session ends, and says what becomes of the task
		}
		return o.content, o.err
	case <-ctx.Done():
	}
	p.cancel(c)
	late := time.NewTimer(p.r.cfg.CancelTimeout)
	defer late.Stop()
	select {
	case <-c.done:
	case <-late.C:
		p.r.mu.Lock()
		p.r.drop(p, fmt.Errorf("it has not ended a task that was cancelled %v ago", p.r.cfg.CancelTimeout))
		p.r.mu.Unlock()
	}
	return nil, context.Cause(ctx)
}

// begin sends a task. What a worker gets whose connection has broken ends with it.
func (p *remote) begin(name string, serializer, code []byte, args [][]byte) *attempt {
	id := make([]byte, 16)
	rand.Read(id)
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	// Objects of one serializer have one owner: a worker has one serializer for each.
	source := fmt.Appendf(nil, "hvdrun|%x", sha256.Sum256(serializer))
	c := &attempt{id: string(id), of: p, done: make(chan outcomeOf, 1)}
	t := &scaler.Task{ID: id, Source: source}
	t.Function = p.offer(c, contentID(source, code, 'f'), name, code, true)
	p.offer(c, scaler.SerializerID(source), "serializer", serializer, true)
	for i, a := range args {
		t.Args = append(t.Args, scaler.Arg{Kind: scaler.ArgObject, ID: p.offer(c, contentID(source, a, 'a'), fmt.Sprintf("%s[%d]", name, i), a, false)})
	}
	p.calls[c.id], p.r.calls[c.id] = c, c
	p.send(t)
	if p.isOver {
		p.r.finish(c, outcomeOf{err: errOver})
	}
	return c
}

// contentID returns the id of an object. Its hash is not that of ObjectID, for which contents that
// have the same one can be made.
func contentID(source, content []byte, kind byte) []byte {
	owner := md5.Sum(source)
	hash := sha256.Sum256(append([]byte{kind}, content...))
	return append(owner[:8:8], hash[:16]...)
}

// offer has a call use an object; the lock is held.
func (p *remote) offer(c *attempt, id []byte, name string, content []byte, function bool) []byte {
	c.objects = append(c.objects, p.use(id, name, content, function))
	return id
}

// release gives back what a call used; the lock is held.
func (p *remote) release(c *attempt) {
	for _, o := range c.objects {
		p.catalog.release(o)
	}
	if len(p.forget) >= deleteAt {
		p.deletes()
	}
}

// deletes tells the worker what it may forget; the lock is held.
func (p *remote) deletes() {
	if len(p.forget) > 0 {
		p.send(&scaler.ObjectInstruction{Kind: scaler.Delete, User: p.id, Objects: scaler.Objects{IDs: p.forget}})
		p.forget = nil
	}
}

// answer returns the objects that the worker has asked for. Where one is missing there are none:
// the worker then knows that it lacks something.
func (p *remote) answer(m *scaler.ObjectRequest) *scaler.ObjectResponse {
	a := &scaler.ObjectResponse{Kind: scaler.Content, Objects: scaler.Objects{IDs: m.IDs}}
	for _, id := range m.IDs {
		o := p.objects[string(id)]
		if o == nil {
			a.Names, a.Contents = nil, nil
			return a
		}
		a.Names, a.Contents = append(a.Names, []byte(o.name)), append(a.Contents, o.content)
	}
	return a
}

// store keeps the results that the worker sends before it says whose they are; the lock is held.
func (p *remote) store(m *scaler.ObjectInstruction) error {
	if m.Kind != scaler.Create || len(m.Contents) != len(m.IDs) || p.closed {
		return nil
	}
	for i, id := range m.IDs {
		p.r.unclaimed += p.add(id, m.Contents[i])
	}
	if len(p.results) > maxUnclaimed || p.unclaimed > 4*p.r.cfg.Message || p.r.unclaimed > max(maxUnclaimedBytes, 4*p.r.cfg.Message) {
		return fmt.Errorf("it has sent %d objects of %d bytes that are no results", len(p.results), p.unclaimed)
	}
	return nil
}

// claim returns an object, which is forgotten; the lock is held.
func (p *remote) claim(id []byte) ([]byte, bool) {
	content, ok := p.uploads.claim(id)
	p.r.unclaimed -= int64(len(content))
	return content, ok
}

// result ends a call, if it is not over: attempts have ids of their own, so that a late result is
// of none. A worker may send it over another connection than that by which it got the task.
func (p *remote) result(m *scaler.TaskResult) {
	var content []byte
	found := false
	for i, id := range m.Results {
		if c, ok := p.claim(id); i == 0 {
			content, found = c, ok
		}
	}
	c := p.r.calls[string(m.ID)]
	if c == nil {
		p.r.late++
		p.r.cfg.Log.Debugf("scaler: worker %s sends the result of an attempt that is over", p.name)
		return
	}
	p.r.finish(c, outcomeFrom(m.Status, content, found))
}

// died is the exception by which Scaler's workers say that the process is gone that ran a task.
const died = "scaler.utility.exceptions.ProcessorDiedError"

func outcomeFrom(s scaler.Status, content []byte, found bool) outcomeOf {
	switch {
	case s == scaler.WorkerDied || s == scaler.Canceled || s == scaler.NotFound || s == scaler.NoWorker:
		return outcomeOf{err: fmt.Errorf("%w: the worker says %q", tasks.ErrAttemptLost, s)}
	case !found:
		return outcomeOf{err: &scaler.CallError{Class: "MemoryError", Text: "the result has not come, or is too large"}}
	case s == scaler.Success:
		return outcomeOf{content: content}
	}
	e := exceptionFrom(content)
	if e.Class == died {
		return outcomeOf{err: fmt.Errorf("%w: %s", tasks.ErrAttemptLost, e.Text)}
	}
	return outcomeOf{err: e}
}

// finish ends a call; the lock is held.
func (r *router) finish(c *attempt, o outcomeOf) {
	if r.calls[c.id] != c {
		return
	}
	delete(r.calls, c.id)
	delete(c.of.calls, c.id)
	c.of.release(c)
	c.done <- o
}

// cancel has the worker end a task, which it does by killing the process that runs it.
func (p *remote) cancel(c *attempt) {
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	if p.r.calls[c.id] == c {
		p.send(&scaler.TaskCancel{ID: []byte(c.id), Force: true})
	}
}

// disconnect ends a worker that leaves; the lock is held. One of Work says so of its last
// connection too.
func (p *remote) disconnect(m *scaler.DisconnectRequest) {
	of := p
	if string(m.Worker) != string(p.id) {
		if of = p.r.peers[string(m.Worker)]; of == nil || !of.broken {
			return
		}
	}
	p.send(&scaler.DisconnectResponse{Worker: m.Worker})
	p.r.cfg.Log.Infof("scaler: worker %s leaves", of.name)
	p.r.over(of, tasks.ErrReturned)
}

// send sends a message soon; the lock is held.
func (p *remote) send(m scaler.Message) {
	if p.closed {
		return
	}
	frames := scaler.Encode(m)
	if p.r.cfg.record != nil {
		p.r.cfg.record(">", frames)
	}
	if !p.queue(frames) {
		p.r.drop(p, fmt.Errorf("it does not read what it is sent: %d bytes", p.outBytes))
	}
}

// write writes messages until the connection ends.
func (p *remote) write() {
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	p.connection.write()
	p.close()
}

// close ends the connection; the lock is held.
func (p *remote) close() {
	if p.end() {
		p.results = nil
		p.r.unclaimed -= p.unclaimed
		p.unclaimed = 0
	}
}
