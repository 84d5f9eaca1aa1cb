package identity

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"
)

func newAuthority(t testing.TB, runID string) *Authority {
	t.Helper()
	a, err := NewAuthority(runID)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func issue(t testing.TB, a *Authority, s Subject) *Credentials {
	t.Helper()
	c, err := a.Issue(s)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var odd = Subject{
	RunID: "run/1?x=[é]%2F ..", Role: Worker, Host: "fe80::1%eth0", Index: 3, Incarnation: "a&b=c#d;\x00\xff\n",
}

func TestSubjectSurvivesTheCertificate(t *testing.T) {
	long := strings.Repeat("%", maxName)
	for _, s := range []Subject{
		{RunID: "r", Role: Driver},
		{RunID: "r", Role: Worker, Host: "a", Index: 0, Incarnation: "1f"},
		odd,
		{RunID: ".", Role: Worker, Host: "..", Index: 1 << 30, Incarnation: "+ %zz"},
		{RunID: long, Role: Worker, Host: long, Incarnation: long},
	} {
		c := issue(t, newAuthority(t, s.RunID), s)
		text := c.Encode()
		if strings.ContainsAny(text, " \n\t=\"'$") {
			t.Errorf("%v: the encoded form needs quoting", s)
		}
		d, err := Decode(text)
		if err != nil {
			t.Fatalf("%v: %v", s, err)
		}
		if d.Subject() != s || c.Subject() != s {
			t.Errorf("got %+v and %+v, want %+v", c.Subject(), d.Subject(), s)
		}
		if d.Encode() != text {
			t.Errorf("%v: encoding is not stable", s)
		}
	}
}

func TestIssueRefuses(t *testing.T) {
	a := newAuthority(t, "r")
	for _, s := range []Subject{
		{RunID: "other", Role: Worker}, {Role: ""}, {Role: "dri.ver"}, {Role: Worker, Index: -1},
		{Role: Worker, Host: strings.Repeat("h", maxName+1)},
	} {
		if c, err := a.Issue(s); err == nil || !strings.HasPrefix(err.Error(), "identity: ") {
			t.Errorf("Issue(%+v) = %v, %v", s, c, err)
		}
	}
	if _, err := NewAuthority(""); err == nil {
		t.Error("an authority without a run id")
	}
}

func TestDecodeRefuses(t *testing.T) {
	a, other := newAuthority(t, "r"), newAuthority(t, "r")
	one, two := issue(t, a, Subject{Role: Worker}), issue(t, other, Subject{Role: Worker})
	mix := func(f func(s *secrets, o *own)) string {
		s, o := mixed(one)
		f(s, o)
		return (&Credentials{s}).Encode()
	}
	good := one.Encode()
	raw, err := base64.RawURLEncoding.DecodeString(good)
	if err != nil {
		t.Fatal(err)
	}
	short := append(append(raw[:len(raw)-34:len(raw)-34], 0, 31), raw[len(raw)-31:]...) // a job key of 31 bytes
	texts := map[string]string{
		"empty":   "",
		"garbage": "hunter2 hunter2",
		"huge":    strings.Repeat("A", maxEncoded+1),
		"cut":     good[:len(good)/2],
		"longer":  base64.RawURLEncoding.EncodeToString(append(raw[:len(raw):len(raw)], 0)),
		"version": base64.RawURLEncoding.EncodeToString(append([]byte{9}, raw[1:]...)),
		"key":     mix(func(_ *secrets, o *own) { o.key = two.own.Load().key }),
		"job key": base64.RawURLEncoding.EncodeToString(short),
		"cert":    mix(func(s *secrets, o *own) { o.leaf = s.ca }),
	}
	for name, text := range texts {
		_, err := Decode(text)
		if err == nil || !strings.HasPrefix(err.Error(), "identity: ") {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if len(text) > 8 && strings.Contains(err.Error(), text[4:8]) {
			t.Errorf("%s: the error shows the text: %v", name, err)
		}
	}
	for n := range raw { // no prefix passes, and none panics
		if _, err := Decode(base64.RawURLEncoding.EncodeToString(raw[:n])); err == nil {
			t.Fatalf("%d of %d bytes were decoded", n, len(raw))
		}
	}
}

// TestDecodeOfAnotherAuthority: a certificate that the authority in the credentials has not signed
// is refused when it is used, and by Assemble at once.
func TestDecodeOfAnotherAuthority(t *testing.T) {
	one, two := issue(t, newAuthority(t, "r"), Subject{Role: Worker}), issue(t, newAuthority(t, "r"), Subject{Role: Worker})
	s, o := mixed(one)
	s.ca = two.ca
	c, err := Decode((&Credentials{s}).Encode())
	if err != nil {
		t.Fatal(err)
	}
	const want = "identity: the certificate in the credentials is not of their authority"
	if _, err := c.certificate(); err == nil || err.Error() != want {
		t.Error(err)
	}
	if _, err := Assemble(o.key, o.leaf.Raw, two.ca.Raw); err == nil || err.Error() != want {
		t.Error(err)
	}
	if _, err := one.certificate(); err != nil {
		t.Error(err)
	}
}

// TestTickets: each worker of a job has its own ticket, which Encode keeps and no other credentials
// have.
func TestTickets(t *testing.T) {
	all := issue(t, newAuthority(t, "r"), Subject{Role: Worker})
	a, b := all.ForWorker(), all.ForWorker()
	if len(a.ticket) != keyLen || bytes.Equal(a.ticket, b.ticket) || all.ticket != nil {
		t.Errorf("tickets %x, %x, %x", a.ticket, b.ticket, all.ticket)
	}
	text := a.Encode()
	d, err := Decode(text)
	if err != nil || !bytes.Equal(d.ticket, a.ticket) || !bytes.Equal(TicketOf(text), a.ticket) || d.Encode() != text {
		t.Errorf("%x, %x, %v", d.ticket, TicketOf(text), err)
	}
	for _, none := range []string{all.Encode(), "none", ""} {
		if got := TicketOf(none); got != nil {
			t.Errorf("%.20q has the ticket %x", none, got)
		}
	}
	if _, err := all.DialDoor(t.Context(), "127.0.0.1:1", "p"); err == nil || !strings.Contains(err.Error(), "without a ticket") {
		t.Error(err)
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	short := append(raw[:len(raw)-keyLen-2:len(raw)-keyLen-2], 0, 0)
	if _, err := Decode(base64.RawURLEncoding.EncodeToString(short)); err == nil || !strings.Contains(err.Error(), "no valid ticket") {
		t.Errorf("an empty ticket: %v", err)
	}
}

// mixed returns the secrets of c, to be changed.
func mixed(c *Credentials) (*secrets, *own) {
	s, o := &secrets{subject: c.subject, ca: c.ca, pool: c.pool}, *c.own.Load()
	s.own.Store(&o)
	return s, &o
}

func FuzzDecode(f *testing.F) {
	f.Add(issue(f, newAuthority(f, "r"), Subject{Role: Worker}).Encode())
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		if c, err := Decode(text); err == nil && c.Subject().validate() != nil {
			t.Errorf("decoded an invalid subject: %v", c.Subject())
		}
	})
}

// TestSecretsDoNotPrint: no way of printing credentials or an authority shows secrets.
func TestSecretsDoNotPrint(t *testing.T) {
	a := newAuthority(t, "run-7")
	c := issue(t, a, Subject{Role: Worker, Host: "h", Incarnation: "inc"})
	key, err := c.own.Load().key.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	caKey, err := a.key.(*ecdsa.PrivateKey).Bytes()
	if err != nil {
		t.Fatal(err)
	}
	type hidden struct {
		c Credentials
		a Authority
	}
	type open struct {
		C *Credentials
		A *Authority
	}
	values := []any{
		c, *c, a, *a, hidden{*c, *a}, &hidden{*c, *a}, open{c, a}, []*Credentials{c}, map[string]Credentials{"": *c},
	}
	var printed strings.Builder
	for _, v := range values {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%p", "%b", "%t"} {
			fmt.Fprintf(&printed, verb+"\n", v)
		}
		fmt.Fprintln(&printed, v)
		text, err := json.Marshal(v)
		fmt.Fprintln(&printed, string(text), err)
	}
	out := printed.String()
	for name, secret := range map[string][]byte{"key": key, "job key": a.jobKey[:], "key of the authority": caKey} {
		for _, form := range []string{"%s", "%v", "%x", "%X", "%d", "%#v", "%+q"} {
			text := strings.Trim(fmt.Sprintf(form, secret[4:12]), "[]\"")
			if strings.Contains(out, text) {
				t.Errorf("the %s is shown as %s", name, form)
			}
		}
	}
	if strings.Contains(out, c.Encode()[200:220]) {
		t.Error("the encoded form is shown")
	}
	if got := fmt.Sprint(c); got != "credentials(worker h/0 (inc), redacted)" {
		t.Errorf("printed as %q", got)
	}
	if got := fmt.Sprint(a, Credentials{}, Authority{}); !strings.Contains(got, "authority(run-7, redacted)") {
		t.Errorf("printed as %q", got)
	}
}

// handshake returns the errors of both ends of a TLS connection over loopback.
func handshake(t *testing.T, server, client *tls.Config) (s, c tls.ConnectionState, serverErr, clientErr error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		raw, err := ln.Accept()
		if err != nil {
			serverErr = err
			return
		}
		defer raw.Close()
		conn := tls.Server(raw, server)
		if serverErr = conn.Handshake(); serverErr == nil {
			s = conn.ConnectionState()
			_, serverErr = conn.Write([]byte{1})
		}
	}()
	conn, err := new(net.Dialer).DialContext(context.Background(), "tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	tc := tls.Client(conn, client)
	// A TLS 1.3 server verifies the client after the client's handshake: only reading a byte shows
	// the result.
	if _, clientErr = tc.Read(make([]byte, 1)); clientErr == nil {
		c = tc.ConnectionState()
	}
	conn.Close()
	<-done
	return s, c, serverErr, clientErr
}

func TestMutualTLS(t *testing.T) {
	a := newAuthority(t, odd.RunID)
	driver := issue(t, a, Subject{Role: Driver})
	worker := issue(t, a, odd)
	s, c, serverErr, clientErr := handshake(t, driver.ServerTLS(Worker), worker.ClientTLS(Subject{Role: Driver}))
	if serverErr != nil || clientErr != nil {
		t.Fatal(serverErr, clientErr)
	}
	if got, err := SubjectOf(s); err != nil || got != odd {
		t.Errorf("the server sees %+v, %v", got, err)
	}
	if got, err := SubjectOf(c); err != nil || got != driver.Subject() {
		t.Errorf("the client sees %+v, %v", got, err)
	}
	if s.Version != tls.VersionTLS13 {
		t.Errorf("version %x", s.Version)
	}
	if _, err := SubjectOf(tls.ConnectionState{PeerCertificates: s.PeerCertificates}); err == nil {
		t.Error("a subject of a certificate that nobody verified")
	}
	// The reverse direction, with a specific process required.
	_, _, serverErr, clientErr = handshake(t, worker.ServerTLS(Driver), driver.ClientTLS(odd))
	if serverErr != nil || clientErr != nil {
		t.Fatal(serverErr, clientErr)
	}
}

func TestTLSRefuses(t *testing.T) {
	a := newAuthority(t, "r")
	driver := issue(t, a, Subject{Role: Driver})
	one := issue(t, a, Subject{Role: Worker, Host: "h", Index: 1, Incarnation: "one"})
	twin := newAuthority(t, "r") // another job that calls itself the same
	strangerDriver, strangerWorker := issue(t, twin, Subject{Role: Driver}), issue(t, twin, Subject{Role: Worker})
	// Certificates of the right authority with another run id: Issue never creates them, but they
	// must be refused too.
	forged := *a.authority
	forged.runID = "other"
	otherRun := issue(t, &Authority{&forged}, Subject{Role: Worker})

	toDriver := func(c *Credentials) *tls.Config { return c.ClientTLS(Subject{Role: Driver}) }
	none := toDriver(one)
	none.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &tls.Certificate{}, nil }
	blind := toDriver(driver) // does not verify its peer
	blind.InsecureSkipVerify, blind.VerifyConnection = true, nil
	old := toDriver(one)
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12

	// A worker signs a certificate for itself.
	selfmade, with := mixed(one)
	with.leaf, with.key = signedByWorker(t, one)

	at := func(index int, inc string) Subject {
		return Subject{Role: Worker, Host: "h", Index: index, Incarnation: inc}
	}
	tests := map[string]struct{ server, client *tls.Config }{
		"no certificate":               {driver.ServerTLS(Worker), none},
		"another job's worker":         {driver.ServerTLS(Worker), toDriver(strangerWorker)},
		"another job's driver":         {strangerDriver.ServerTLS(Worker), toDriver(one)},
		"another run":                  {driver.ServerTLS(Worker), toDriver(otherRun)},
		"driver as a worker":           {driver.ServerTLS(Worker), blind},
		"worker as the driver":         {one.ServerTLS(Worker), toDriver(one)},
		"worker tells a worker":        {one.ServerTLS(Driver), one.ClientTLS(Subject{Role: Worker})},
		"TLS 1.2":                      {driver.ServerTLS(Worker), old},
		"another incarnation":          {one.ServerTLS(Driver), driver.ClientTLS(at(1, "two"))},
		"another slot":                 {one.ServerTLS(Driver), driver.ClientTLS(at(2, "one"))},
		"client wants another run":     {one.ServerTLS(Driver), driver.ClientTLS(Subject{RunID: "x", Role: Worker})},
		"signed by a worker's own key": {(&Credentials{selfmade}).ServerTLS(Worker), toDriver(one)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, serverErr, clientErr := handshake(t, tt.server, tt.client)
			if clientErr == nil {
				t.Fatalf("the client was served (server: %v)", serverErr)
			}
			if serverErr == nil {
				t.Fatalf("the server was content (client: %v)", clientErr)
			}
		})
	}
}

