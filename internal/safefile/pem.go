package safefile

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
)

// mostPEM bounds a file of certificates or of a key, in bytes: the certificates of all public
// authorities take 250 KB.
const mostPEM = 4 << 20

// KeyPair returns the certificate in certFile with its private key in keyFile, both in PEM. cert
// and key read the files: Text, OwnText or SecretText.
func KeyPair(certFile, keyFile string, cert, key func(path string, most int64) ([]byte, error)) (*tls.Certificate, error) {
	public, err := cert(certFile, mostPEM)
	if err != nil {
		return nil, err
	}
	private, err := key(keyFile, mostPEM)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(public, private)
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", certFile, keyFile, err)
	}
	return &pair, nil
}

// CertPool returns the certificates in a file in PEM, which read reads.
func CertPool(path string, read func(path string, most int64) ([]byte, error)) (*x509.CertPool, error) {
	text, err := read(path, mostPEM)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate in PEM", path)
	}
	return pool, nil
}
