// Package zmtp speaks ZeroMQ's message transport protocol, ZMTP 3.0 with the mechanism NULL, on
// connections between a DEALER and a ROUTER: Dial or Handshake returns a Conn, which reads and
// writes messages. Unlike the package go-zeromq/zmq4, it checks sizes that a peer announces before
// it allocates memory.
package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
)

// Role is the type of a socket, as the handshake announces it to the peer.
type Role string

// The two roles. Each connects only to the other.
const (
	Dealer Role = "DEALER"
	Router Role = "ROUTER"
)

func (r Role) peer() Role {
	if r == Dealer {
		return Router
	}
	return Dealer
}

// Config describes one end of a connection.
type Config struct {
	Role Role
	// Identity identifies a dealer to its router. It has at most 255 bytes, of which the first is
	// not 0.
	Identity []byte
	Limits   Limits
}

// Limits bounds what is read from a peer.
type Limits struct {
	// Message is the largest number of bytes of a message; 0: 256 MiB.
	Message int64
	// Frames is the largest number of frames of a message; 0: 65,536.
	Frames int
}

const (
	defaultMessage = 256 << 20
	defaultFrames  = 1 << 16
	// maxCommand is the largest size of a command. The longest one is READY with an identity.
	maxCommand = 4 << 10
	// maxIdentity is the largest length of an identity that ZeroMQ permits.
	maxIdentity = 255
	// firstRead is how much memory is allocated for a frame before more of it has arrived.
	firstRead = 64 << 10
)

// errProtocol is returned if a peer does not speak ZMTP 3 with the mechanism NULL, or has the wrong
// role.
var errProtocol = errors.New("zmtp: the peer is no ZeroMQ socket of the right kind")

// TooLargeError is returned for a message that exceeds the limits. The message has been read and
// dropped, so the next one can be read.
type TooLargeError struct {
	// First is the message's first frame, if that by itself is within the limits.
	First []byte
	// Size is the number of bytes of the message, and Frames the number of its frames.
	Size   uint64
	Frames int
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("zmtp: a message of %d bytes in %d frames is over the limit", e.Size, e.Frames)
}

// Conn is a connection after the handshake. Read and Write may be called concurrently, each by one
// goroutine at a time. Close may be called by any goroutine.
type Conn struct {
	conn   net.Conn
	in     *bufio.Reader
	limits Limits
	peer   []byte

	mu  sync.Mutex // serialises writes: Read answers pings
	out *bufio.Writer
}

// The flags of a frame.
const (
	more    = 1
	long    = 2
	command = 4
)

// Handshake performs the handshake on a new connection and returns a Conn, which then owns the
// connection. It blocks until the peer has completed the handshake; the caller sets deadlines. If
// it returns an error, the caller still owns the connection.
func Handshake(conn net.Conn, cfg Config) (*Conn, error) {
	if len(cfg.Identity) > maxIdentity || len(cfg.Identity) > 0 && cfg.Identity[0] == 0 {
		return nil, fmt.Errorf("zmtp: the identity %q is not valid: give at most %d bytes, of which the first is not 0", cfg.Identity, maxIdentity)
	}
	if cfg.Limits.Message == 0 {
		cfg.Limits.Message = defaultMessage
	}
	if cfg.Limits.Frames == 0 {
		cfg.Limits.Frames = defaultFrames
	}
	c := &Conn{conn: conn, in: bufio.NewReaderSize(conn, 64<<10), out: bufio.NewWriterSize(conn, 64<<10), limits: cfg.Limits}
	if _, err := c.out.Write(greeting()); err != nil {
		return nil, err
	}
	if err := c.frame(command, ready(cfg)); err != nil {
		return nil, err
	}
	if err := c.out.Flush(); err != nil {
		return nil, err
	}
	if err := c.greeted(); err != nil {
		return nil, err
	}
	return c, c.meet(cfg)
}