// signedByWorker creates a driver's certificate issued by a worker's certificate.
func signedByWorker(t *testing.T, c *Credentials) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	uri, err := Subject{RunID: c.subject.RunID, Role: Driver}.uri()
	if err != nil {
		t.Fatal(err)
	}
	own := c.own.Load()
	template := &x509.Certificate{
		SerialNumber: newSerial(), NotBefore: own.leaf.NotBefore, NotAfter: own.leaf.NotAfter,
		ExtKeyUsage: own.leaf.ExtKeyUsage, DNSNames: []string{serverName(Driver)}, URIs: []*url.URL{uri},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, own.leaf, key.Public(), own.key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return leaf, key
}

// TestNoResumption: a session is not resumed even if the client offers it.
func TestNoResumption(t *testing.T) {
	a := newAuthority(t, "r")
	server := issue(t, a, Subject{Role: Driver}).ServerTLS(Worker)
	client := issue(t, a, Subject{Role: Worker}).ClientTLS(Subject{Role: Driver})
	client.ClientSessionCache = tls.NewLRUClientSessionCache(4)
	for range 2 {
		s, _, serverErr, clientErr := handshake(t, server, client)
		if serverErr != nil || clientErr != nil {
			t.Fatal(serverErr, clientErr)
		}
		if s.DidResume {
			t.Error("resumed")
		}
	}
}

