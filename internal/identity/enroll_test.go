package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode"
)

func newCluster(t testing.TB) *Authority {
	t.Helper()
	a, err := NewClusterAuthority(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// enrolled returns the credentials of an agent whose certificate was signed at its request.
func enrolled(t testing.TB, a *Authority, host string, now time.Time, life time.Duration) *Credentials {
	t.Helper()
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	request, err := NewRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := a.SignRequest(request, Subject{Role: Agent, Host: host}, now, life)
	if err != nil {
		t.Fatal(err)
	}
	c, err := Assemble(key, cert, a.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestClusterAuthorityIsKept(t *testing.T) {
	a := newCluster(t)
	text, err := a.PEM()
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParseAuthority(text)
	if err != nil || again.Fingerprint() != a.Fingerprint() {
		t.Fatalf("%v, %v", again, err)
	}
	driver := issue(t, again, Subject{RunID: "r", Role: Driver, User: "ä b/c", UID: "1000"})
	agent := enrolled(t, a, "h", time.Now(), time.Hour)
	s, c, serverErr, clientErr := handshake(t, agent.ServerTLS(Driver), driver.ClientTLS(Subject{Role: Agent, Host: "h"}))
	if serverErr != nil || clientErr != nil {
		t.Fatal(serverErr, clientErr)
	}
	if who, err := SubjectOf(s); err != nil || who.User != "ä b/c" || who.UID != "1000" || who.RunID != "r" {
		t.Errorf("the agent sees %+v, %v", who, err)
	}
	if who, err := SubjectOf(c); err != nil || who != (Subject{Role: Agent, Host: "h"}) {
		t.Errorf("the driver sees %+v, %v", who, err)
	}
	kept, err := agent.PEM()
	if err != nil {
		t.Fatal(err)
	}
	if back, err := ParsePEM(kept); err != nil || back.Subject() != agent.Subject() {
		t.Errorf("%v, %v", back, err)
	}
	for name, text := range map[string][]byte{
		"an agent's": kept, "none": nil, "cut": text[:len(text)/2], "its certificate only": text[bytes.LastIndex(text, []byte("-----BEGIN")):],
	} {
		if _, err := ParseAuthority(text); err == nil {
			t.Errorf("%s: taken for an authority", name)
		}
	}
	if _, err := ParsePEM(text); err == nil {
		t.Error("an authority is taken for an agent")
	}
}

// TestRenew: certificates expire, and configurations that were made before present renewed ones.
func TestRenew(t *testing.T) {
	a := newCluster(t)
	now := time.Now()
	agent := enrolled(t, a, "h", now, time.Hour)
	driver := issue(t, a, Subject{RunID: "r", Role: Driver})
	server, client := agent.ServerTLS(Driver), driver.ClientTLS(Subject{Role: Agent, Host: "h"})
	later := func() time.Time { return now.Add(90 * time.Minute) }
	server.Time, client.Time = later, later
	if _, _, _, err := handshake(t, server, client); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Fatalf("after the end of the certificate: %v", err)
	}
	if from, until := agent.Valid(); !from.Equal(now.Truncate(time.Second)) || until.Sub(from) != time.Hour {
		t.Errorf("valid from %v until %v", from, until)
	}
	if err := agent.Renew(enrolled(t, a, "other", later(), time.Hour)); err == nil {
		t.Error("one host's credentials became another's")
	}
	if err := agent.Renew(enrolled(t, newCluster(t), "h", later(), time.Hour)); err == nil {
		t.Error("another cluster's credentials were taken")
	}
	if err := agent.Renew(enrolled(t, a, "h", later(), time.Hour)); err != nil {
		t.Fatal(err)
	}
	if _, _, serverErr, clientErr := handshake(t, server, client); serverErr != nil || clientErr != nil {
		t.Errorf("renewed: %v, %v", serverErr, clientErr)
	}
}

func TestRegistrar(t *testing.T) {
	a := newCluster(t)
	registrar := issue(t, a, Subject{Role: Registrar})
	public, token, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	server := registrar.RegistrarTLS(func(k ed25519.PublicKey) bool { return k.Equal(public) })
	agent := enrolled(t, a, "h", time.Now(), time.Hour)
	toRegistrar := func(c *Credentials) *tls.Config { return c.ClientTLS(Subject{Role: Registrar}) }
	withToken := func(key ed25519.PrivateKey, fingerprint [sha256.Size]byte) *tls.Config {
		cfg, err := TokenTLS(key, fingerprint)
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	for name, want := range map[string]Applicant{"agent": {Agent: agent.Subject()}, "token": {Token: public}} {
		client := toRegistrar(agent)
		if want.Token != nil {
			client = withToken(token, a.Fingerprint())
		}
		s, _, serverErr, clientErr := handshake(t, server, client)
		if serverErr != nil || clientErr != nil {
			t.Fatalf("%s: %v, %v", name, serverErr, clientErr)
		}
		if who, err := registrar.Applicant(s); err != nil || who.Agent != want.Agent || !bytes.Equal(who.Token, want.Token) {
			t.Errorf("%s: %+v, %v", name, who, err)
		}
	}
	job := newAuthority(t, "r")
	foreign := newCluster(t)
	blind := func(c *Credentials) *tls.Config {
		cfg := toRegistrar(c)
		cfg.InsecureSkipVerify, cfg.VerifyConnection = true, nil
		return cfg
	}
	for name, tt := range map[string]struct{ server, client *tls.Config }{
		"unknown token":               {server, withToken(stranger, a.Fingerprint())},
		"another cluster's server":    {issue(t, foreign, Subject{Role: Registrar}).RegistrarTLS(nil), withToken(token, a.Fingerprint())},
		"an agent plays the server":   {agent.RegistrarTLS(func(ed25519.PublicKey) bool { return true }), withToken(token, a.Fingerprint())},
		"another cluster's agent":     {server, blind(enrolled(t, foreign, "h", time.Now(), time.Hour))},
		"an agent whose time is over": {server, blind(enrolled(t, a, "h", time.Now().Add(-2*time.Hour), time.Hour))},
		"a driver":                    {server, blind(issue(t, a, Subject{RunID: "r", Role: Driver}))},
		"a worker of a job":           {server, blind(issue(t, job, Subject{Role: Worker}))},
		"an agent of a job":           {server, blind(issue(t, job, Subject{Role: Agent, Host: "h"}))},
		"nobody":                      {server, &tls.Config{InsecureSkipVerify: true}},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, serverErr, clientErr := handshake(t, tt.server, tt.client)
			if serverErr == nil || clientErr == nil {
				t.Errorf("let in: server %v, client %v", serverErr, clientErr)
			}
		})
	}
}

func TestSignRequestRefuses(t *testing.T) {
	a := newCluster(t)
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	long, err := NewRequest(p384)
	if err != nil {
		t.Fatal(err)
	}
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	good, err := NewRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	agent := Subject{Role: Agent, Host: "h"}
	forged := bytes.Clone(good)
	forged[len(forged)-1] ^= 1
	for name, request := range map[string][]byte{
		"none": nil, "P-384": long, "forged": forged, "more": append(bytes.Clone(good), 0), "huge": make([]byte, maxRequest+1),
	} {
		if _, err := a.SignRequest(request, agent, time.Now(), time.Hour); err == nil {
			t.Errorf("%s: signed", name)
		}
	}
	for _, s := range []Subject{{Role: Worker, RunID: "r"}, {Role: Agent, RunID: "r"}, {Role: Registrar, RunID: "r"}, {Role: Driver}, {Role: Driver, RunID: "r", UID: "-1"}} {
		if _, err := a.SignRequest(good, s, time.Now(), time.Hour); err == nil {
			t.Errorf("%+v: signed", s)
		}
	}
	// The names and extensions in the request are ignored.
	wish, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		DNSNames: []string{serverName(Driver)}, ExtraExtensions: nil,
	}, key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := a.SignRequest(wish, agent, time.Now(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil || cert.IsCA || fmt.Sprint(cert.DNSNames) != "["+serverName(Agent)+"]" {
		t.Errorf("%v, %v, a CA: %v", cert.DNSNames, err, cert.IsCA)
	}
}

func FuzzParseRequest(f *testing.F) {
	key, err := NewKey()
	if err != nil {
		f.Fatal(err)
	}
	good, err := NewRequest(key)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte{0x30, 0x80})
	f.Fuzz(func(t *testing.T, request []byte) {
		if key, err := ParseRequest(request); err == nil && (key == nil || key.Curve != elliptic.P256()) {
			t.Errorf("a request of %v", key)
		}
	})
}

func FuzzParsePEM(f *testing.F) {
	a := newCluster(f)
	text, err := enrolled(f, a, "h", time.Now(), time.Hour).PEM()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		if c, err := ParsePEM(text); err == nil && c.Subject().validate() != nil {
			t.Errorf("an invalid subject: %v", c.Subject())
		}
	})
}

