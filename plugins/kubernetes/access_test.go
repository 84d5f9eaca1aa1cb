package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/test/sandbox"
)

const kubeconfigText = `apiVersion: v1
kind: Config
current-context: other
preferences: {}
contexts:
- name: other
  context: {cluster: elsewhere, user: ann}
- name: here
  context: {cluster: test, user: ann, namespace: training}
clusters:
- name: elsewhere
  cluster: {server: "https://elsewhere.invalid:6443"}
- name: test
  cluster:
    server: SERVER
    CLUSTER
users:
- name: ann
  user: {USER}
`

// writeKubeconfig writes a kubeconfig for this server, with these lines for its cluster and its
// user.
func writeKubeconfig(t *testing.T, server, cluster, user string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	writeFile(t, path, strings.NewReplacer("SERVER", server, "CLUSTER", cluster, "USER", user).Replace(kubeconfigText))
	return path
}

func caData(a *apiServer) string {
	return "certificate-authority-data: " + base64.StdEncoding.EncodeToString(
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw}))
}

// ask discovers with the context "here" of a kubeconfig.
func ask(t *testing.T, path string) (string, error) {
	t.Helper()
	s := newSource()
	s.lookup = env()
	if err := s.Configure(map[string]string{"kubeconfig": path, "context": "here"}); err != nil {
		return "", err
	}
	t.Cleanup(s.client.transport.CloseIdleConnections)
	hosts, err := s.Discover(t.Context())
	return text(hosts), err
}

func TestKubeconfig(t *testing.T) {
	a := newServer(t)
	a.put(newPod("a", "10.0.0.1", 1))
	token := filepath.Join(t.TempDir(), "token")
	writeFile(t, token, a.token)
	for what, path := range map[string]string{
		"a token":      writeKubeconfig(t, a.URL, caData(a), "token: "+a.token),
		"a token file": writeKubeconfig(t, a.URL, caData(a), "tokenFile: "+token),
		"a server by another name": writeKubeconfig(t, strings.Replace(a.URL, "127.0.0.1", "localhost", 1),
			caData(a)+"\n    tls-server-name: example.com", "token: "+a.token),
	} {
		if got, err := ask(t, path); err != nil || got != "10.0.0.1:1" {
			t.Errorf("%s: %s, %v", what, got, err)
		}
	}
	path := writeKubeconfig(t, a.URL, "certificate-authority: ca.pem", "tokenFile: token") // both are in the kubeconfig's folder
	writeFile(t, filepath.Join(filepath.Dir(path), "ca.pem"),
		string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw})))
	writeFile(t, filepath.Join(filepath.Dir(path), "token"), a.token)
	if got, err := ask(t, path); err != nil || got != "10.0.0.1:1" {
		t.Errorf("files beside it: %s, %v", got, err)
	}
}

func TestKubeconfigRefuses(t *testing.T) {
	a := newServer(t)
	ca := caData(a)
	for _, c := range []struct{ server, cluster, user, says string }{
		{a.URL, "", "token: " + a.token, "certificate"}, // the system does not know the certificate's authority
		{a.URL, "insecure-skip-tls-verify: true", "token: x-secret", "insecure-skip-tls-verify"},
		{a.URL, ca + "\n    proxy-url: http://proxy:1", "token: x-secret", "proxy-url"},
		{a.URL, ca, "exec: {command: aws, args: [eks, get-token]}", "exec"},
		{a.URL, ca, "auth-provider: {name: gcp}", "auth-provider"},
		{a.URL, ca, "username: ann, password: x-secret", "username"},
		{a.URL, ca, "token: x-secret, as: root", "impersonation"},
		{a.URL, ca, `token: "x-secret\ny"`, "invalid header"},
		{a.URL, ca, "tokenFile: no-such-file", "no-such-file"},
		{a.URL, ca, "client-certificate-data: eA==", "client-certificate"},
		{a.URL, ca, "client-key-data: '%'", "base64"},
		{a.URL, "certificate-authority-data: eA==", "token: x-secret", "certificate"},
		{"http://elsewhere.invalid", "", "token: x-secret", "not https"},
		{"http://127.0.0.1:1", "", "token: x-secret", "unencrypted"},
		{"elsewhere.invalid:6443", "", "", "not the address"},
		{a.URL, ca, "token: [x-secret", "not YAML"},
	} {
		_, err := ask(t, writeKubeconfig(t, c.server, c.cluster, c.user))
		if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s / %s: %v", c.cluster, c.user, err)
		}
	}
	path := writeKubeconfig(t, a.URL, ca, "token: x")
	for from, to := range map[string]string{"name: here": "name: there", "cluster: test,": "cluster: none,", "user: ann, n": "user: bob, n"} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		changed := filepath.Join(t.TempDir(), "config")
		writeFile(t, changed, strings.Replace(string(text), from, to, 1))
		if _, err := ask(t, changed); err == nil || !strings.Contains(err.Error(), "there is no") {
			t.Errorf("%s: %v", to, err)
		}
	}
}

