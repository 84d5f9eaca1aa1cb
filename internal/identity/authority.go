package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"time"
)

const (
	// authorityLife is how long the authority of a cluster is valid.
	authorityLife = 10 * 365 * 24 * time.Hour
	// maxRequest bounds a request for a certificate, in bytes. A request for a P-256 key has about
	// 200.
	maxRequest = 2 << 10

	pemKey         = "PRIVATE KEY"
	pemCertificate = "CERTIFICATE"
)

// NewClusterAuthority returns the authority of a new cluster, with a new key.
func NewClusterAuthority(now time.Time) (*Authority, error) {
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	a := &authority{key: key}
	if err := a.sign("hvdrun cluster authority", newSerial(), now.Add(-backdate), now.Add(authorityLife)); err != nil {
		return nil, err
	}
	return &Authority{a}, nil
}

// Fingerprint returns the SHA-256 hash of the authority's certificate.
func (a *Authority) Fingerprint() [sha256.Size]byte { return sha256.Sum256(a.cert.Raw) }

// Certificate returns the authority's certificate, which is not secret.
func (a *Authority) Certificate() []byte { return a.cert.Raw }

// PEM returns the key and the certificate of a cluster's authority as text, for ParseAuthority. Its
// holder can issue credentials for every party of the cluster.
func (a *Authority) PEM() ([]byte, error) {
	key, ok := a.key.(*ecdsa.PrivateKey)
	if !ok || a.runID != "" {
		return nil, errors.New("identity: this is not the authority of a cluster")
	}
	return encodePEM(key, a.cert)
}

// ParseAuthority reads the text of Authority.PEM. Errors reveal nothing about the text.
func ParseAuthority(text []byte) (*Authority, error) {
	key, certs, err := decodePEM(text)
	if err != nil || len(certs) != 1 || !certs[0].IsCA || !key.PublicKey.Equal(certs[0].PublicKey) {
		return nil, errors.New("identity: the text is not the authority of a cluster")
	}
	return &Authority{&authority{key: key, cert: certs[0]}}, nil
}

// NewRequest returns a request for a certificate of the key.
func NewRequest(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("identity: request: %w", err)
	}
	return der, nil
}

// ParseRequest returns the public key of a request. It returns an error unless the key is of P-256
// and the request proves that the requester has the private key. It ignores the rest of the
// request.
func ParseRequest(request []byte) (*ecdsa.PublicKey, error) {
	if len(request) > maxRequest {
		return nil, fmt.Errorf("identity: the request has %d bytes; at most %d are allowed", len(request), maxRequest)
	}
	r, err := x509.ParseCertificateRequest(request)
	if err != nil {
		return nil, errors.New("identity: the request for a certificate is malformed")
	}
	key, ok := r.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() || r.CheckSignature() != nil {
		return nil, errors.New("identity: the request for a certificate is not signed by a key of P-256")
	}
	return key, nil
}

// SignRequest returns a certificate for s and the key that signed the request, valid from an hour
// before now until life after now. It ignores names in the request.
func (a *Authority) SignRequest(request []byte, s Subject, now time.Time, life time.Duration) ([]byte, error) {
	key, err := ParseRequest(request)
	if err != nil {
		return nil, err
	}
	return a.certify(key, s, now, life)
}

// Assemble returns credentials from the holder's key, the certificate that SignRequest returned,
// and the authority's certificate.
func Assemble(key *ecdsa.PrivateKey, certificate, authority []byte) (*Credentials, error) {
	ca, err := x509.ParseCertificate(authority)
	if err != nil || !ca.IsCA {
		return nil, errors.New("identity: the certificate of the authority is malformed")
	}
	c, err := newCredentials(ca, certificate, key)
	if err == nil {
		err = c.own.Load().check()
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// PEM returns the key, the certificate and the authority's certificate as text, for ParsePEM.
func (c *Credentials) PEM() ([]byte, error) {
	own := c.own.Load()
	return encodePEM(own.key, own.leaf, c.ca)
}

// ParsePEM reads the text of Credentials.PEM. Errors reveal nothing about the text.
func ParsePEM(text []byte) (*Credentials, error) {
	key, certs, err := decodePEM(text)
	if err != nil || len(certs) != 2 {
		return nil, errors.New("identity: the text is not a key with its certificate and that of an authority")
	}
	return Assemble(key, certs[0].Raw, certs[1].Raw)
}

// Renew replaces the key and the certificate by those of with, which must have the same subject and
// authority. Connections made afterwards present them.
func (c *Credentials) Renew(with *Credentials) error {
	if c.subject != with.subject || !c.ca.Equal(with.ca) {
		return fmt.Errorf("identity: the credentials of %v cannot become those of %v", c.subject, with.subject)
	}
	c.own.Store(with.own.Load())
	return nil
}

// Valid returns the time from which the certificate is valid, without the hour for slow clocks, and
// the time at which it expires.
func (c *Credentials) Valid() (from, until time.Time) {
	leaf := c.own.Load().leaf
	return leaf.NotBefore.Add(backdate), leaf.NotAfter
}

// Authority returns the certificate of the authority.
func (c *Credentials) Authority() []byte { return c.ca.Raw }

func encodePEM(key *ecdsa.PrivateKey, certs ...*x509.Certificate) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, errors.New("identity: the key cannot be encoded")
	}
	text := pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der})
	for _, cert := range certs {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: cert.Raw})...)
	}
	return text, nil
}

func decodePEM(text []byte) (key *ecdsa.PrivateKey, certs []*x509.Certificate, err error) {
	malformed := errors.New("identity: the text is malformed")
	if len(text) > maxEncoded {
		return nil, nil, malformed
	}
	block, rest := pem.Decode(text)
	if block == nil || block.Type != pemKey {
		return nil, nil, malformed
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if key, _ = parsed.(*ecdsa.PrivateKey); err != nil || key == nil || key.Curve != elliptic.P256() {
		return nil, nil, malformed
	}
	for block, rest = pem.Decode(rest); block != nil; block, rest = pem.Decode(rest) {
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil || block.Type != pemCertificate {
			return nil, nil, malformed
		}
		certs = append(certs, cert)
	}
	return key, certs, nil
}
