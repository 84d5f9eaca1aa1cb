package etcd

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// makePair writes a certificate and its key to files, and returns the certificate.
func makePair(t *testing.T, cert, key string, serial int64) []byte {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	form := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "client"}, NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, form, form, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return der
}

// TestTLS: errors name unusable files, and a renewed certificate is presented.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	cert, key, missing, text := filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem"), filepath.Join(dir, "none"), filepath.Join(dir, "text")
	first := makePair(t, cert, key, 1)
	if err := os.WriteFile(text, []byte("no PEM"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		cfg  Config
		want string // in the error
	}{
		{Config{CA: missing}, missing},
		{Config{CA: text}, text + " has no certificate"},
		{Config{Cert: cert}, "both files"},
		{Config{Key: key}, "both files"},
		{Config{Cert: cert, Key: missing}, missing},
		{Config{Cert: text, Key: key}, text},
	} {
		if _, err := c.cfg.tls(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.cfg, err, c.want)
		}
	}
	conf, err := Config{TLS: true}.tls()
	if err != nil || conf.RootCAs != nil || conf.GetClientCertificate != nil {
		t.Errorf("without files: %+v, %v", conf, err)
	}
	if conf, err = (Config{CA: cert, Cert: cert, Key: key}).tls(); err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(first)
	if err != nil {
		t.Fatal(err)
	}
	authorities := x509.NewCertPool()
	authorities.AddCert(leaf)
	if !authorities.Equal(conf.RootCAs) {
		t.Error("the authority is not that of the file")
	}
	presents := func(want []byte) {
		t.Helper()
		pair, err := conf.GetClientCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(pair.Certificate[0], want) {
			t.Error("the certificate presented is not that of the file")
		}
	}
	presents(first)
	presents(makePair(t, cert, key, 2))
}
