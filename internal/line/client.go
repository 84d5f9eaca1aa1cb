package line

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/probe"
	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

const (
	// defaultPatience is less than the default of --start-timeout, so that a worker reports why it
	// has not joined.
	defaultPatience = 25 * time.Second
	dialTimeout     = 20 * time.Second
	redial          = 100 * time.Millisecond // the pause between two attempts to reach the launcher
	pongBound       = time.Second
	mostStacks      = 256 << 10 // bytes of an answer
)

// ClientConfig configures a Client.
type ClientConfig struct {
	// Worker is the worker's environment, with its credentials.
	Worker plan.Worker
	// Socket is the worker's end of the socket that it has inherited; nil: none. The client closes
	// it.
	Socket net.Conn
	// Patience is how long the launcher may be unreachable. Zero: 25 s.
	Patience time.Duration
	// Widen makes the worker's data listener listen on addresses that other machines reach, and
	// returns all its addresses. Join calls it at most once, when the driver requests that, and
	// joins again with the result. Nil: the driver never requests it, as for a worker that joins
	// without addresses.
	Widen func() ([]string, error)
}

// Client is the worker's end of its line, and the service that keeps the driver's notifications.
// Its methods are safe for concurrent use, except Close; at most one call of Join and one of Look
// may be in flight.
type Client struct {
	*notify.Service
	// Credentials are the worker's credentials.
	Credentials *identity.Credentials
	// Local is this machine's address on the route to the launcher.
	Local netip.Addr

	cfg    ClientConfig
	ctx    context.Context // until Close
	stop   context.CancelFunc
	run    sync.WaitGroup
	wide   bool  // Widen has been called; only Join uses it
	has    Place // in the last world; only Join uses it
	writes sync.Mutex

	mu     sync.Mutex
	conn   net.Conn      // nil: no line is connected
	begun  bool          // a line has been connected before
	change chan struct{} // closed and replaced when conn or failed changes
	failed error         // set once no line will be connected again
	questions
}

// questions holds the requests without an answer.
type questions struct {
	join   *asked               // nil: none
	look   *asked               // nil: none
	pings  map[uint64]chan bool // of capacity 1
	pinged uint64
}

// asked is a request that the driver has not answered. The client sends it again on each new line.
type asked struct {
	text   []byte
	answer chan answer // of capacity 1
}

type answer struct {
	Message
	tail []byte
}

// NewClient returns a client, which connects its line in the background. The caller must close it.
func NewClient(cfg ClientConfig) (c *Client, err error) {
	defer func() {
		if err != nil && cfg.Socket != nil {
			_ = cfg.Socket.Close()
		}
	}()
	cfg.Patience = cmp.Or(cfg.Patience, defaultPatience)
	c = &Client{Service: notify.NewService(), cfg: cfg, change: make(chan struct{}), questions: questions{pings: make(map[uint64]chan bool)}}
	if c.Credentials, err = identity.Decode(cfg.Worker.Credentials); err != nil {
		return nil, fmt.Errorf("credentials: %w", err)
	}
	if c.Local, err = addressTowards(cfg.Worker.LauncherAddr); err != nil {
		return nil, fmt.Errorf("launcher %s: %w", cfg.Worker.LauncherAddr, err)
	}
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.run.Go(c.keep)
	return c, nil
}

// addressTowards returns this machine's address on the route to the launcher. Connecting a UDP
// socket selects the route without sending a packet.
func addressTowards(launcher string) (netip.Addr, error) {
	conn, err := net.Dial("udp", launcher)
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	addr, err := netip.ParseAddrPort(conn.LocalAddr().String())
	return addr.Addr().Unmap(), err
}

// keep keeps a line connected until the client is closed. It uses the socket; without a socket,
// or once it is broken, it dials the launcher's door.
func (c *Client) keep() {
	conn, since := c.cfg.Socket, time.Now()
	var err error
	for c.ctx.Err() == nil {
		if conn == nil {
			dial, cancel := context.WithTimeout(c.ctx, dialTimeout)
			conn, err = c.Credentials.DialDoor(dial, c.cfg.Worker.LauncherAddr, Protocol)
			cancel()
		}
		if conn != nil {
			var begun bool
			if begun, err = c.speak(conn); begun {
				since = time.Now()
			}
			conn = nil
		}
		var refused *refusedError
		if gone := time.Since(since); errors.As(err, &refused) {
			c.fail(refused)
			return
		} else if gone >= c.cfg.Patience && c.ctx.Err() == nil {
			c.fail(fmt.Errorf("line: the launcher of this worker, at %s, could not be reached for %v: %w",
				c.cfg.Worker.LauncherAddr, gone.Round(time.Millisecond), err))
			return
		}
		_ = retry.Pause(c.ctx, redial) // the loop ends when ctx ends
	}
	c.fail(errors.New("line: the client is closed"))
}

// refusedError is a fatal error in an answer of the launcher.
type refusedError struct{ text string }

func (e *refusedError) Error() string {
	return "line: the launcher of this worker refuses it: " + e.text
}