// greeting returns the greeting: a signature, version 3.0, the mechanism, and whether this end is
// the mechanism's server, which NULL does not have.
func greeting() []byte {
	g := make([]byte, 64)
	g[0], g[8], g[9], g[10] = 0xff, 1, 0x7f, 3
	copy(g[12:32], "NULL")
	return g
}

func (c *Conn) greeted() error {
	g := make([]byte, 64)
	// A peer with an older version sends fewer than 64 bytes, and then waits.
	if _, err := io.ReadFull(c.in, g[:11]); err != nil {
		return err
	}
	if g[0] != 0xff || g[9]&1 == 0 || g[10] < 3 {
		return fmt.Errorf("%w: it began with %x", errProtocol, g[:11])
	}
	if _, err := io.ReadFull(c.in, g[11:]); err != nil {
		return err
	}
	if mechanism := string(bytes.TrimRight(g[12:32], "\x00")); mechanism != "NULL" {
		return fmt.Errorf("%w: it uses mechanism %q, not NULL", errProtocol, mechanism)
	}
	return nil
}

// ready returns the command that announces this end's role and identity.
func ready(cfg Config) []byte {
	b := append([]byte{5}, "READY"...)
	property := func(name string, value []byte) {
		b = append(append(b, byte(len(name))), name...)
		b = append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
	}
	property("Socket-Type", []byte(cfg.Role))
	if cfg.Role == Dealer {
		property("Identity", cfg.Identity)
	}
	return b
}

// meet reads and checks the peer's READY.
func (c *Conn) meet(cfg Config) error {
	flags, size, err := c.header()
	if err != nil {
		return err
	}
	if flags&command == 0 || size > maxCommand {
		return fmt.Errorf("%w: it did not send READY", errProtocol)
	}
	body, err := c.body(size)
	if err != nil {
		return err
	}
	name, rest, err := commandOf(body)
	if err != nil {
		return err
	}
	if name != "READY" {
		return fmt.Errorf("%w: it sent %q instead of READY", errProtocol, name)
	}
	properties, err := propertiesOf(rest)
	if err != nil {
		return err
	}
	if role := Role(properties["socket-type"]); role != cfg.Role.peer() {
		return fmt.Errorf("%w: a %s meets a %s", errProtocol, cfg.Role, role)
	}
	c.peer = []byte(properties["identity"])
	if len(c.peer) > maxIdentity {
		return fmt.Errorf("%w: its identity has %d bytes", errProtocol, len(c.peer))
	}
	return nil
}

func commandOf(body []byte) (name string, rest []byte, err error) {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return "", nil, fmt.Errorf("%w: it sent a command of %d bytes", errProtocol, len(body))
	}
	n := int(body[0])
	return string(body[1 : 1+n]), body[1+n:], nil
}

// propertiesOf decodes properties. It converts their names to lower case, because ZeroMQ ignores
// the case.
func propertiesOf(b []byte) (map[string]string, error) {
	properties := map[string]string{}
	for len(b) > 0 {
		n := int(b[0])
		if len(b) < 1+n+4 {
			return nil, fmt.Errorf("%w: a property is cut off", errProtocol)
		}
		name := string(bytes.ToLower(b[1 : 1+n]))
		size := uint64(binary.BigEndian.Uint32(b[1+n:]))
		b = b[1+n+4:]
		if size > uint64(len(b)) {
			return nil, fmt.Errorf("%w: property %q is cut off", errProtocol, name)
		}
		properties[name], b = string(b[:size]), b[size:]
	}
	return properties, nil
}

// Peer returns the identity that the peer has announced, or nil.
func (c *Conn) Peer() []byte { return slices.Clone(c.peer) }

// Write sends a message of at least one frame. It blocks until the kernel has accepted all of it.
func (c *Conn) Write(frames [][]byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, body := range frames {
		flags := byte(more)
		if i == len(frames)-1 {
			flags = 0
		}
		if err := c.frame(flags, body); err != nil {
			return err
		}
	}
	return c.out.Flush()
}

