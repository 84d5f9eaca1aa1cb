package main

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/oauth2"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/transport"

	"github.com/hvdrun/hvdrun/internal/safefile"
)

// serviceAccount is the folder with the credentials that Kubernetes gives a pod for the API server.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// access says how to reach an API server, and with which credentials.
type access struct {
	server    rest.Config
	namespace string // "": not told
}

const (
	// tokenPeriod is how long a token from a file is used before the file is read again.
	tokenPeriod = time.Minute
	// maxToken and maxConfig bound the files, in bytes.
	maxToken, maxConfig = 64 << 10, 4 << 20
)

// tokenFile is a file with a token.
type tokenFile string

// Token reads the file. Errors contain only the file's name.
func (f tokenFile) Token() (*oauth2.Token, error) {
	text, err := safefile.OwnText(string(f), maxToken)
	if err != nil {
		return nil, err
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return nil, fmt.Errorf("%s is empty", string(f))
	}
	return &oauth2.Token{AccessToken: token, Expiry: time.Now().Add(tokenPeriod)}, nil
}

// setTokenFile makes requests use the token in a file. The file is read again after tokenPeriod and
// when the server refuses the token, since Kubernetes replaces it long before it expires.
func (a *access) setTokenFile(path string) error {
	source := transport.NewCachedTokenSource(tokenFile(path))
	if _, err := source.Token(); err != nil {
		return fmt.Errorf("token: %w", err)
	}
	a.server.Wrap(transport.ResettableTokenSourceWrapTransport(source))
	a.server.Wrap(askAgain)
	return nil
}

// inCluster returns the access that Kubernetes gives a pod, whose files are in dir.
// rest.InClusterConfig cannot be used, since it reads fixed paths and the process's environment.
func inCluster(dir string, lookup func(string) (string, bool)) (*access, error) {
	host, _ := lookup("KUBERNETES_SERVICE_HOST")
	port, _ := lookup("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("kubernetes: this process runs in no pod (no KUBERNETES_SERVICE_HOST): set kubeconfig")
	}
	ca, err := safefile.OwnText(filepath.Join(dir, "ca.crt"), maxConfig)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: no service account in this pod (automountServiceAccountToken?): %w", err)
	}
	a := &access{server: baseConfig("https://" + net.JoinHostPort(host, port))}
	a.server.CAData = ca
	if err := a.setTokenFile(filepath.Join(dir, "token")); err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	if text, err := safefile.OwnText(filepath.Join(dir, "namespace"), maxConfig); err == nil {
		a.namespace = strings.TrimSpace(string(text))
	}
	return a, nil
}

// fromKubeconfig returns the access of a context in the file; "" is the current context.
func fromKubeconfig(path, context string) (*access, error) {
	a, err := readKubeconfig(path, context)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: kubeconfig %s: %w", path, err)
	}
	return a, nil
}

func readKubeconfig(path, context string) (*access, error) {
	text, err := safefile.OwnText(path, maxConfig)
	if err != nil {
		return nil, err
	}
	file, err := clientcmd.Load(text)
	if err != nil { // err itself might quote secrets
		return nil, errors.New("it is not YAML of a kubeconfig, or its data are not base64")
	}
	for _, c := range file.Clusters { // its paths are relative to the file
		c.LocationOfOrigin = path
	}
	for _, u := range file.AuthInfos {
		u.LocationOfOrigin = path
	}
	if err := clientcmd.ResolveLocalPaths(file); err != nil {
		return nil, err
	}
	if context == "" {
		context = file.CurrentContext
	}
	chosen := file.Contexts[context]
	if chosen == nil {
		return nil, fmt.Errorf("there is no context %q", context)
	}
	cluster, user := file.Clusters[chosen.Cluster], file.AuthInfos[chosen.AuthInfo]
	switch {
	case cluster == nil:
		return nil, fmt.Errorf("there is no cluster %q", chosen.Cluster)
	case user == nil && chosen.AuthInfo != "":
		return nil, fmt.Errorf("there is no user %q", chosen.AuthInfo)
	case user == nil:
		user = &api.AuthInfo{}
	}
	if err := checkCluster(cluster); err != nil {
		return nil, fmt.Errorf("cluster %s: %w", chosen.Cluster, err)
	}
	a := &access{server: baseConfig(cluster.Server), namespace: chosen.Namespace}
	a.server.TLSClientConfig = rest.TLSClientConfig{
		ServerName: cluster.TLSServerName,
		CAFile:     cluster.CertificateAuthority, CAData: cluster.CertificateAuthorityData,
		CertFile: user.ClientCertificate, CertData: user.ClientCertificateData,
		KeyFile: user.ClientKey, KeyData: user.ClientKeyData,
	}
	if err := a.setUser(user); err != nil {
		return nil, fmt.Errorf("user %s: %w", chosen.AuthInfo, err)
	}
	for _, path := range []string{cluster.CertificateAuthority, user.ClientCertificate, user.ClientKey} {
		if path == "" {
			continue
		}
		if _, err := safefile.OwnText(path, maxConfig); err != nil { // client-go reads it itself, repeatedly
			return nil, err
		}
	}
	return a, nil
}

// checkCluster returns an error unless the server is verified and reached without a proxy-url.
func checkCluster(c *api.Cluster) error {
	switch {
	case c.InsecureSkipTLSVerify:
		return errors.New("insecure-skip-tls-verify: a server that is not verified is sent no token; give its certificate-authority")
	case c.ProxyURL != "":
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
	return nil
}

// setUser sets the user's credentials. It refuses settings that it does not support and that would
// change the identity of the caller.
func (a *access) setUser(u *api.AuthInfo) error {
	for what, given := range map[string]bool{
		"exec (a program that gets credentials)": u.Exec != nil, "auth-provider": u.AuthProvider != nil,
		"username":           u.Username != "" || u.Password != "",
		"as (impersonation)": u.Impersonate != "" || u.ImpersonateUID != "" || len(u.ImpersonateGroups)+len(u.ImpersonateUserExtra) > 0,
	} {
		if given {
			return fmt.Errorf("%s is not supported: use a token, or a client certificate, "+
				"as `kubectl create token` or a service account has it", what)
		}
	}
	tls := a.server.TLSClientConfig
	if (tls.CertFile == "" && tls.CertData == nil) != (tls.KeyFile == "" && tls.KeyData == nil) {
		return errors.New("client-certificate and client-key must be given together")
	}
	if strings.HasPrefix(a.server.Host, "http:") && (u.Token != "" || u.TokenFile != "") {
		return errors.New("its token would travel unencrypted over http")
	}
	if u.TokenFile != "" {
		return a.setTokenFile(u.TokenFile)
	}
	a.server.BearerToken = u.Token
	return nil
}
