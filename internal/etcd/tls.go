package etcd

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// mostPEM is the size of the largest file of certificates that is read.
const mostPEM = 1 << 20

// tls returns the configuration of TLS, as the files are now. The client's certificate is read
// again for each connection, since it may have been renewed.
func (c Config) tls() (*tls.Config, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		text, err := readPEM(c.CA)
		if err != nil {
			return nil, err
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate in PEM", c.CA)
		}
	}
	if c.Cert == "" && c.Key == "" {
		return conf, nil
	}
	if c.Cert == "" || c.Key == "" {
		return nil, errors.New("a client certificate needs both files, that of the certificate and that of its key")
	}
	conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return readPair(c.Cert, c.Key) }
	_, err := readPair(c.Cert, c.Key)
	return conf, err
}

func readPair(certFile, keyFile string) (*tls.Certificate, error) {
	cert, err := readPEM(certFile)
	if err != nil {
		return nil, err
	}
	key, err := readPEM(keyFile)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", certFile, keyFile, err)
	}
	return &pair, nil
}

func readPEM(path string) ([]byte, error) {
	f, err := safefile.Read(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, mostPEM))
	if err != nil {
		return nil, err
	}
	return text, nil
}
