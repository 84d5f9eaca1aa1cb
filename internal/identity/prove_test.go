package identity

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

var hello = Hello{Generation: 3, From: 2, To: 1, Channel: 4, Lane: 5}

// pair returns both ends of a connection over loopback, with generous deadlines.
func pair(t testing.TB) (dialer, acceptor net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	dialer, err = net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	acceptor, err = ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []net.Conn{dialer, acceptor} {
		c.SetDeadline(sandbox.Limit())
		t.Cleanup(func() { c.Close() })
	}
	return dialer, acceptor
}

// dataKey is the key of all connections of these tests.
var dataKey = NewDataKey()

func oneKey(Hello) (DataKey, error) { return dataKey, nil }

type outcome struct {
	hello Hello
	err   error
}

// accept runs ProveAccept and closes the connection after an error, as its callers do.
func accept(c *Credentials, conn net.Conn, check func(Hello) error) <-chan outcome {
	ch := make(chan outcome, 1)
	go func() {
		h, err := c.ProveAccept(conn, oneKey, check)
		if err != nil {
			conn.Close()
		}
		ch <- outcome{h, err}
	}()
	return ch
}

// spy records the data read and written.
type spy struct {
	net.Conn
	in, out bytes.Buffer
}

func (s *spy) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	s.in.Write(b[:n])
	return n, err
}

func (s *spy) Write(b []byte) (int, error) {
	s.out.Write(b)
	return s.Conn.Write(b)
}

func jobOf(t testing.TB, runID string) (*Authority, *Credentials) {
	a := newAuthority(t, runID)
	return a, issue(t, a, Subject{Role: Worker})
}

func TestProof(t *testing.T) {
	_, c := jobOf(t, "r")
	d, a := pair(t)
	got := accept(c, a, func(h Hello) error {
		if h != hello {
			t.Errorf("check was called with %+v", h)
		}
		return nil
	})
	if err := c.ProveDial(d, dataKey, hello); err != nil {
		t.Fatal(err)
	}
	if o := <-got; o.err != nil || o.hello != hello {
		t.Fatalf("%+v", o)
	}
	// Data after the proof is not consumed.
	go d.Write([]byte("data"))
	b := make([]byte, 4)
	if _, err := io.ReadFull(a, b); err != nil || string(b) != "data" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestProofRefusedByCheck(t *testing.T) {
	_, c := jobOf(t, "r")
	over := errors.New("generation 3 is over")
	long := errors.New(strings.Repeat("é", 200) + "\n")
	for _, why := range []error{over, long} {
		d, a := pair(t)
		got := accept(c, a, func(Hello) error { return why })
		err := c.ProveDial(d, dataKey, hello)
		var refusal *RefusedError
		if !errors.As(err, &refusal) {
			t.Fatalf("dialer: %v", err)
		}
		if why == over && err.Error() != "identity: refused: generation 3 is over" {
			t.Errorf("dialer: %v", err)
		}
		if len(refusal.Reason) > reasonLen || !utf8.ValidString(refusal.Reason) || refusal.Reason == "" {
			t.Errorf("reason %q", refusal.Reason)
		}
		if o := <-got; !errors.Is(o.err, why) || o.hello != hello {
			t.Errorf("acceptor: %+v", o)
		}
	}
}

func TestProofOfAnotherKeyFails(t *testing.T) {
	one, c := jobOf(t, "r")
	forged := *one.authority
	forged.runID = "other"
	otherRun := issue(t, &Authority{&forged}, Subject{Role: Worker})
	for _, stranger := range []struct {
		*Credentials
		key DataKey
	}{{c, NewDataKey()}, {c, dataKey.ForVisits()}, {c, DataKey{}}, {otherRun, dataKey}} {
		d, a := pair(t)
		s := &spy{Conn: a}
		got := accept(c, s, func(Hello) error { t.Error("check was asked about a stranger"); return nil })
		if err := stranger.ProveDial(d, stranger.key, hello); err == nil {
			t.Error("a stranger was let in")
		}
		d.Close()
		if o := <-got; o.err == nil || o.hello != (Hello{}) {
			t.Errorf("%+v", o)
		}
		if s.out.Len() != challengeLen {
			t.Errorf("a stranger was told %d bytes", s.out.Len())
		}
	}
}

// TestDialerRefusesFalseAcceptor: an acceptor without the key cannot pose as a member of the job.
func TestDialerRefusesFalseAcceptor(t *testing.T) {
	_, c := jobOf(t, "r")
	challenge := append([]byte(magic), make([]byte, nonceLen)...)
	verdict := make([]byte, verdictLen)
	verdict[0] = accepted
	for name, answer := range map[string]func(claim []byte) []byte{
		"zeros": func([]byte) []byte { return verdict },
		"reflected": func(claim []byte) []byte {
			return append(bytes.Clone(verdict[:2+reasonLen]), claim[claimLen-32:]...)
		},
		"cut": func([]byte) []byte { return verdict[:verdictLen-1] },
	} {
		d, a := pair(t)
		go func() {
			defer a.Close()
			a.Write(challenge)
			claim := make([]byte, claimLen)
			if _, err := io.ReadFull(a, claim); err == nil {
				a.Write(answer(claim))
			}
		}()
		err := c.ProveDial(d, dataKey, hello)
		if want := name != "cut"; err == nil || errors.Is(err, ErrUnproven) != want {
			t.Errorf("%s: %v", name, err)
		}
		if name == "cut" && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: %v", name, err)
		}
	}
	d, a := pair(t)
	go a.Write(bytes.Repeat([]byte("HTTP/1.1"), 100))
	if err := c.ProveDial(d, dataKey, hello); !errors.Is(err, ErrUnproven) {
		t.Errorf("another service: %v", err)
	}
}