func (c *Conn) frame(flags byte, body []byte) error {
	header := [9]byte{flags, byte(len(body))}
	n := 2
	if len(body) > 255 {
		header[0] |= long
		binary.BigEndian.PutUint64(header[1:], uint64(len(body)))
		n = 9
	}
	if _, err := c.out.Write(header[:n]); err != nil {
		return err
	}
	_, err := c.out.Write(body)
	return err
}

// Read returns the next message. The caller owns its frames. Read blocks until a message arrives,
// and answers pings meanwhile. It may be called again after a *TooLargeError, but not after any
// other error.
func (c *Conn) Read() ([][]byte, error) {
	var frames [][]byte
	var total uint64 // sum of the frames' sizes, saturating
	count, over := 0, false
	for {
		flags, size, err := c.header()
		if err != nil {
			return nil, err
		}
		if flags&command != 0 {
			if err := c.command(size); err != nil {
				return nil, err
			}
			continue
		}
		count++
		if total += size; total < size {
			return nil, fmt.Errorf("%w: it sent a message of more than 2^64 bytes", errProtocol)
		}
		over = over || total > uint64(c.limits.Message) || count > c.limits.Frames
		if over {
			if err := c.discard(size); err != nil {
				return nil, err
			}
			frames = frames[:min(len(frames), 1)]
		} else {
			body, err := c.body(size)
			if err != nil {
				return nil, err
			}
			frames = append(frames, body)
		}
		if flags&more != 0 {
			continue
		}
		if over {
			tooLarge := &TooLargeError{Size: total, Frames: count}
			if len(frames) > 0 {
				tooLarge.First = frames[0]
			}
			return nil, tooLarge
		}
		return frames, nil
	}
}

func (c *Conn) header() (flags byte, size uint64, err error) {
	var b [8]byte
	if _, err := io.ReadFull(c.in, b[:1]); err != nil {
		return 0, 0, err
	}
	flags = b[0]
	if flags&^(more|long|command) != 0 || flags&command != 0 && flags&more != 0 {
		return 0, 0, fmt.Errorf("%w: it sent a frame with flags %#x", errProtocol, flags)
	}
	if flags&long == 0 {
		_, err = io.ReadFull(c.in, b[:1])
		return flags, uint64(b[0]), err
	}
	_, err = io.ReadFull(c.in, b[:])
	return flags, binary.BigEndian.Uint64(b[:]), err
}

// body reads a frame. It allocates memory as bytes arrive.
func (c *Conn) body(size uint64) ([]byte, error) {
	b := make([]byte, 0, min(size, firstRead))
	for uint64(len(b)) < size {
		if len(b) == cap(b) {
			b = slices.Grow(b, int(min(size-uint64(len(b)), uint64(len(b)))))
		}
		n, err := io.ReadFull(c.in, b[len(b):min(uint64(cap(b)), size)])
		b = b[:len(b)+n]
		if err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (c *Conn) discard(size uint64) error {
	for size > 0 {
		n := min(size, 1<<30)
		if _, err := io.CopyN(io.Discard, c.in, int64(n)); err != nil {
			return err
		}
		size -= n
	}
	return nil
}

// command answers a ping, and ignores other commands, which have no effect between a dealer and a
// router.
func (c *Conn) command(size uint64) error {
	if size > maxCommand {
		return fmt.Errorf("%w: it sent a command of %d bytes", errProtocol, size)
	}
	body, err := c.body(size)
	if err != nil {
		return err
	}
	name, rest, err := commandOf(body)
	if err != nil {
		return err
	}
	switch name {
	case "ERROR":
		return fmt.Errorf("zmtp: the peer refuses: %q", rest)
	case "PING":
		if len(rest) < 2 {
			return fmt.Errorf("%w: it sent a ping of %d bytes", errProtocol, len(rest))
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if err := c.frame(command, append(append([]byte{4}, "PONG"...), rest[2:]...)); err != nil {
			return err
		}
		return c.out.Flush()
	}
	return nil
}

// Close closes the connection. Read and Write then fail.
func (c *Conn) Close() error { return c.conn.Close() }
