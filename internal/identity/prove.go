package identity

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
)

// The proof on a data connection. Both ends have the data key; neither sends it.
//
//	acceptor → dialer   challenge: magic, nonce A
//	dialer → acceptor   claim:     magic, generation, lane, from, to, channel, nonce D, MAC("dialer", transcript)
//	acceptor → dialer   verdict:   accepted, refused or later, reason, MAC("acceptor", transcript, verdict)
//
// The transcript contains the run id, the claim, both nonces and, under TLS, the connection's
// exporter value. The fresh nonces prevent replay, the two labels prevent reflection, and the
// exporter value prevents a relay between two TLS connections. All messages have a fixed size, so
// that an unproven peer cannot make the other end allocate or wait for more.
const (
	nonceLen  = 32
	reasonLen = 126

	challengeLen = len(magic) + nonceLen
	claimLen     = len(magic) + helloLen + nonceLen + sha256.Size
	verdictLen   = 2 + reasonLen + sha256.Size
	helloLen     = 8 + 8 + 4 + 4 + 4

	magic         = "hvdrun\x00\x03" // the last byte is the version of the proof
	dialerLabel   = "hvdrun data connection, dialer"
	acceptorLabel = "hvdrun data connection, acceptor"
	exporterLabel = "EXPORTER-hvdrun-data-connection"

	accepted = 1
	refused  = 2
	later    = 3 // refused for now
)

// Hello is the claim of the dialer of a data connection: it is rank From of a group of the
// generation and connects to rank To. Lane identifies the group in the generation, Channel one of
// several connections between the two ranks. Ranks and channels are from 0 to 2^31-1.
type Hello struct {
	Generation uint64
	From, To   int
	Channel    int
	Lane       uint64
}

// ErrUnproven is wrapped by errors of ProveDial and ProveAccept if the peer has answered but has
// not proven that it has the data key and that its proof is for this connection.
var ErrUnproven = errors.New("the peer has not proven that it is of this job")

// RefusedError is returned by ProveDial if an acceptor with a valid proof refuses the connection.
type RefusedError struct {
	// Reason is the acceptor's reason, at most 126 bytes.
	Reason string
	// Later: the acceptor does not accept the connection now, but may accept a later attempt.
	Later bool
}

// ErrLater is wrapped by an error of ProveAccept's check to set Later in the dialer's RefusedError.
var ErrLater = errors.New("try again later")

// Error returns "identity: refused: " and the reason.
func (e *RefusedError) Error() string { return "identity: refused: " + e.Reason }

// ProveDial proves to the acceptor on conn that the caller has the key and claims h, and verifies
// the acceptor's proof. It returns nil if both proofs are valid and the acceptor agrees, a
// *RefusedError if the acceptor refuses, an error that wraps ErrUnproven, or an error of the
// connection. It blocks as conn does: the caller sets deadlines, and closes conn after an error. It
// reads nothing beyond the proof.
func (c *Credentials) ProveDial(conn net.Conn, key DataKey, h Hello) error {
	if key.key == nil {
		return errors.New("identity: a data connection needs a key")
	}
	for _, n := range [...]int{h.From, h.To, h.Channel} {
		if n < 0 || n > math.MaxInt32 {
			return fmt.Errorf("identity: %d is not a valid rank or channel", n)
		}
	}
	binding, err := exporter(conn)
	if err != nil {
		return err
	}
	var challenge [challengeLen]byte
	if _, err := io.ReadFull(conn, challenge[:]); err != nil {
		return fmt.Errorf("identity: challenge: %w", noEOF(err))
	}
	if string(challenge[:len(magic)]) != magic {
		return fmt.Errorf("identity: challenge: %w", ErrUnproven)
	}
	var claim [claimLen]byte
	p := append(claim[:0], magic...)
	p = h.append(p)
	nonce := p[len(p) : len(p)+nonceLen]
	rand.Read(nonce)
	t := transcript{h, [nonceLen]byte(nonce), [nonceLen]byte(challenge[len(magic):]), binding}
	copy(claim[claimLen-sha256.Size:], c.mac(key, dialerLabel, &t, nil))
	if _, err := conn.Write(claim[:]); err != nil {
		return fmt.Errorf("identity: claim: %w", err)
	}
	var verdict [verdictLen]byte
	if _, err := io.ReadFull(conn, verdict[:]); err != nil {
		return fmt.Errorf("identity: verdict: %w", noEOF(err))
	}
	said, sum := verdict[:2+reasonLen], verdict[2+reasonLen:]
	if !hmac.Equal(sum, c.mac(key, acceptorLabel, &t, said)) {
		return fmt.Errorf("identity: verdict: %w", ErrUnproven)
	}
	if said[0] == accepted {
		return nil
	}
	return &RefusedError{Reason: string(said[2 : 2+min(int(said[1]), reasonLen)]), Later: said[0] == later}
}

