package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
)

// serviceAccount is where Kubernetes puts what a pod needs to ask the API server.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// access is how to reach an API server, and as whom.
type access struct {
	server    *url.URL
	tls       *tls.Config
	token     func() (string, error) // "" where there is none; read anew for every request
	namespace string                 // "": not told
}

// noToken is for those who have a client certificate, or nothing.
func noToken() (string, error) { return "", nil }

// tokenFile returns the token as it is in the file now: Kubernetes replaces it long before it
// expires.
func tokenFile(path string) func() (string, error) {
	return func() (string, error) {
		text, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("kubernetes: token: %w", err)
		}
		token := strings.TrimSpace(string(text))
		if token == "" {
			return "", fmt.Errorf("kubernetes: token: %s is empty", path)
		}
		return token, checkToken(token)
	}
}

// checkToken refuses what cannot be sent in a header, without repeating it.
func checkToken(token string) error {
	if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return errors.New("kubernetes: token: it holds characters that no token has")
	}
	return nil
}

// inCluster is the access that Kubernetes gives to a pod, whose files are in dir.
func inCluster(dir string, lookup func(string) (string, bool)) (*access, error) {
	host, _ := lookup("KUBERNETES_SERVICE_HOST")
	port, _ := lookup("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("kubernetes: this process runs in no pod (no KUBERNETES_SERVICE_HOST): set kubeconfig")
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("kubernetes: no service account in this pod (automountServiceAccountToken?): %w", err)
	}
	pool, err := poolOf(ca, "ca.crt of the service account")
	if err != nil {
		return nil, err
	}
	a := &access{
		server: &url.URL{Scheme: "https", Host: net.JoinHostPort(host, port)},
		tls:    &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		token:  tokenFile(filepath.Join(dir, "token")),
	}
	if _, err := a.token(); err != nil {
		return nil, err
	}
	if text, err := os.ReadFile(filepath.Join(dir, "namespace")); err == nil {
		a.namespace = strings.TrimSpace(string(text))
	}
	return a, nil
}

func poolOf(pem []byte, what string) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("kubernetes: %s holds no certificate", what)
	}
	return pool, nil
}

// kubeconfig is what is understood of such a file. What would change who asks, or whom, and is not
// understood, is refused.
type kubeconfig struct {
	CurrentContext string `yaml:"current-context"`
	Contexts       []struct {
		Name    string `yaml:"name"`
		Context struct {
			Cluster   string `yaml:"cluster"`
			User      string `yaml:"user"`
			Namespace string `yaml:"namespace"`
		} `yaml:"context"`
	} `yaml:"contexts"`
	Clusters []struct {
		Name    string        `yaml:"name"`
		Cluster clusterConfig `yaml:"cluster"`
	} `yaml:"clusters"`
	Users []struct {
		Name string     `yaml:"name"`
		User userConfig `yaml:"user"`
	} `yaml:"users"`
}

type clusterConfig struct {
	Server     string `yaml:"server"`
	CA         string `yaml:"certificate-authority"`
	CAData     string `yaml:"certificate-authority-data"`
	ServerName string `yaml:"tls-server-name"`
	Insecure   bool   `yaml:"insecure-skip-tls-verify"`
	Proxy      string `yaml:"proxy-url"`
}

type userConfig struct {
	Token        string `yaml:"token"`
	TokenFile    string `yaml:"tokenFile"`
	Cert         string `yaml:"client-certificate"`
	CertData     string `yaml:"client-certificate-data"`
	Key          string `yaml:"client-key"`
	KeyData      string `yaml:"client-key-data"`
	Username     string `yaml:"username"`
	Password     string `yaml:"password"`
	As           string `yaml:"as"`
	Exec         any    `yaml:"exec"`
	AuthProvider any    `yaml:"auth-provider"`
}

// fromKubeconfig is the access that a context of the file gives; "" is its current one.
func fromKubeconfig(path, context string) (*access, error) {
	a, err := readKubeconfig(path, context)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: kubeconfig %s: %w", path, err)
	}
	return a, nil
}

