package identity

import (
	"bytes"
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
	"math/big"
	"net/url"
	"time"
)

const (
	// backdate lets certificates pass on hosts whose clocks are behind the driver's.
	backdate = time.Hour
	// lifetime is longer than any job: what ends the certificates is that the authority's key is
	// forgotten.
	lifetime = 10 * 365 * 24 * time.Hour

	keyLen = 32
	// maxEncoded bounds what Decode looks at. Credentials with the longest names take less than
	// half of it.
	maxEncoded      = 16 << 10
	encodingVersion = 1
)

// Authority issues the credentials of one job, or of one cluster. A job's key exists in the memory
// of the driver, and where that writes down what Encode returns; a cluster's comes of the key that
// all its members have. It may be used from several goroutines at once, and prints as nothing but
// its run id.
type Authority struct{ *authority }

type authority struct {
	runID  string // empty: a cluster's, which issues for any run
	cert   *x509.Certificate
	key    crypto.Signer
	jobKey *[keyLen]byte
}

// NewAuthority makes the authority of a new job, with new keys.
func NewAuthority(runID string) (*Authority, error) {
	if err := (Subject{RunID: runID, Role: Driver}).validate(); err != nil {
		return nil, err
	}
	a := &authority{runID: runID, jobKey: new([keyLen]byte)}
	rand.Read(a.jobKey[:])
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("identity: key of the authority: %w", err)
	}
	a.key = key
	now := time.Now()
	if err := a.sign("hvdrun job authority", newSerial(), now.Add(-backdate), now.Add(lifetime)); err != nil {
		return nil, err
	}
	return &Authority{a}, nil
}

// sign makes the authority's own certificate.
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

// Issue makes a key and a certificate for s. An empty RunID of s stands for the authority's;
// another one is an error. A cluster's authority issues for agents, without a RunID, and for the
// driver of any run; a job's for its own agents.
func (a *Authority) Issue(s Subject) (*Credentials, error) {
	if s.RunID == "" {
		s.RunID = a.runID
	}
	switch {
	case a.runID == "" && s.Role != Driver && s.Role != Agent:
		return nil, fmt.Errorf("identity: the authority of a cluster issues nothing for a %s", s.Role)
	case a.runID == "" && s.Role == Agent && s.RunID != "":
		return nil, fmt.Errorf("identity: the authority of a cluster issues nothing for the agent of run %q", s.RunID)
	case a.runID != "" && s.RunID != a.runID:
		return nil, fmt.Errorf("identity: the authority of run %q issues nothing for a %s of run %q", a.runID, s.Role, s.RunID)
	}
	if err := s.validate(); err != nil {
		return nil, err
	}
	uri, err := s.uri()
	if err != nil {
		return nil, fmt.Errorf("identity: subject: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("identity: key: %w", err)
	}
	// Every party is a client here and a server there; its role, not the extended usage, tells it
	// apart.
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          newSerial(),
		Subject:               pkix.Name{CommonName: "hvdrun " + string(s.Role)},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(lifetime),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		DNSNames:              []string{serverName(s.Role)},
		URIs:                  []*url.URL{uri},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, fmt.Errorf("identity: certificate: %w", err)
	}
	return newCredentials(a.cert, der, key, a.jobKey[:])
}

func newSerial() *big.Int {
	var b [16]byte
	rand.Read(b[:])
	b[0] &= 0x7f
	b[15] |= 1 // never zero
	return new(big.Int).SetBytes(b[:])
}

// Credentials let one party prove that it belongs to a job and who in it it is. They are secret: no
// form of printing them but Encode shows more than their subject. They may be used from several
// goroutines at once.
type Credentials struct{ *secrets }

// secrets stand behind a pointer, and the keys behind one more: package fmt calls no method of an
// unexported field, and follows one pointer when the verb does not suit it, but never two. So it
// shows an address at most.
type secrets struct {
	subject Subject
	ca      *x509.Certificate
	pool    *x509.CertPool
	leaf    *x509.Certificate
	key     *ecdsa.PrivateKey
	jobKey  *[keyLen]byte
}

// newCredentials puts the parts together and checks that they belong to each other.
func newCredentials(ca *x509.Certificate, leafDER []byte, key *ecdsa.PrivateKey, jobKey []byte) (*Credentials, error) {
	leaf, err := x509.ParseCertificate(leafDER)
	if err != nil {
		return nil, errors.New("identity: credentials hold no valid certificate")
	}
	if len(jobKey) != keyLen {
		return nil, errors.New("identity: credentials hold no valid job key")
	}
	if !key.PublicKey.Equal(leaf.PublicKey) {
		return nil, errors.New("identity: the key in the credentials is not that of their certificate")
	}
	if err := leaf.CheckSignatureFrom(ca); err != nil {
		return nil, errors.New("identity: the certificate in the credentials is not of their authority")
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
	return &Credentials{&secrets{
		subject: subject, ca: ca, pool: pool, leaf: leaf, key: key, jobKey: (*[keyLen]byte)(bytes.Clone(jobKey)),
	}}, nil
}

// Subject returns whose credentials they are.
func (c *Credentials) Subject() Subject { return c.subject }

// Format prints the subject for every verb, and no secret.
func (c Credentials) Format(f fmt.State, _ rune) {
	if c.secrets == nil {
		io.WriteString(f, "credentials(none)")
		return
	}
	fmt.Fprintf(f, "credentials(%v, redacted)", c.subject)
}

// Format prints the run id for every verb, and no secret.
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

// Encode returns the credentials as one line of text without blanks, for an environment variable.
// It is the one thing here that shows the secrets: never put it into an argument list or a log.
func (c *Credentials) Encode() string {
	key, err := c.key.Bytes()
	if err != nil {
		panic("identity: " + err.Error()) // only for keys of other curves
	}
	b := []byte{encodingVersion}
	for _, part := range [][]byte{c.ca.Raw, c.leaf.Raw, key, c.jobKey[:]} {
		b = binary.BigEndian.AppendUint16(b, uint16(len(part)))
		b = append(b, part...)
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// Decode reads what Encode wrote. Its errors show nothing of the text.
func Decode(text string) (*Credentials, error) {
	if len(text) > maxEncoded {
		return nil, fmt.Errorf("identity: credentials of %d bytes; at most %d", len(text), maxEncoded)
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(b) == 0 {
		return nil, errors.New("identity: credentials are not the text that was issued")
	}
	if b[0] != encodingVersion {
		return nil, fmt.Errorf("identity: credentials are of version %d; this program knows version %d", b[0], encodingVersion)
	}
	var parts [4][]byte
	b = b[1:]
	for i := range parts {
		if len(b) < 2 || len(b)-2 < int(binary.BigEndian.Uint16(b)) {
			return nil, errors.New("identity: credentials are cut short")
		}
		n := int(binary.BigEndian.Uint16(b))
		parts[i], b = b[2:2+n], b[2+n:]
	}
	if len(b) != 0 {
		return nil, errors.New("identity: credentials have something after their end")
	}
	ca, err := x509.ParseCertificate(parts[0])
	if err != nil {
		return nil, errors.New("identity: credentials hold no valid authority")
	}
	key, err := ecdsa.ParseRawPrivateKey(elliptic.P256(), parts[2])
	if err != nil {
		return nil, errors.New("identity: credentials hold no valid key")
	}
	return newCredentials(ca, parts[1], key, parts[3])
}