// selfSigned returns a certificate and its key as PEM.
func selfSigned(t *testing.T, name string) (certPEM, keyPEM string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true,
		NotAfter: time.Now().Add(time.Hour), BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}))
}

// TestClientCertificate: the client authenticates with a certificate, and uses a new one once its
// file has it.
func TestClientCertificate(t *testing.T) {
	a := newServer(t)
	a.put(newPod("a", "10.0.0.1", 1))
	dir := t.TempDir()
	pool := x509.NewCertPool()
	issue := func(name string) {
		cert, key := selfSigned(t, name)
		pool.AppendCertsFromPEM([]byte(cert))
		writeFile(t, filepath.Join(dir, "cert.pem"), cert)
		writeFile(t, filepath.Join(dir, "key.pem"), key)
	}
	issue("ann")
	a.TLS.ClientAuth, a.TLS.ClientCAs = tls.RequireAndVerifyClientCert, pool
	user := fmt.Sprintf("client-certificate: %s/cert.pem, client-key: %s/key.pem", dir, dir)
	path := writeKubeconfig(t, a.URL, caData(a), user)
	s := newSource()
	s.lookup = env()
	if err := s.Configure(map[string]string{"kubeconfig": path, "context": "here"}); err != nil {
		t.Fatal(err)
	}
	asked := make(chan string, 1)
	a.setAnswer(func(_ http.ResponseWriter, r *http.Request) bool {
		asked <- r.TLS.PeerCertificates[0].Subject.CommonName
		r.Header.Set("Authorization", "Bearer first-secret") // a client with a certificate needs no token
		return false
	})
	again := time.NewTicker(50 * time.Millisecond) // client-go reads the files once a second
	defer again.Stop()
	late := sandbox.Expired()
	for _, name := range []string{"ann", "bob"} {
		issue(name)
		for got := ""; got != name; {
			s.client.transport.CloseIdleConnections()
			if hosts, err := s.Discover(t.Context()); err != nil || text(hosts) != "10.0.0.1:1" {
				t.Fatalf("%s: %v, %v", name, hosts, err)
			}
			select {
			case <-late:
				t.Fatalf("asked by %s, not %s", got, name)
			case got = <-asked:
				<-again.C
			}
		}
	}
	if _, err := ask(t, writeKubeconfig(t, a.URL, caData(a), "token: "+a.token)); err == nil {
		t.Error("a client of no certificate was heard")
	}
}

func TestInCluster(t *testing.T) {
	a := newServer(t)
	dir, lookup := a.mount()
	try := func(values map[string]string) error {
		s := newSource()
		s.dir, s.lookup = dir, lookup
		return s.Configure(values)
	}
	if err := try(map[string]string{"namespace": "other"}); err != nil {
		t.Error(err)
	}
	s, _ := newSourceFor(t, a, "namespace", "other")
	if hosts, err := s.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "403") || !strings.Contains(err.Error(), "pods is forbidden") {
		t.Errorf("%v, %v", hosts, err)
	}
	writeFile(t, filepath.Join(dir, "token"), "")
	if err := try(nil); err == nil || !strings.Contains(err.Error(), "is empty") {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(dir, "ca.crt")); err != nil {
		t.Fatal(err)
	}
	if err := try(nil); err == nil || !strings.Contains(err.Error(), "automountServiceAccountToken") {
		t.Error(err)
	}
	lookup = env("HOME", t.TempDir())
	if err := try(nil); err == nil || !strings.Contains(err.Error(), "set kubeconfig") {
		t.Error(err)
	}
	lookup = env("KUBECONFIG", writeKubeconfig(t, a.URL, caData(a), "token: "+a.token))
	if err := try(map[string]string{"context": "here"}); err != nil {
		t.Error(err)
	}
}

func TestAServerOfAnotherAuthority(t *testing.T) {
	a := newServer(t)
	s := newSource()
	s.dir, s.lookup = a.mount()
	cert, _ := selfSigned(t, "elsewhere")
	writeFile(t, filepath.Join(s.dir, "ca.crt"), cert)
	if err := s.Configure(nil); err != nil {
		t.Fatal(err)
	}
	if hosts, err := s.Discover(t.Context()); err == nil || !strings.Contains(err.Error(), "certificate") || len(a.asked()) > 0 {
		t.Errorf("%v, %v, %d requests", hosts, err, len(a.asked()))
	}
}

func TestSettings(t *testing.T) {
	for _, c := range []struct{ key, value, says string }{
		{"labels", "x", `unknown setting "labels"; the settings are: cluster_domain, container, context, default_slots, field_selector, host, job, ` +
			`kubeconfig, label_selector, namespace, page_size, resource, timeout, watch_timeout`},
		{"host", "uid", "host"}, {"default_slots", "-1", "default_slots"}, {"page_size", "0", "page_size"},
		{"timeout", "0", "timeout"}, {"watch_timeout", "never", "watch_timeout"}, {"namespace", "a/../b", "namespace"},
	} {
		if _, err := readConfig(map[string]string{c.key: c.value}); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s=%s: %v", c.key, c.value, err)
		}
	}
}