func readKubeconfig(path, context string) (*access, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var k kubeconfig
	if err := yaml.Unmarshal(text, &k); err != nil {
		return nil, errors.New("it is not YAML of a kubeconfig") // the error might quote secrets
	}
	if context == "" {
		context = k.CurrentContext
	}
	for _, c := range k.Contexts {
		if c.Name != context {
			continue
		}
		cluster, user, err := k.find(c.Context.Cluster, c.Context.User)
		if err != nil {
			return nil, err
		}
		dir := filepath.Dir(path)
		a := &access{namespace: c.Context.Namespace}
		if err := a.setCluster(cluster, dir); err != nil {
			return nil, fmt.Errorf("cluster %s: %w", c.Context.Cluster, err)
		}
		if err := a.setUser(user, dir); err != nil {
			return nil, fmt.Errorf("user %s: %w", c.Context.User, err)
		}
		return a, nil
	}
	return nil, fmt.Errorf("there is no context %q", context)
}

// find returns the cluster and the user of these names; "" is a user of no credentials.
func (k *kubeconfig) find(cluster, user string) (c clusterConfig, u userConfig, err error) {
	found := false
	for _, entry := range k.Clusters {
		if entry.Name == cluster {
			c, found = entry.Cluster, true
			break
		}
	}
	if !found {
		return c, u, fmt.Errorf("there is no cluster %q", cluster)
	}
	for _, entry := range k.Users {
		if entry.Name == user {
			return c, entry.User, nil
		}
	}
	if user != "" {
		return c, u, fmt.Errorf("there is no user %q", user)
	}
	return c, u, nil
}

func (a *access) setCluster(c clusterConfig, dir string) error {
	switch {
	case c.Insecure:
		return errors.New("insecure-skip-tls-verify: a server that is not verified is sent no token; give its certificate-authority")
	case c.Proxy != "":
		return errors.New("proxy-url is not supported; HTTPS_PROXY is")
	}
	server, err := url.Parse(c.Server)
	if err != nil || server.Host == "" || server.User != nil || server.RawQuery != "" {
		return errors.New("server is not the address of an API server")
	}
	loopback := server.Hostname() == "localhost" || net.ParseIP(server.Hostname()).IsLoopback()
	if server.Scheme != "https" && !(server.Scheme == "http" && loopback) {
		return fmt.Errorf("server %s is not https", server.Redacted())
	}
	a.server = server
	a.tls = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.ServerName}
	ca, err := content(c.CA, c.CAData, dir)
	if err != nil {
		return fmt.Errorf("certificate-authority: %w", err)
	}
	if ca != nil {
		if a.tls.RootCAs, err = poolOf(ca, "certificate-authority"); err != nil {
			return err
		}
	}
	return nil
}

func (a *access) setUser(u userConfig, dir string) error {
	for what, given := range map[string]bool{
		"exec (a program that gets credentials)": u.Exec != nil, "auth-provider": u.AuthProvider != nil,
		"username": u.Username != "" || u.Password != "", "as (impersonation)": u.As != "",
	} {
		if given {
			return fmt.Errorf("%s is not supported: use a token, or a client certificate, "+
				"as `kubectl create token` or a service account has it", what)
		}
	}
	a.token = noToken
	switch {
	case u.TokenFile != "":
		a.token = tokenFile(inDir(dir, u.TokenFile))
	case u.Token != "":
		if err := checkToken(u.Token); err != nil {
			return err
		}
		a.token = func() (string, error) { return u.Token, nil }
	}
	if a.server.Scheme == "http" && (u.Token != "" || u.TokenFile != "") {
		return errors.New("its token would travel unencrypted over http")
	}
	read := func() (*tls.Certificate, error) { return clientCertificate(u, dir) }
	cert, err := read()
	if err != nil {
		return err
	}
	if cert != nil { // read for every connection, since files are replaced
		a.tls.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return read() }
	}
	return nil
}

// clientCertificate returns nil where the user has none.
func clientCertificate(u userConfig, dir string) (*tls.Certificate, error) {
	certPEM, err := content(u.Cert, u.CertData, dir)
	if err != nil {
		return nil, fmt.Errorf("client-certificate: %w", err)
	}
	keyPEM, err := content(u.Key, u.KeyData, dir)
	if err != nil {
		return nil, fmt.Errorf("client-key: %w", err)
	}
	if certPEM == nil && keyPEM == nil {
		return nil, nil
	}
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("client-certificate and client-key: %w", err)
	}
	return &cert, nil
}

// content returns what a file of the kubeconfig holds, or the data that stand in its place; nil
// where neither is given.
func content(path, data, dir string) ([]byte, error) {
	switch {
	case data != "":
		text, err := base64.StdEncoding.DecodeString(data)
		if err != nil {
			return nil, errors.New("its data are not base64")
		}
		return text, nil
	case path != "":
		return os.ReadFile(inDir(dir, path))
	}
	return nil, nil
}

func inDir(dir, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}
