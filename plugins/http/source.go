package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/plugins/settings"
)

// maxTimeout is less than the time that hvdrun waits for an answer of a plugin.
const maxTimeout = 25 * time.Second

// source implements Discoverer and Watcher. Configure must be called first.
type source struct {
	cfg  atomic.Pointer[config]
	dial func(ctx context.Context, network, addr string) (net.Conn, error) // nil: the default; tests replace it
}

// config holds the settings, and the last version of the document.
type config struct {
	url          *url.URL
	shown        string // the URL without its query, which may contain secrets
	stream       bool
	interval     time.Duration
	timeout      time.Duration // of a request, or until the first document of a stream
	idleTimeout  time.Duration // of a stream; 0: none
	defaultSlots int
	tokenFile    string
	certFile     string
	keyFile      string
	client       *http.Client

	known atomic.Pointer[version]
}

// version is a document with the validators by which a server can answer that it has not changed.
type version struct {
	etag, modified string
	hosts          []plan.Host
}

// Configure reads the settings that the README describes.
func (s *source) Configure(values map[string]string) error {
	r := settings.Read("http", values)
	c := &config{
		stream:       r.Bool("stream", false),
		interval:     r.Duration("interval", 5*time.Second, 100*time.Millisecond, 24*time.Hour),
		timeout:      r.Duration("timeout", 10*time.Second, 10*time.Millisecond, maxTimeout),
		idleTimeout:  r.Duration("idle_timeout", 2*time.Minute, 0, 24*time.Hour),
		defaultSlots: r.Int("default_slots", 1, 0, plan.MaxSlots),
		tokenFile:    r.Text("token_file", ""),
		certFile:     r.Text("cert_file", ""),
		keyFile:      r.Text("key_file", ""),
	}
	c.readURL(r)
	trust := c.readTLS(r)
	if c.tokenFile != "" {
		if _, err := c.token(); err != nil {
			r.Fault("token_file", "%w", err)
		}
		if c.url.Scheme == "http" && !isLoopback(c.url.Hostname()) {
			r.Fault("token_file", "a token is sent to another machine by https only")
		}
	}
	if err := r.Err(); err != nil {
		return err
	}
	c.client = &http.Client{CheckRedirect: c.checkRedirect, Transport: s.transport(c, trust)}
	if old := s.cfg.Swap(c); old != nil {
		old.client.CloseIdleConnections()
	}
	return nil
}

// readURL reads the URL, and sets some URL even after a fault. Faults do not repeat the text, which
// may contain a secret.
func (c *config) readURL(r *settings.Reader) {
	c.url = &url.URL{}
	text := r.Required("url")
	if text == "" {
		return
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		r.Fault("url", "is not a URL")
		return
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		r.Fault("url", "must begin with http:// or https:// and a host")
	case u.User != nil:
		r.Fault("url", "holds a password; use token_file or cert_file")
	}
	u.Fragment, u.RawFragment = "", ""
	c.url, c.shown = u, show(u)
}

// show returns a URL in the form that errors may contain.
func show(u *url.URL) string {
	text := origin(u) + u.EscapedPath()
	if u.RawQuery != "" {
		text += "?…"
	}
	return text
}

func origin(u *url.URL) string { return u.Scheme + "://" + u.Host }

func isLoopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

// readTLS reads the certificates. Those of the client are read again for each connection, since
// they are often short-lived.
func (c *config) readTLS(r *settings.Reader) *tls.Config {
	caFile, name := r.Text("ca_file", ""), r.Text("server_name", "")
	trust := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: name}
	given := map[string]string{"ca_file": caFile, "server_name": name, "cert_file": c.certFile, "key_file": c.keyFile}
	if c.url.Scheme == "http" {
		for key, value := range given {
			if value != "" {
				r.Fault(key, "has no effect without https")
			}
		}
	}
	if caFile != "" {
		pool, err := safefile.CertPool(caFile, safefile.OwnText)
		if err != nil {
			r.Fault("ca_file", "%w", err)
		}
		trust.RootCAs = pool
	}
	switch {
	case c.certFile == "" && c.keyFile == "":
		return trust
	case c.certFile == "" || c.keyFile == "":
		r.Fault("cert_file", "and key_file are given together")
		return trust
	}
	load := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return safefile.KeyPair(c.certFile, c.keyFile, safefile.OwnText, safefile.OwnText)
	}
	if _, err := load(nil); err != nil {
		r.Fault("cert_file", "%w", err)
	}
	trust.GetClientCertificate = load
	return trust
}

// transport returns a transport for HTTP/1.1. That suffices for one request at a time, and if a
// server refuses a certificate, HTTP/2 loses the reason.
func (s *source) transport(c *config, trust *tls.Config) *http.Transport {
	dial := s.dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: c.timeout}).DialContext
	}
	return &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            dial,
		TLSClientConfig:        trust,
		TLSHandshakeTimeout:    c.timeout,
		DisableCompression:     c.stream,
		MaxIdleConnsPerHost:    2,
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
	}
}

var errNotConfigured = errors.New("http: the source was asked before it got its settings")

// Discover requests the document once, or waits for the first document of the stream.
func (s *source) Discover(ctx context.Context) ([]plan.Host, error) {
	c := s.cfg.Load()
	switch {
	case c == nil:
		return nil, errNotConfigured
	case ctx.Err() != nil:
		return nil, fmt.Errorf("http: %w", context.Cause(ctx))
	case !c.stream:
		return c.fetch(ctx)
	}
	var first []plan.Host
	err := c.follow(ctx, func(hosts []plan.Host) bool { first = hosts; return false })
	if err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return first, nil
}

// Watch polls the document, or follows the stream, and calls found with every list that differs
// from the last. It returns the first error. If a stream ends or is silent for long after at least
// one document, Watch opens it again.
func (s *source) Watch(ctx context.Context, found func([]plan.Host)) error {
	c := s.cfg.Load()
	if c == nil {
		return errNotConfigured
	}
	defer c.client.CloseIdleConnections()
	var last []plan.Host
	first := true
	news := func(hosts []plan.Host) bool {
		if first || !slices.Equal(hosts, last) {
			first, last = false, hosts
			found(slices.Clone(hosts))
		}
		return true
	}
	for {
		begun := time.Now()
		if c.stream {
			if err := c.follow(ctx, news); err != nil {
				return err
			}
		} else {
			hosts, err := c.fetch(ctx)
			if err != nil {
				return err
			}
			news(hosts)
			begun = time.Now()
		}
		if err := retry.Pause(ctx, c.interval-time.Since(begun)); err != nil {
			return fmt.Errorf("http: %w", err)
		}
	}
}
