package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// backdate makes certificates of a cluster valid on hosts whose clocks are behind.
	backdate = time.Hour

	keyLen = 32
	// maxEncoded bounds the input of Decode. Credentials with the longest names take less than half
	// of it.
	maxEncoded = 16 << 10
	// The versions of the encoding: without a ticket, and with one.
	encodingVersion, ticketVersion = 2, 3
)

// asKey is the life of certificates that end with their authority's key, such as those of a job.
// They are valid at all times, so that a wrong or corrected clock ends no job.
const asKey time.Duration = math.MaxInt64

// keyBegin and keyEnd are the dates of such certificates.
var (
	keyBegin = time.Unix(0, 0).UTC()
	keyEnd   = time.Date(9999, time.December, 31, 23, 59, 59, 0, time.UTC)
)

// Authority issues the credentials of a job or of a cluster. A job's key exists only in the
// driver's memory and where the driver stores the text of Encode; a cluster's key exists only where
// the text of PEM is stored, or is derived from the key shared by its members. It is safe for
// concurrent use, and formatting it shows only its run id.
type Authority struct{ *authority }

type authority struct {
	runID  string // empty: a cluster's authority, which issues for any run
	cert   *x509.Certificate
	key    crypto.Signer
	jobKey *[keyLen]byte // from which data keys are derived; nil: a cluster's authority
}

// NewAuthority returns the authority of a new job, with new keys.
func NewAuthority(runID string) (*Authority, error) {
	if err := (Subject{RunID: runID, Role: Driver}).validate(); err != nil {
		return nil, err
	}
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	a := &authority{runID: runID, key: key, jobKey: new([keyLen]byte)}
	rand.Read(a.jobKey[:])
	if err := a.sign("hvdrun job authority", newSerial(), keyBegin, keyEnd); err != nil {
		return nil, err
	}
	return &Authority{a}, nil
}

// sign creates the authority's own certificate.
func (a *authority) sign(name string, serial *big.Int, from, to time.Time) error {
	template := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             from,
		NotAfter:              to,
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		return fmt.Errorf("identity: certificate of the authority: %w", err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return fmt.Errorf("identity: certificate of the authority: %w", err)
	}
	return nil
}

// Issue creates a key and a certificate for s, valid for longer than any job. If s.RunID is empty,
// the authority's is used; another one is an error. A cluster's authority issues for agents and
// registrars, without a RunID, and for the driver of any run; a job's authority also issues for its
// own agents.
func (a *Authority) Issue(s Subject) (*Credentials, error) {
	return a.IssueFor(s, time.Now(), asKey)
}

// IssueFor is like Issue, for a certificate that is valid until life after now, and from an hour
// before now. A job's certificates are valid at any time before now.
func (a *Authority) IssueFor(s Subject, now time.Time, life time.Duration) (*Credentials, error) {
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	der, err := a.certify(&key.PublicKey, s, now, life)
	if err != nil {
		return nil, err
	}
	return newCredentials(a.cert, der, key)
}

// NewKey returns a new key for credentials.
func NewKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("identity: key: %w", err)
	}
	return key, nil
}

// certify signs a certificate of the public key for s.
func (a *Authority) certify(public *ecdsa.PublicKey, s Subject, now time.Time, life time.Duration) ([]byte, error) {
	if s.RunID == "" {
		s.RunID = a.runID
	}
	ofCluster := s.Role == Driver || s.Role == Agent || s.Role == Registrar
	switch {
	case a.runID == "" && !ofCluster:
		return nil, fmt.Errorf("identity: the authority of a cluster does not issue credentials for a %s", s.Role)
	case a.runID == "" && s.Role != Driver && s.RunID != "":
		return nil, fmt.Errorf("identity: the authority of a cluster does not issue credentials for the %s of run %q", s.Role, s.RunID)
	case a.runID != "" && s.RunID != a.runID:
		return nil, fmt.Errorf("identity: the authority of run %q does not issue credentials for a %s of run %q", a.runID, s.Role, s.RunID)
	}
	if err := s.validate(); err != nil {
		return nil, err
	}
	uri, err := s.uri()
	if err != nil {
		return nil, fmt.Errorf("identity: subject: %w", err)
	}
	from, to := now.Add(-backdate), now.Add(life)
	if a.runID != "" || life == asKey {
		from = keyBegin
	}
	if life == asKey {
		to = keyEnd
	}
	// Every party is both a client and a server; its role, not the extended key usage, determines
	// what it may do.
	template := &x509.Certificate{
		SerialNumber:          newSerial(),
		Subject:               pkix.Name{CommonName: "hvdrun " + string(s.Role)},
		NotBefore:             from,
		NotAfter:              to,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		DNSNames:              []string{serverName(s.Role)},
		URIs:                  []*url.URL{uri},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, public, a.key)
	if err != nil {
		return nil, fmt.Errorf("identity: certificate: %w", err)
	}
	return der, nil
}

func newSerial() *big.Int {
	var b [16]byte
	rand.Read(b[:])
	b[0] &= 0x7f
	b[15] |= 1 // never zero
	return new(big.Int).SetBytes(b[:])
}

// Credentials authenticate a party of a job. They are secret: formatting them shows only their
// subject; only Encode reveals them. They are safe for concurrent use.
type Credentials struct{ *secrets }

// secrets is behind a pointer, and the keys are behind a second one: package fmt calls no methods
// of unexported fields, and follows one pointer, but never two, if the verb does not apply. So it
// prints at most an address.
type secrets struct {
	subject Subject
	ca      *x509.Certificate
	pool    *x509.CertPool
	own     atomic.Pointer[own]
	ticket  []byte // of a worker: keyLen bytes; nil: none
}