// ProveAccept is the acceptor's side of ProveDial. It calls keyOf with the dialer's claim, not yet
// proven, to get the key; keyOf may block, and its error is returned without an answer to the
// dialer. Once the dialer's proof is valid, and before it sends anything except a nonce,
// ProveAccept calls check (nil: accept all). An error of check is sent to the dialer, truncated to
// 126 bytes, and returned. The Hello is returned with errors after the dialer's proof, and is zero
// with earlier ones. A dialer without a valid proof gets no answer. ProveAccept blocks as conn
// does: the caller sets deadlines, and closes conn after an error.
func (c *Credentials) ProveAccept(conn net.Conn, keyOf func(Hello) (DataKey, error), check func(Hello) error) (Hello, error) {
	binding, err := exporter(conn)
	if err != nil {
		return Hello{}, err
	}
	var challenge [challengeLen]byte
	nonce := challenge[copy(challenge[:], magic):]
	rand.Read(nonce)
	if _, err := conn.Write(challenge[:]); err != nil {
		return Hello{}, fmt.Errorf("identity: challenge: %w", err)
	}
	var claim [claimLen]byte
	if _, err := io.ReadFull(conn, claim[:]); err != nil {
		return Hello{}, fmt.Errorf("identity: claim: %w", noEOF(err))
	}
	body, sum := claim[:claimLen-sha256.Size], claim[claimLen-sha256.Size:]
	h, ok := parseHello(body[len(magic):])
	if string(body[:len(magic)]) != magic || !ok {
		return Hello{}, fmt.Errorf("identity: claim: %w", ErrUnproven)
	}
	key, err := keyOf(h)
	if err != nil {
		return Hello{}, err
	}
	t := transcript{h, [nonceLen]byte(body[len(magic)+helloLen:]), [nonceLen]byte(nonce), binding}
	if key.key == nil || !hmac.Equal(sum, c.mac(key, dialerLabel, &t, nil)) {
		return Hello{}, fmt.Errorf("identity: claim: %w", ErrUnproven)
	}
	var refusal error
	if check != nil {
		refusal = check(h)
	}
	var verdict [verdictLen]byte
	said := verdict[:2+reasonLen]
	said[0] = accepted
	if refusal != nil {
		if said[0] = refused; errors.Is(refusal, ErrLater) {
			said[0] = later
		}
		said[1] = byte(copy(said[2:], shorten(refusal.Error())))
	}
	copy(verdict[2+reasonLen:], c.mac(key, acceptorLabel, &t, said))
	_, err = conn.Write(verdict[:])
	if refusal != nil {
		return h, fmt.Errorf("identity: rank %d of generation %d refused: %w", h.From, h.Generation, refusal)
	}
	if err != nil {
		return h, fmt.Errorf("identity: verdict: %w", err)
	}
	return h, nil
}

func (h Hello) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, h.Generation)
	b = binary.BigEndian.AppendUint64(b, h.Lane)
	b = binary.BigEndian.AppendUint32(b, uint32(h.From))
	b = binary.BigEndian.AppendUint32(b, uint32(h.To))
	return binary.BigEndian.AppendUint32(b, uint32(h.Channel))
}

// parseHello parses a claim, and reports whether every number is within its bounds.
func parseHello(b []byte) (Hello, bool) {
	from, to, channel := binary.BigEndian.Uint32(b[16:]), binary.BigEndian.Uint32(b[20:]), binary.BigEndian.Uint32(b[24:])
	h := Hello{binary.BigEndian.Uint64(b), int(int32(from)), int(int32(to)), int(int32(channel)), binary.BigEndian.Uint64(b[8:])}
	return h, max(from, to, channel) <= math.MaxInt32
}

type transcript struct {
	hello            Hello
	dialer, acceptor [nonceLen]byte
	binding          []byte
}

// mac returns the MAC of the transcript in an unambiguous encoding: a length precedes each part of
// variable length.
func (c *Credentials) mac(key DataKey, label string, t *transcript, said []byte) []byte {
	b := appendParts(make([]byte, 0, 512), []byte(label), []byte(c.subject.RunID), t.binding, said)
	b = t.hello.append(b)
	b = append(b, t.dialer[:]...)
	b = append(b, t.acceptor[:]...)
	return key.sum(b)
}

// exporter returns the exporter value that binds a proof to a TLS connection; nil without TLS.
func exporter(conn net.Conn) ([]byte, error) {
	t, ok := conn.(*tls.Conn)
	if !ok {
		return nil, nil
	}
	if err := t.Handshake(); err != nil {
		return nil, fmt.Errorf("identity: %w", err)
	}
	cs := t.ConnectionState()
	b, err := cs.ExportKeyingMaterial(exporterLabel, nil, sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("identity: %w", err)
	}
	return b, nil
}

// shorten truncates a reason to the size of the field, between two characters.
func shorten(reason string) string {
	return strings.ToValidUTF8(reason[:min(len(reason), reasonLen)], "")
}

// noEOF replaces io.EOF, because a connection that ends within the proof has not ended cleanly.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
