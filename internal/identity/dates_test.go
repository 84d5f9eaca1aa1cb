package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestExplain: the error of a certificate that is refused because of its dates says by how much the
// clocks differ; other errors are unchanged.
func TestExplain(t *testing.T) {
	now := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	a, err := NewClusterAuthority(now.Add(-48 * time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	later, err := NewClusterAuthority(now.Add(2 * time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		by     *Authority
		signed time.Duration // after now
		at     time.Duration
		want   string // empty: it is valid
	}{
		{a, 0, 0, ""},
		{a, 59 * time.Minute, 0, ""},
		{a, 62 * time.Minute, 0, "the certificate of agent node1 is not yet valid: the clock of this machine is at least 1h2m0s behind that of the machine which has signed it"},
		{a, 0, 26 * time.Hour, "the certificate of agent node1 ended 2h0m0s ago, at 2030-01-02T12:00:00Z: it was not renewed, or the clock of this machine is that much ahead"},
		{later, 0, 0, "the certificate of the peer's authority is not yet valid: the clock of this machine is at least 2h0m0s behind"},
	} {
		creds, err := c.by.IssueFor(Subject{Role: Agent, Host: "node1"}, now.Add(c.signed), 24*time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		pool.AddCert(creds.ca)
		at := now.Add(c.at)
		_, err = creds.own.Load().leaf.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: at})
		if err = Explain(err, at); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("signed %v after, at %v: %v, want %q", c.signed, c.at, err, c.want)
		}
	}
	for _, err := range []error{nil, errors.New("x"), x509.UnknownAuthorityError{}, x509.CertificateInvalidError{Reason: x509.NotAuthorizedToSign}} {
		if got := Explain(err, now); got != err {
			t.Errorf("%v became %v", err, got)
		}
	}
}

// TestWarnRefused: strangers cannot fill the log with refused connections.
func TestWarnRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said lines
		ln, from := &Listener{}, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 7}
		for range 1000 {
			ln.WarnRefused(&said, "store", from, errors.New("a stranger"))
		}
		<-time.After(time.Minute)
		ln.WarnRefused(&said, "store", from, errors.New("a stranger"))
		want := lines{
			"store: a connection from 127.0.0.1:7 is refused: a stranger",
			"store: a connection from 127.0.0.1:7 is refused: a stranger; and 999 more such failures in 1m0s",
		}
		if !slices.Equal(said, want) {
			t.Errorf("%q", said)
		}
	})
}

type lines []string

func (l *lines) Warnf(format string, args ...any) { *l = append(*l, fmt.Sprintf(format, args...)) }

// TestRefusedByDates: the function that gets the connections that a listener has refused also gets
// the difference of the clocks.
func TestRefusedByDates(t *testing.T) {
	ln := &Listener{}
	var told error
	ln.OnRefused(func(_ net.Addr, why error) { told = why })
	a, err := NewClusterAuthority(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	creds, err := a.IssueFor(Subject{Role: Agent, Host: "node1"}, time.Now().Add(3*time.Hour), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	refused := x509.CertificateInvalidError{Cert: creds.own.Load().leaf, Reason: x509.Expired}
	ln.Refused(near, refused)
	if told == nil || !strings.Contains(told.Error(), "at least 3h0m0s behind") {
		t.Errorf("told %v", told)
	}
	var said lines
	ln.WarnRefused(&said, "store", &net.TCPAddr{}, refused)
	if len(said) != 1 || !strings.Contains(said[0], "at least 3h0m0s behind") {
		t.Errorf("said %q", said)
	}
}

// TestDialByDates: the error of Dial says by how much the clocks differ, and still wraps the TLS
// error.
func TestDialByDates(t *testing.T) {
	a, err := NewClusterAuthority(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ahead, err1 := a.IssueFor(Subject{Role: Driver, RunID: "r"}, time.Now().Add(3*time.Hour), time.Hour)
	own, err2 := a.IssueFor(Subject{Role: Driver, RunID: "r"}, time.Now(), time.Hour)
	ln, err3 := net.Listen("tcp", "127.0.0.1:0")
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		if conn, err := ln.Accept(); err == nil {
			_ = tls.Server(conn, ahead.ServerTLS(Driver)).Handshake()
			conn.Close()
		}
	}()
	_, err = own.Dial(t.Context(), Subject{Role: Driver}, ln.Addr().String(), "h2")
	if err == nil || !strings.Contains(err.Error(), "at least 3h0m0s behind") {
		t.Errorf("the error is %v", err)
	}
	if _, is := errors.AsType[*tls.CertificateVerificationError](err); !is {
		t.Errorf("%v is no error of TLS", err)
	}
	ln.Close()
	<-served
}