// own holds the key and the certificate, which Renew replaces.
type own struct {
	leaf *x509.Certificate
	key  *ecdsa.PrivateKey
	// check returns nil if the authority has signed the certificate. It is called when the
	// certificate is used: most workers never use theirs, and the check costs more than everything
	// else that Decode does.
	check func() error
}

// newCredentials combines the parts and checks that they match.
func newCredentials(ca *x509.Certificate, leafDER []byte, key *ecdsa.PrivateKey) (*Credentials, error) {
	leaf, err := x509.ParseCertificate(leafDER)
	if err != nil {
		return nil, errors.New("identity: credentials contain no valid certificate")
	}
	if !key.PublicKey.Equal(leaf.PublicKey) {
		return nil, errors.New("identity: the key in the credentials is not that of their certificate")
	}
	if len(leaf.URIs) != 1 {
		return nil, errors.New("identity: the certificate in the credentials names no subject")
	}
	subject, err := parseURI(leaf.URIs[0])
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	c := &Credentials{&secrets{subject: subject, ca: ca, pool: pool}}
	c.own.Store(&own{leaf, key, sync.OnceValue(func() error {
		if leaf.CheckSignatureFrom(ca) != nil {
			return errors.New("identity: the certificate in the credentials is not of their authority")
		}
		return nil
	})})
	return c, nil
}

// Subject returns the holder of the credentials.
func (c *Credentials) Subject() Subject { return c.subject }

// Serial returns the serial number of the current certificate in hexadecimal.
func (c *Credentials) Serial() string { return c.own.Load().leaf.SerialNumber.Text(16) }

// Format prints the subject for every verb, and no secrets.
func (c Credentials) Format(f fmt.State, _ rune) {
	if c.secrets == nil {
		io.WriteString(f, "credentials(none)")
		return
	}
	fmt.Fprintf(f, "credentials(%v, redacted)", c.subject)
}

// Format prints the run id for every verb, and no secrets.
func (a Authority) Format(f fmt.State, _ rune) {
	if a.authority == nil {
		io.WriteString(f, "authority(none)")
		return
	}
	of := a.runID
	if of == "" {
		of = "cluster"
	}
	fmt.Fprintf(f, "authority(%s, redacted)", of)
}

// ForWorker returns c, the credentials of all workers of a job, with a new ticket: the secret that
// proves, at the door of the worker's launcher, which worker it is.
func (c *Credentials) ForWorker() *Credentials {
	w := &secrets{subject: c.subject, ca: c.ca, pool: c.pool, ticket: make([]byte, keyLen)}
	w.own.Store(c.own.Load())
	rand.Read(w.ticket)
	return &Credentials{w}
}

// TicketOf returns the ticket in the text of Encode, or nil if it has none. It is secret.
func TicketOf(text string) []byte {
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(b) < keyLen || b[0] != ticketVersion {
		return nil
	}
	return b[len(b)-keyLen:]
}

// Encode returns the credentials as one line of text without spaces, for an environment variable.
// The text contains the secrets: it must not appear in an argument list or a log.
func (c *Credentials) Encode() string {
	own := c.own.Load()
	key, err := own.key.Bytes()
	if err != nil {
		panic("identity: " + err.Error()) // cannot happen: only keys of other curves fail
	}
	b, parts := []byte{encodingVersion}, [][]byte{c.ca.Raw, own.leaf.Raw, key}
	if c.ticket != nil {
		b, parts = []byte{ticketVersion}, append(parts, c.ticket)
	}
	return base64.RawURLEncoding.EncodeToString(appendParts(b, parts...))
}

// appendParts appends each part after its length.
func appendParts(b []byte, parts ...[]byte) []byte {
	for _, part := range parts {
		b = binary.BigEndian.AppendUint16(b, uint16(len(part)))
		b = append(b, part...)
	}
	return b
}

// cutParts sets parts to those of b, which must have as many.
func cutParts(b []byte, parts [][]byte) error {
	for i := range parts {
		if len(b) < 2 || len(b)-2 < int(binary.BigEndian.Uint16(b)) {
			return errors.New("identity: credentials are truncated")
		}
		n := int(binary.BigEndian.Uint16(b))
		parts[i], b = b[2:2+n], b[2+n:]
	}
	if len(b) != 0 {
		return errors.New("identity: credentials have trailing data")
	}
	return nil
}

// Decode parses the text of Encode. Errors reveal nothing about the text. The first handshake
// checks whether the authority has signed the certificate.
func Decode(text string) (*Credentials, error) {
	if len(text) > maxEncoded {
		return nil, fmt.Errorf("identity: the credentials have %d bytes; at most %d are allowed", len(text), maxEncoded)
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(b) == 0 {
		return nil, errors.New("identity: credentials are malformed")
	}
	parts := make([][]byte, 3, 4)
	switch b[0] {
	case encodingVersion:
	case ticketVersion:
		parts = parts[:4]
	default:
		return nil, fmt.Errorf("identity: credentials are of version %d; this program knows versions %d and %d",
			b[0], encodingVersion, ticketVersion)
	}
	if err := cutParts(b[1:], parts); err != nil {
		return nil, err
	}
	ca, err := x509.ParseCertificate(parts[0])
	if err != nil {
		return nil, errors.New("identity: credentials contain no valid authority")
	}
	key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), parts[2])
	if err != nil {
		return nil, errors.New("identity: credentials contain no valid key")
	}
	c, err := newCredentials(ca, parts[1], key)
	if err == nil && len(parts) == 4 {
		if c.ticket = parts[3]; len(c.ticket) != keyLen {
			return nil, errors.New("identity: credentials contain no valid ticket")
		}
	}
	return c, err
}
