package etcd

import (
	"crypto/tls"
	"errors"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// tls returns the configuration of TLS, as the files are now. The client's certificate is read
// again for each connection, since it may have been renewed.
func (c Config) tls() (*tls.Config, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		pool, err := safefile.CertPool(c.CA, safefile.Text)
		if err != nil {
			return nil, err
		}
		conf.RootCAs = pool
	}
	if c.Cert == "" && c.Key == "" {
		return conf, nil
	}
	if c.Cert == "" || c.Key == "" {
		return nil, errors.New("a client certificate needs both files, that of the certificate and that of its key")
	}
	conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return safefile.KeyPair(c.Cert, c.Key, safefile.Text, safefile.Text)
	}
	_, err := conf.GetClientCertificate(nil)
	return conf, err
}