// FuzzSubject: a parsed subject is within its bounds, and formatting and parsing it again returns
// the same subject.
func FuzzSubject(f *testing.F) {
	f.Add("hvdrun:///run/worker?host=a&incarnation=i&index=3")
	f.Add("hvdrun:////agent?host=%1b%5b&index=0")
	f.Add("hvdrun:///r%2fs/driver?index=0&index=1&user=ann&uid=07")
	f.Fuzz(func(t *testing.T, text string) {
		u, err := url.Parse(text)
		if err != nil {
			return
		}
		s, err := parseURI(u)
		if err != nil {
			if s != (Subject{}) {
				t.Errorf("%q is refused, and read as %+v", text, s)
			}
			return
		}
		if s.validate() != nil {
			t.Errorf("%q is read as %+v", text, s)
		}
		back, err := s.uri()
		if err != nil {
			t.Fatal(err)
		}
		if again, err := parseURI(back); err != nil || again != s {
			t.Errorf("%+v becomes %+v, %v", s, again, err)
		}
	})
}

// TestJobAtAnyTime: a clock that is set back or forward, or is wrong by years, ends no job: its
// certificates are always valid, because the key of their authority limits them.
func TestJobAtAnyTime(t *testing.T) {
	a, err := NewAuthority("run")
	if err != nil {
		t.Fatal(err)
	}
	again, err := a.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if a, err = DecodeAuthority(again); err != nil {
		t.Fatal(err)
	}
	for _, s := range []Subject{{RunID: "run", Role: Driver}, {Role: Agent, Host: "a"}, {Role: Worker, Host: "a", Incarnation: "i"}} {
		c, err := a.Issue(s)
		if err != nil {
			t.Fatal(err)
		}
		now := time.Now()
		for _, at := range []time.Time{time.Unix(1, 0), now.Add(-2 * time.Hour), now, now.Add(2 * time.Hour), now.AddDate(100, 0, 0)} {
			_, err := c.own.Load().leaf.Verify(x509.VerifyOptions{Roots: c.pool, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
			if err != nil {
				t.Errorf("%s at %v: %v", s.Role, at, err)
			}
		}
	}
}
