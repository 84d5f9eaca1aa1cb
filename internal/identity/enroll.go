package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
)

// Applicant is a client that requests a certificate from a registrar: an agent that has one, or the
// holder of a token.
type Applicant struct {
	// Agent is the subject of the certificate; zero for the holder of a token.
	Agent Subject
	// Token is the public key of the token; nil for an agent.
	Token ed25519.PublicKey
}

// RegistrarTLS returns a new configuration for a registrar: its clients must present a certificate
// of an agent of the cluster, or one signed by the key of a token that known accepts. known may be
// called by several goroutines at once.
func (c *Credentials) RegistrarTLS(known func(ed25519.PublicKey) bool) *tls.Config {
	cfg := c.baseTLS()
	cfg.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		cert, err := c.certificate()
		if err != nil {
			return nil, err
		}
		cert.Certificate = append(cert.Certificate, c.ca.Raw) // the holder of a token knows its hash
		return cert, nil
	}
	cfg.ClientAuth = tls.RequireAnyClientCert
	cfg.VerifyConnection = func(cs tls.ConnectionState) error {
		who, err := c.Applicant(cs)
		if err == nil && who.Token != nil && !known(who.Token) {
			err = errors.New("identity: the token is unknown")
		}
		return err
	}
	return cfg
}

// Applicant returns the peer of a connection with the configuration of RegistrarTLS.
func (c *Credentials) Applicant(cs tls.ConnectionState) (Applicant, error) {
	if len(cs.PeerCertificates) == 0 {
		return Applicant{}, errors.New("identity: the applicant has shown no certificate")
	}
	leaf := cs.PeerCertificates[0]
	// Certificates of the cluster have keys of P-256. TLS has verified that the peer has the key.
	if token, ok := leaf.PublicKey.(ed25519.PublicKey); ok {
		return Applicant{Token: token}, nil
	}
	s, err := subjectOf(leaf, c.pool, Agent)
	if err != nil {
		return Applicant{}, err
	}
	if s.RunID != "" {
		return Applicant{}, errors.New("identity: the applicant is the agent of a job")
	}
	return Applicant{Agent: s}, nil
}

// subjectOf returns the subject of a certificate with the role, signed by one of the authorities.
func subjectOf(leaf *x509.Certificate, authorities *x509.CertPool, role Role) (Subject, error) {
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots: authorities, DNSName: serverName(role), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	})
	if err != nil {
		return Subject{}, fmt.Errorf("identity: %w", err)
	}
	if len(leaf.URIs) != 1 {
		return Subject{}, errors.New("identity: the certificate names no subject")
	}
	s, err := parseURI(leaf.URIs[0])
	if err == nil && s.Role != role {
		err = fmt.Errorf("identity: the peer is a %s, not a %s", s.Role, role)
	}
	return s, err
}

// TokenTLS returns a new configuration for the holder of a token that connects to the registrar of
// a cluster whose authority has the fingerprint. It verifies the registrar before it sends anything
// except the token's public key.
func TokenTLS(token ed25519.PrivateKey, fingerprint [sha256.Size]byte) (*tls.Config, error) {
	// Only the cluster knows when the token expires.
	template := &x509.Certificate{SerialNumber: newSerial(), NotBefore: keyBegin, NotAfter: keyEnd}
	der, err := x509.CreateCertificate(rand.Reader, template, template, token.Public(), token)
	if err != nil {
		return nil, fmt.Errorf("identity: the token's certificate: %w", err)
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		MaxVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // VerifyConnection verifies by the fingerprint
		Certificates:       []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: token}},
		VerifyConnection: func(cs tls.ConnectionState) error {
			certs := cs.PeerCertificates
			if len(certs) != 2 || sha256.Sum256(certs[1].Raw) != fingerprint {
				return errors.New("identity: the server is not of the cluster of the token")
			}
			pool := x509.NewCertPool()
			pool.AddCert(certs[1])
			_, err := subjectOf(certs[0], pool, Registrar)
			return err
		},
	}, nil
}