// FuzzParseAuthority: an authority that is parsed can issue certificates, and its text is parsed to
// the same authority.
func FuzzParseAuthority(f *testing.F) {
	text, err := newCluster(f).PEM()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add(text[:len(text)/2])
	f.Fuzz(func(t *testing.T, text []byte) {
		a, err := ParseAuthority(text)
		if err != nil {
			if strings.ContainsFunc(err.Error(), unicode.IsControl) || len(err.Error()) > 500 {
				t.Errorf("%q", err)
			}
			return
		}
		if _, err := a.IssueFor(Subject{Role: Agent, Host: "h"}, time.Now(), time.Hour); err != nil {
			t.Error(err)
		}
		again, err := a.PEM()
		if err != nil {
			t.Fatal(err)
		}
		if b, err := ParseAuthority(again); err != nil || !bytes.Equal(a.Certificate(), b.Certificate()) {
			t.Errorf("another authority: %v", err)
		}
	})
}

// FuzzAssemble: an assembled certificate belongs to the key, and names a subject.
func FuzzAssemble(f *testing.F) {
	a := newCluster(f)
	key, err := NewKey()
	if err != nil {
		f.Fatal(err)
	}
	request, err := NewRequest(key)
	if err != nil {
		f.Fatal(err)
	}
	der, err := a.SignRequest(request, Subject{Role: Agent, Host: "h"}, time.Now(), time.Hour)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(der, a.Certificate())
	f.Add(a.Certificate(), a.Certificate())
	f.Fuzz(func(t *testing.T, der, ca []byte) {
		c, err := Assemble(key, der, ca)
		if err != nil {
			return
		}
		if c.Subject().validate() != nil || !c.own.Load().leaf.PublicKey.(*ecdsa.PublicKey).Equal(&key.PublicKey) {
			t.Errorf("a certificate of %+v", c.Subject())
		}
	})
}