// fail fails all calls that wait for a line.
func (c *Client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed = err
	close(c.change)
	c.change = make(chan struct{})
}

// speak uses a connection as the line until it is broken, and closes it. begun reports that the
// launcher has answered the hello.
func (c *Client) speak(conn net.Conn) (begun bool, err error) {
	defer conn.Close()
	defer context.AfterFunc(c.ctx, func() { conn.Close() })()
	in := NewReader(conn, mostDown)
	if _, err := conn.Write(append(Up("hello", Hello{Version: Version, Full: true}), '\n')); err != nil {
		return false, err
	}
	hello, _, err := in.Message()
	switch {
	case err != nil:
		return false, err
	case hello.Is == "error":
		return false, &refusedError{hello.Text}
	case hello.Is != "hello" || hello.Incarnation != c.cfg.Worker.Incarnation:
		return false, fmt.Errorf("line: the launcher has answered %q for worker %q", hello.Is, hello.Incarnation)
	}
	c.mu.Lock()
	c.conn, c.begun = conn, true
	close(c.change)
	c.change = make(chan struct{})
	again := []*asked{c.join, c.look}
	c.mu.Unlock()
	defer c.lost()
	for _, a := range again {
		if a != nil {
			c.write(conn, a.text)
		}
	}
	for {
		m, tail, err := in.Message()
		if err == nil && m.Is == "error" && m.Fatal {
			err = &refusedError{m.Text}
		}
		if err != nil {
			return true, err
		}
		c.take(conn, m, tail)
	}
}

// lost records that no line is connected, and answers the pings in flight with false.
func (c *Client) lost() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn = nil
	for id, pong := range c.pings {
		delete(c.pings, id)
		pong <- false
	}
}

// take handles a line of the launcher.
func (c *Client) take(conn net.Conn, m Message, tail []byte) {
	switch m.Is {
	case "world", "dismissed", "widen":
		c.answered(&c.join, m, tail)
	case "looked":
		c.answered(&c.look, m, tail)
	case "updated":
		c.Service.Update(m.update())
	case "lost":
		c.Service.Lose(notify.Loss{Generation: m.Generation, Ranks: m.Ranks})
	case "stacks":
		c.run.Go(func() {
			text := probe.OwnText(min(m.MostBytes, mostStacks))
			c.write(conn, Up("stacks", StacksLine{ID: m.ID, Worker: text}))
		})
	case "pong":
		c.mu.Lock()
		defer c.mu.Unlock()
		if pong := c.pings[m.ID]; pong != nil {
			delete(c.pings, m.ID)
			pong <- m.Driver
		}
	}
}

func (c *Client) answered(of **asked, m Message, tail []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if *of != nil {
		(*of).answer <- answer{m, tail}
		*of = nil
	}
}

// write writes a line, and closes the connection if that fails.
func (c *Client) write(conn net.Conn, text []byte) {
	c.writes.Lock()
	defer c.writes.Unlock()
	if _, err := conn.Write(append(text, '\n')); err != nil {
		_ = conn.Close()
	}
}

// line blocks until a line is connected, and returns its connection.
func (c *Client) line(ctx context.Context, what string) (net.Conn, error) {
	for {
		c.mu.Lock()
		conn, failed, change := c.conn, c.failed, c.change
		c.mu.Unlock()
		switch {
		case failed != nil:
			return nil, fmt.Errorf("%s: %w", what, failed)
		case conn != nil:
			return conn, nil
		}
		select {
		case <-change:
		case <-ctx.Done():
			return nil, fmt.Errorf("line: %s: %w", what, context.Cause(ctx))
		}
	}
}

// ask sends a request to the driver and blocks until there is an answer. It repeats the request on
// each new line.
func (c *Client) ask(ctx context.Context, slot **asked, what string, text []byte) (answer, error) {
	a := &asked{text, make(chan answer, 1)}
	c.mu.Lock()
	*slot = a
	conn := c.conn
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if *slot == a {
			*slot = nil
		}
	}()
	if conn != nil { // otherwise speak sends it on the next line
		c.write(conn, text)
	}
	for {
		c.mu.Lock()
		failed, change := c.failed, c.change
		c.mu.Unlock()
		if failed != nil {
			return answer{}, fmt.Errorf("%s: %w", what, failed)
		}
		select {
		case got := <-a.answer:
			return got, nil
		case <-change:
		case <-ctx.Done():
			return answer{}, fmt.Errorf("line: %s: %w", what, context.Cause(ctx))
		}
	}
}