// honest returns the claim of a dialer of the job.
func honest(t testing.TB, c *Credentials, h Hello) []byte {
	t.Helper()
	d, a := pair(t)
	s := &spy{Conn: d}
	got := accept(c, a, nil)
	if err := c.ProveDial(s, dataKey, h); err != nil {
		t.Fatal(err)
	}
	if o := <-got; o.err != nil {
		t.Fatal(o.err)
	}
	return s.out.Bytes()
}

func TestReplayFails(t *testing.T) {
	_, c := jobOf(t, "r")
	claim := honest(t, c, hello)
	d, a := pair(t)
	got := accept(c, a, nil)
	go d.Write(claim)
	if o := <-got; !errors.Is(o.err, ErrUnproven) {
		t.Errorf("%+v", o)
	}
}

// relay carries the proof between two connections and lets tamper change the claim.
func relay(t *testing.T, c *Credentials, tamper func([]byte)) (o outcome, dialErr error) {
	t.Helper()
	d, da := pair(t)
	ad, a := pair(t)
	got := accept(c, a, nil)
	done := make(chan error, 1)
	go func() { done <- c.ProveDial(d, dataKey, hello) }()
	challenge, claim := make([]byte, challengeLen), make([]byte, claimLen)
	if _, err := io.ReadFull(ad, challenge); err != nil {
		t.Fatal(err)
	}
	da.Write(challenge)
	if _, err := io.ReadFull(da, claim); err != nil {
		t.Fatal(err)
	}
	tamper(claim)
	ad.Write(claim)
	o = <-got
	da.Close()
	return o, <-done
}

// TestTamperedClaimFails: every bit of a claim is verified: generation, ranks, channel, nonce and
// proof.
func TestTamperedClaimFails(t *testing.T) {
	_, c := jobOf(t, "r")
	for i := range claimLen {
		o, dialErr := relay(t, c, func(claim []byte) { claim[i] ^= 1 })
		if !errors.Is(o.err, ErrUnproven) || dialErr == nil {
			t.Fatalf("byte %d: acceptor %+v, dialer %v", i, o, dialErr)
		}
	}
}

// TestHelloIsBound: a claim for one connection is not valid for another that differs in any number.
func TestHelloIsBound(t *testing.T) {
	_, c := jobOf(t, "r")
	for _, h := range []Hello{{4, 2, 1, 4, 5}, {3, 0, 1, 4, 5}, {3, 2, 0, 4, 5}, {3, 2, 1, 5, 5}, {3, 1, 2, 4, 5}, {3, 2, 1, 4, 0}} {
		o, _ := relay(t, c, func(claim []byte) { h.append(claim[:len(magic)]) })
		if !errors.Is(o.err, ErrUnproven) {
			t.Errorf("%+v: %+v", h, o)
		}
	}
}

func TestTruncatedClaimFails(t *testing.T) {
	_, c := jobOf(t, "r")
	claim := honest(t, c, hello)
	for n := range len(claim) {
		d, a := net.Pipe()
		got := accept(c, a, nil)
		io.CopyN(io.Discard, d, int64(challengeLen))
		d.Write(claim[:n])
		d.Close()
		if o := <-got; o.err == nil || o.hello != (Hello{}) {
			t.Fatalf("%d bytes: %+v", n, o)
		}
	}
}

func TestProveDialRefusesNumbers(t *testing.T) {
	_, c := jobOf(t, "r")
	for _, h := range []Hello{{From: -1}, {To: 1 << 31}, {Channel: -1}} {
		if err := c.ProveDial(nil, dataKey, h); err == nil {
			t.Errorf("%+v was sent", h)
		}
	}
}

func TestProofUnderTLS(t *testing.T) {
	_, c := jobOf(t, "r")
	d, a := pair(t)
	got := accept(c, tls.Server(a, c.ServerTLS(Worker)), nil)
	if err := c.ProveDial(tls.Client(d, c.ClientTLS(Subject{Role: Worker})), dataKey, hello); err != nil {
		t.Fatal(err)
	}
	if o := <-got; o.err != nil || o.hello != hello {
		t.Fatalf("%+v", o)
	}
}

