package metrics

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// path is the path at which metrics are served.
const path = "/metrics"

// Config configures the server of metrics.
type Config struct {
	// Listen is an address and a port; port 0: any free port.
	Listen string
	// Token, if not empty, is the bearer token that a client must send.
	Token string
	// Log receives the first error of a collector. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
	// Certificate is the server's certificate for TLS. Nil: no TLS.
	Certificate *tls.Certificate
}

// ParseListen returns the address to listen on for a text such as 9464, :9464, 0.0.0.0:9464 or
// [::1]:9464. A port alone stands for this machine's loopback address.
func ParseListen(text string) (string, error) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		host, port = "", text
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return "", fmt.Errorf("%q is not a port, or an IP address and a port", text)
	}
	if host == "" {
		return net.JoinHostPort(identity.Loopback().String(), port), nil
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return "", fmt.Errorf("%q is not a port, or an IP address and a port", text)
	}
	return text, nil
}

// tokenBytes bounds the size of a token file.
const tokenBytes = 4 << 10

// ReadToken reads the token from a file, as safefile.SecretText reads secrets.
func ReadToken(path string) (string, error) {
	text, err := safefile.SecretText(path, tokenBytes)
	token := strings.TrimSpace(string(text))
	switch {
	case err != nil:
		return "", err
	case token == "":
		return "", fmt.Errorf("%s: the file has no token", path)
	case strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", fmt.Errorf("%s: a token is one word of printable ASCII", path)
	}
	return token, nil
}

// Server serves metrics. Listen returns one.
type Server struct {
	ln     *identity.Listener
	server *http.Server
	tls    bool
}

// Listen listens for scrapes of the collectors: a Driver or an Agent.
func Listen(cfg Config, all ...prometheus.Collector) (*Server, error) {
	registry := prometheus.NewRegistry()
	all = append(all, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for _, c := range all {
		if err := registry.Register(c); err != nil {
			return nil, fmt.Errorf("metrics: %w", err)
		}
	}
	ln, err := identity.Metrics.Listen(cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET "+path, guarded(cfg.Token, promhttp.HandlerFor(prometheus.GathererFunc(discreet(registry.Gather, cfg.Log)), promhttp.HandlerOpts{
		MaxRequestsInFlight: 4, Timeout: 2 * readTimeout,
	})))
	s := &Server{ln: ln, tls: cfg.Certificate != nil, server: &http.Server{
		Handler: mux, ReadTimeout: identity.Metrics.Deadline, WriteTimeout: identity.Metrics.Deadline, MaxHeaderBytes: 8 << 10,
		ErrorLog: log.New(io.Discard, "", 0), // anyone who reaches the server could fill the log
	}}
	s.server.SetKeepAlivesEnabled(false) // connections are never proven, so each serves one scrape
	if cfg.Certificate != nil {
		s.server.TLSConfig = &tls.Config{Certificates: []tls.Certificate{*cfg.Certificate}, MinVersion: tls.VersionTLS12}
	}
	return s, nil
}

// discreet gathers metrics without sending failures to clients, since promhttp would send the stack
// of a collector that panics. It logs the first error.
func discreet[Families any](gather func() (Families, error), log logrus.FieldLogger) func() (Families, error) {
	if log == nil {
		log = logrus.StandardLogger()
	}
	var told sync.Once
	return func() (Families, error) {
		families, err := gather()
		if err == nil {
			return families, nil
		}
		told.Do(func() { log.Errorf("metrics: a scrape failed, and later ones may: %v", err) })
		return families, errors.New("metrics: not all could be collected; the log of this hvdrun says why")
	}
}

// URL returns the URL of the metrics.
func (s *Server) URL() string {
	scheme := "http"
	if s.tls {
		scheme = "https"
	}
	return scheme + "://" + s.ln.Addr().String() + path
}

// Serve serves until ctx ends, and then until current scrapes have ended, for at most a second.
func (s *Server) Serve(ctx context.Context) error {
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if s.server.Shutdown(limit) != nil {
			_ = s.server.Close() // its listener is closed
		}
	})
	var err error
	if s.tls {
		err = s.server.ServeTLS(s.ln, "", "")
	} else {
		err = s.server.Serve(s.ln)
	}
	if !stop() {
		<-stopped
	}
	if errors.Is(err, http.ErrServerClosed) || ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("metrics: %w", err)
}

// guarded passes on requests with the token; "" passes on all.
func guarded(token string, next http.Handler) http.Handler {
	if token == "" {
		return next
	}
	want := sha256.Sum256([]byte("Bearer " + token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := sha256.Sum256([]byte(r.Header.Get("Authorization")))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "a bearer token is needed", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