// Join requests a world newer than j.After of which this worker is a member, and blocks until there
// is one, possibly forever. It returns ErrRemoved, ErrLast or ErrFinished if the driver dismisses
// the worker, an error if the launcher cannot be reached, the cause of ctx's end, or the launcher's
// reason for refusing the request.
func (c *Client) Join(ctx context.Context, j Joining) (Place, error) {
	j.Cause, j.Program, j.Undone = clip(j.Cause, maxCause), clip(j.Program, maxProgram), max(0, j.Undone)
	j.Has = c.has.Number()
	for {
		j.CanWiden = c.cfg.Widen != nil && len(j.DataAddrs) > 0 && !c.wide
		if err := j.Check(); err != nil {
			return Place{}, fmt.Errorf("line: join: %w", err)
		}
		got, err := c.ask(ctx, &c.join, "join", Up("join", j))
		switch {
		case err != nil:
			return Place{}, err
		case got.Is == "widen" && c.cfg.Widen != nil && !c.wide:
			c.wide = true
			if j.DataAddrs, err = c.cfg.Widen(); err != nil {
				return Place{}, fmt.Errorf("line: listening for workers on other machines: %w", err)
			}
		case got.Is == "world":
			place, err := ReadPlace(&got.Message, got.tail, j.After, &c.has)
			if err == nil {
				c.has = place
			}
			return place, err
		case got.Why == "finished":
			return Place{}, ErrFinished
		case got.Last:
			return Place{}, ErrLast
		case got.Is == "dismissed":
			return Place{}, ErrRemoved
		default:
			return Place{}, invalidReply("%q", got.Is)
		}
	}
}

// Look returns the newest world. This worker need not be a member; Rank has no meaning in the
// result. A Generation of 0 means that no world exists yet. Its errors are those of Join, without
// dismissals.
func (c *Client) Look(ctx context.Context) (World, error) {
	got, err := c.ask(ctx, &c.look, "look", Up("look", nil))
	if err != nil || got.Generation == 0 {
		return World{}, err
	}
	p, err := ReadPlace(&got.Message, got.tail, 0, nil)
	if err != nil {
		return World{}, err
	}
	return p.World()
}

// Report reports r to the driver. It blocks until a line is connected and the report is written,
// not until the driver has received it. Its errors are those of Join, without dismissals.
func (c *Client) Report(ctx context.Context, r Report, generation, commits uint64) error {
	return c.report(ctx, ReportLine{What: reportWords[r], Generation: generation, Commits: commits})
}

// ReportBackend reports to the driver the backend of the device collectives of a generation. It
// blocks as Report does, and returns the same errors, or one for a name that checkWord refuses.
func (c *Client) ReportBackend(ctx context.Context, generation uint64, backend string) error {
	return c.report(ctx, ReportLine{What: "backend", Generation: generation, Backend: backend})
}

// ReportFailure reports to the driver the error that ends the program, as text from CleanError. It
// blocks as Report does, and returns the same errors.
func (c *Client) ReportFailure(ctx context.Context, text string) error {
	return c.report(ctx, ReportLine{What: "failed", Error: CleanError(text)})
}

func (c *Client) report(ctx context.Context, r ReportLine) error {
	if err := r.Check(); err != nil {
		return fmt.Errorf("line: report: %w", err)
	}
	conn, err := c.line(ctx, "report")
	if err == nil {
		c.write(conn, Up("report", r))
	}
	return err
}

// Beat sends a heartbeat. It blocks until the first line is connected, so that the driver learns of
// each worker as early as possible. If no line is connected later, it returns ErrNotConnected.
func (c *Client) Beat(ctx context.Context, b Beat) error {
	c.mu.Lock()
	conn, begun := c.conn, c.begun
	c.mu.Unlock()
	if !begun {
		var err error
		if conn, err = c.line(ctx, "beat"); err != nil {
			return err
		}
	}
	if conn == nil {
		return ErrNotConnected
	}
	c.write(conn, Pulse(b))
	return nil
}

// Connected reports whether the launcher is connected to the driver. It blocks until the launcher
// answers, at most a second; without an answer it returns true.
func (c *Client) Connected(ctx context.Context) bool {
	pong := make(chan bool, 1)
	c.mu.Lock()
	conn := c.conn
	c.pinged++
	id := c.pinged
	if conn != nil {
		c.pings[id] = pong
	}
	c.mu.Unlock()
	if conn == nil {
		return false
	}
	c.write(conn, Up("ping", struct {
		ID uint64 `json:"id"`
	}{id}))
	late := time.NewTimer(pongBound)
	defer late.Stop()
	select {
	case is := <-pong:
		return is
	case <-late.C:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pings, id)
	return true
}

// Kill closes everything of the client that other processes can observe, without blocking. The
// caller must still call Close.
func (c *Client) Kill() {
	c.stop()
	if c.cfg.Socket != nil {
		_ = c.cfg.Socket.Close()
	}
}

// Close closes the line, and blocks until the client's goroutines have ended.
func (c *Client) Close() error {
	c.stop()
	c.run.Wait()
	return nil
}

// Check returns an error if a report is not valid.
func (r *ReportLine) Check() error {
	switch {
	case r.What == "backend":
		return checkWord(r.Backend)
	case r.What == "failed":
		return checkError(r.Error)
	case r.Report() == 0:
		return fmt.Errorf("%q is no report", clip(r.What, maxAddr))
	}
	return nil
}
