package dashboard

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"strings"
	"time"
)

// quiet discards what net/http would log about strangers' handshakes.
var quiet = log.New(io.Discard, "", 0)

// certificateLife is how long a certificate that the server creates is valid.
const certificateLife = 90 * 24 * time.Hour

// tlsConfig returns the server's TLS configuration. If given is nil, it creates a certificate for
// host.
func tlsConfig(given *tls.Certificate, host string) (*tls.Config, error) {
	if given == nil {
		made, err := selfSigned(host, time.Now())
		if err != nil {
			return nil, fmt.Errorf("dashboard: a certificate: %w", err)
		}
		given = &made
	}
	return &tls.Config{Certificates: []tls.Certificate{*given}, MinVersion: tls.VersionTLS12}, nil
}

func selfSigned(host string, now time.Time) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return tls.Certificate{}, err
	}
	about := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "hvdrun dashboard"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(certificateLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if ip := net.ParseIP(host); ip != nil {
		about.IPAddresses = []net.IP{ip}
	} else {
		about.DNSNames = []string{host}
	}
	der, err := x509.CreateCertificate(rand.Reader, about, about, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// fingerprint returns the SHA-256 hash of the certificate, as browsers show it.
func fingerprint(c *tls.Config) string {
	sum := sha256.Sum256(c.Certificates[0].Certificate[0])
	return strings.ReplaceAll(fmt.Sprintf("% X", sum[:]), " ", ":")
}
