package dashboard

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// Config configures a Server.
type Config struct {
	Job Job
	// Listen is an address and a port, such as 127.0.0.1:0. On other addresses than loopback the
	// server uses TLS.
	Listen string
	// Certificate is the certificate for TLS. Nil: the server creates one, which no browser trusts.
	Certificate *tls.Certificate
	// Names are further host names by which browsers may address the server.
	Names []string
	// Tokens are the tokens that the server accepts.
	Tokens Tokens
	// Interval is the pause between two looks at the job. 0: 1 s.
	Interval time.Duration
}

const (
	headerTime  = 10 * time.Second // bounds the reading of a request's header
	answerTime  = 30 * time.Second // bounds the writing of an answer, or of a message of a stream
	idleTime    = 2 * time.Minute
	maxHeader   = 16 << 10 // bytes
	maxBody     = 4 << 10  // bytes of a command
	mostConns   = 128      // authenticated connections; a browser has at most six
	shutdownFor = 2 * time.Second
)

// Server serves the page.
type Server struct {
	cfg  Config
	ln   *identity.Listener
	tls  *tls.Config // nil: plain HTTP, on loopback addresses
	hub  *hub
	http *http.Server
	admission

	mu       sync.Mutex
	admitted map[net.Conn]bool // authenticated connections
}

// Listen opens a server's socket. The caller must call Serve or Close.
func Listen(cfg Config) (*Server, error) {
	if cfg.Interval <= 0 {
		cfg.Interval = time.Second
	}
	host, _, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("dashboard: %q is not an address and a port, such as 127.0.0.1:8265", cfg.Listen)
	}
	if host == "" {
		return nil, fmt.Errorf("dashboard: %q names no address: 127.0.0.1%s for this machine alone, 0.0.0.0%[1]s for all", cfg.Listen, cfg.Listen)
	}
	ln, err := identity.Dashboard.Listen(cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("dashboard: %w", err)
	}
	s := &Server{cfg: cfg, ln: ln, hub: newHub(cfg.Job, cfg.Interval), admitted: make(map[net.Conn]bool)}
	addr := ln.Addr().(*net.TCPAddr).AddrPort()
	if !addr.Addr().Unmap().IsLoopback() {
		if s.tls, err = tlsConfig(cfg.Certificate, host); err != nil {
			return nil, errors.Join(err, ln.Close())
		}
	}
	s.admission = newAdmission(int(addr.Port()))
	s.http = &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeader, TLSConfig: s.tls,
		ErrorLog: quiet, ConnState: s.changed, ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	return s, nil
}

// connKey is the key of a request's connection.
type connKey struct{}

// Close closes a server for which Serve was not called.
func (s *Server) Close() error { return s.ln.Close() }

// Serve serves the page until ctx ends, and closes the server.
func (s *Server) Serve(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	looking, stop := context.WithCancel(ctx)
	defer stop()
	wg.Go(func() { s.hub.run(looking) })
	served := make(chan error, 1)
	go func() {
		if s.tls != nil {
			served <- s.http.ServeTLS(s.ln, "", "")
		} else {
			served <- s.http.Serve(s.ln)
		}
	}()
	select {
	case err := <-served:
		return fmt.Errorf("dashboard: %w", errors.Join(err, s.ln.Close()))
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownFor)
	defer cancel()
	if s.http.Shutdown(grace) != nil {
		_ = s.http.Close()
	}
	<-served
	return nil
}

// Addr returns the address and port.
func (s *Server) Addr() netip.AddrPort { return s.ln.Addr().(*net.TCPAddr).AddrPort() }

// URL returns the URL of the page, without a token.
func (s *Server) URL() string {
	scheme, host := "http", s.Addr().Addr().Unmap()
	if s.tls != nil {
		scheme = "https"
	}
	name := host.String()
	if host.IsUnspecified() {
		name = "localhost"
		if len(s.cfg.Names) > 0 {
			name = s.cfg.Names[0]
		}
	}
	return scheme + "://" + net.JoinHostPort(name, strconv.Itoa(int(s.Addr().Port()))) + "/"
}

// WithToken returns the URL of the page with a token.
func WithToken(page, token string) string { return page + "?token=" + url.QueryEscape(token) }

// Fingerprint returns the SHA-256 hash of the certificate that the server has created, as browsers
// show it, or "" if it has created none.
func (s *Server) Fingerprint() string {
	if s.tls == nil || s.cfg.Certificate != nil {
		return ""
	}
	return fingerprint(s.tls)
}

// knows reports whether a request may address the server by that name. Other names in DNS may
// belong to a stranger's site that resolves to this machine; an IP address cannot.
func (s *Server) knows(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.ToLower(strings.Trim(host, "[]")), ".")
	if addr, err := netip.ParseAddr(host); err == nil {
		return s.tls != nil || addr.IsLoopback()
	}
	if host == "localhost" {
		return true
	}
	for _, name := range s.cfg.Names {
		if s.tls != nil && strings.EqualFold(host, name) {
			return true
		}
	}
	return false
}

// proven reports to the listener that a request's connection is authenticated by a token. It
// returns false if there are too many such connections.
func (s *Server) proven(r *http.Request) bool {
	c := plainConn(r.Context().Value(connKey{}))
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case c == nil:
		return false
	case s.admitted[c]:
		return true
	case len(s.admitted) >= mostConns || !s.ln.Proven(c):
		return false
	}
	s.admitted[c] = true
	return true
}

// changed forgets a connection that has ended.
func (s *Server) changed(c net.Conn, state http.ConnState) {
	if state == http.StateClosed || state == http.StateHijacked {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.admitted, plainConn(c))
	}
}

// plainConn returns the connection below TLS.
func plainConn(conn any) net.Conn {
	if t, is := conn.(*tls.Conn); is {
		return t.NetConn()
	}
	c, _ := conn.(net.Conn)
	return c
}