// TestProofIsBoundToTheTLSConnection: a relay between two TLS connections that forwards the genuine
// proof is detected.
func TestProofIsBoundToTheTLSConnection(t *testing.T) {
	_, c := jobOf(t, "r")
	d, da := pair(t)
	ad, a := pair(t)
	client, server := c.ClientTLS(Subject{Role: Worker}), c.ServerTLS(Worker)
	got := accept(c, tls.Server(a, server), nil)
	done := make(chan error, 1)
	go func() {
		err := c.ProveDial(tls.Client(d, client), dataKey, hello)
		done <- err
	}()
	left, right := tls.Server(da, server), tls.Client(ad, client)
	go func() {
		io.Copy(left, right)
		left.Close()
	}()
	go io.Copy(right, left)
	if o := <-got; !errors.Is(o.err, ErrUnproven) {
		t.Errorf("%+v", o)
	}
	if err := <-done; err == nil {
		t.Error("the dialer was content")
	}
}

func FuzzProveAccept(f *testing.F) {
	_, c := jobOf(f, "r")
	f.Add([]byte{})
	f.Add(honest(f, c, hello))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, said []byte) {
		d, a := net.Pipe()
		s := &spy{Conn: a}
		got := accept(c, s, func(Hello) error { t.Error("check was asked about a stranger"); return nil })
		io.CopyN(io.Discard, d, int64(challengeLen))
		d.Write(said) // on a pipe, it ends when the acceptor has read everything or has closed it
		d.Close()
		if o := <-got; o.err == nil || o.hello != (Hello{}) {
			t.Errorf("%+v", o)
		}
		if s.out.Len() != challengeLen || s.in.Len() > claimLen {
			t.Errorf("read %d bytes, wrote %d", s.in.Len(), s.out.Len())
		}
	})
}

func BenchmarkProof(b *testing.B) {
	_, c := jobOf(b, "r")
	d, a := pair(b)
	d.SetDeadline(time.Time{})
	a.SetDeadline(time.Time{})
	done := make(chan error, 1)
	go func() {
		for range b.N {
			if _, err := c.ProveAccept(a, oneKey, nil); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	b.ResetTimer()
	b.ReportAllocs()
	for range b.N {
		if err := c.ProveDial(d, dataKey, hello); err != nil {
			b.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		b.Fatal(err)
	}
}

// TestDataKeys: the keys of generations, jobs and visits differ, and each driver of a job derives
// the same ones.
func TestDataKeys(t *testing.T) {
	a, b := newAuthority(t, "r"), newAuthority(t, "r")
	text, err := a.Encode()
	if err != nil {
		t.Fatal(err)
	}
	again, err := DecodeAuthority(text)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.DataKey(7).Bytes(), again.DataKey(7).Bytes()) {
		t.Error("the next driver has another key")
	}
	seen := map[string]bool{}
	for _, k := range []DataKey{
		a.DataKey(7), a.DataKey(8), b.DataKey(7), a.DataKey(7).ForVisits(), a.DataKey(8).ForVisits(), NewDataKey(), NewDataKey(),
	} {
		parsed, err := ParseDataKey(k.Bytes())
		if err != nil || !bytes.Equal(parsed.Bytes(), k.Bytes()) || len(k.Bytes()) != keyLen || seen[string(k.Bytes())] {
			t.Errorf("%x, parsed as %x: %v", k.Bytes(), parsed.Bytes(), err)
		}
		seen[string(k.Bytes())] = true
		if text := fmt.Sprintf("%v %x %+v %d", k, k, k, k); strings.Contains(text, fmt.Sprintf("%x", k.Bytes()[:4])) {
			t.Errorf("printed as %s", text)
		}
	}
	if _, err := ParseDataKey(make([]byte, keyLen-1)); err == nil {
		t.Error("a short key was parsed")
	}
	if k := (DataKey{}); k.Bytes() != nil || k.ForVisits().Bytes() != nil {
		t.Error("the zero value is a key")
	}
	if k := clusterOf(t, clusterKey, "blue").DataKey(1); k.Bytes() != nil {
		t.Error("the authority of a cluster has data keys")
	}
}

// FuzzHello: a hello whose numbers are within their bounds is written as it was read, and a
// negative number is always detected.
func FuzzHello(f *testing.F) {
	f.Add(hello.append(nil))
	f.Add(bytes.Repeat([]byte{0xff}, len(hello.append(nil))))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) != len(hello.append(nil)) {
			return // a proof has a fixed length
		}
		h, ok := parseHello(b)
		if ok != (min(h.From, h.To, h.Channel) >= 0) {
			t.Errorf("%+v: %v", h, ok)
		}
		if ok && !bytes.Equal(h.append(nil), b) {
			t.Errorf("%x is read as %+v", b, h)
		}
	})
}
