package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/discoverytest"
	"github.com/hvdrun/hvdrun/plan"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func settingsOf(values ...string) map[string]string {
	m := map[string]string{}
	for _, v := range values {
		key, value, _ := strings.Cut(v, "=")
		m[key] = value
	}
	return m
}

func configured(t *testing.T, values ...string) *source {
	t.Helper()
	s := &source{}
	must(t, s.Configure(settingsOf(values...)))
	t.Cleanup(func() { s.cfg.Load().client.CloseIdleConnections() })
	return s
}

// server starts a server with this handler. At the end of the test it closes its connections, which
// ends the contexts for which handlers wait.
func server(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	return srv.URL
}

func finds(t *testing.T, s *source, want string) {
	t.Helper()
	hosts, err := s.Discover(t.Context())
	must(t, err)
	if got := toText(hosts); got != want {
		t.Errorf("found %q, want %q", got, want)
	}
}

func fails(t *testing.T, s *source, want string) {
	t.Helper()
	hosts, err := s.Discover(t.Context())
	if err == nil || len(hosts) > 0 || !strings.Contains(err.Error(), want) || strings.Count(err.Error(), "http: ") != 1 {
		t.Errorf("found %v, %v; want %s", hosts, err, want)
	}
}

func document(t *testing.T, hosts []plan.Host) string {
	t.Helper()
	list := []map[string]any{}
	for _, h := range hosts {
		list = append(list, map[string]any{"name": h.Name, "slots": h.Slots, "draining": h.Draining})
	}
	text, err := json.Marshal(map[string]any{"hosts": list})
	must(t, err)
	return string(text)
}

func TestKitPolled(t *testing.T) {
	discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
		text := document(t, hosts)
		return configured(t, "url="+server(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", `"1"`)
			if r.Header.Get("If-None-Match") == `"1"` {
				w.WriteHeader(http.StatusNotModified)
				return
			}
			io.WriteString(w, text)
		}), "interval=100ms")
	})
}

func TestKitStreamed(t *testing.T) {
	for _, format := range []string{"%s\n", "event: hosts\ndata: %s\n\n"} {
		discoverytest.Run(t, func(t *testing.T, hosts []plan.Host) discovery.Discoverer {
			text := document(t, hosts)
			return configured(t, "stream=true", "url="+server(t, func(w http.ResponseWriter, r *http.Request) {
				if strings.HasPrefix(format, "event") {
					w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
				}
				fmt.Fprintf(w, format, text)
				w.(http.Flusher).Flush()
				<-r.Context().Done()
			}))
		})
	}
}

func TestConfigure(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	must(t, os.WriteFile(empty, nil, 0o600))
	for _, c := range []struct{ values, want string }{
		{"", "http: setting url: must be given"},
		{"url=http://h addr=x", `http: unknown setting "addr"; the settings are: ca_file, cert_file, default_slots, idle_timeout, interval, `},
		{"url=ftp://h", "http: setting url: must begin with http:// or https:// and a host"},
		{"url=http:///hosts", "http: setting url: must begin with"},
		{"url=http://h%zz", "http: setting url: is not a URL"},
		{"url=https://u:secret@h", "http: setting url: holds a password"},
		{"url=http://h interval=1ms", "http: setting interval: "},
		{"url=http://h stream=1", "http: setting stream: "},
		{"url=http://h ca_file=" + empty, "http: setting ca_file: has no effect without https"},
		{"url=https://h ca_file=" + empty, "http: setting ca_file: " + empty + " has no certificate in PEM"},
		{"url=https://h ca_file=/none", "http: setting ca_file: open /none: no such file"},
		{"url=https://h cert_file=x", "http: setting cert_file: and key_file are given together"},
		{"url=https://h cert_file=/none key_file=/none", "http: setting cert_file: open /none: no such file"},
		{"url=https://h token_file=/none", "http: setting token_file: open /none: no such file"},
		{"url=https://h token_file=" + empty, "http: setting token_file: " + empty + " is empty"},
	} {
		err := (&source{}).Configure(settingsOf(strings.Fields(c.values)...))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %s", c.values, err, c.want)
		}
	}
	if _, err := (&source{}).Discover(t.Context()); !errors.Is(err, errNotConfigured) {
		t.Error(err)
	}
	if err := (&source{}).Watch(t.Context(), nil); !errors.Is(err, errNotConfigured) {
		t.Error(err)
	}
}

func TestNotModified(t *testing.T) {
	for name, c := range map[string]struct {
		header, value, condition string
		again                    bool
	}{
		"ETag":          {"ETag", `W/"a"`, "If-None-Match", true},
		"Last-Modified": {"Last-Modified", "Sat, 21 Nov 2026 10:00:00 GMT", "If-Modified-Since", true},
		"neither":       {"X-Other", "x", "If-None-Match", false},
	} {
		t.Run(name, func(t *testing.T) {
			var calls, repeated int
			s := configured(t, "url="+server(t, func(w http.ResponseWriter, r *http.Request) {
				calls++
				w.Header().Set(c.header, c.value)
				if r.Header.Get(c.condition) == c.value {
					repeated++
					w.WriteHeader(http.StatusNotModified)
					return
				}
				io.WriteString(w, `[{"name":"a","slots":2}]`)
			}))
			for range 3 {
				finds(t, s, "a:2")
			}
			if calls != 3 || (repeated == 2) != c.again {
				t.Errorf("%d calls, %d not modified", calls, repeated)
			}
		})
	}
	// A server that answers "not modified" to a request without a condition.
	fails(t, configured(t, "url="+server(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNotModified) })),
		"status 304 (Not Modified)")
}

func TestBadAnswers(t *testing.T) {
	for _, c := range []struct {
		name, want string
		handler    http.HandlerFunc
	}{
		{"500", "status 500 (Internal Server Error)", func(w http.ResponseWriter, r *http.Request) { http.Error(w, "secret", 500) }},
		{"401", "status 401 (Unauthorized); no token_file is given", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(401) }},
		{"204", "status 204 (No Content)", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(204) }},
		{"too long", "longer than 1048576 bytes", func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "[]"+strings.Repeat(" ", maxDocument))
		}},
		{"cut off", "unexpected EOF", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "100")
			io.WriteString(w, "[]")
		}},
		{"no JSON", "hosts[0]: a host must be an object, not a number", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "[1]") }},
		{"slow", "no answer in 200ms", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
		{"slow body", "no answer in 200ms", func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "[")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			url, timeout := server(t, c.handler), "timeout=25s"
			if strings.HasPrefix(c.name, "slow") {
				timeout = "timeout=200ms"
			}
			s := configured(t, "url="+url+"/hosts?key=secret", timeout)
			fails(t, s, "http: "+url+"/hosts?…: ")
			fails(t, s, c.want)
		})
	}
	closed := httptest.NewServer(nil)
	closed.Close()
	fails(t, configured(t, "url="+closed.URL), "connection refused")
	// After a failure, the next request is the same as before.
	bad := true
	s := configured(t, "url="+server(t, func(w http.ResponseWriter, r *http.Request) {
		if bad = !bad; bad {
			w.WriteHeader(503)
			return
		}
		io.WriteString(w, "[]")
	}))
	finds(t, s, "")
	fails(t, s, "status 503")
	finds(t, s, "")
}

func TestCompressedDocumentIsBounded(t *testing.T) {
	small := gzipped(t, "["+strings.Repeat(" ", 2*maxDocument)+"]")
	fails(t, configured(t, "timeout=25s", "url="+server(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		w.Write(small)
	})), "longer than")
}

func TestToken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(path, []byte("secret-1\n"), 0o600))
	var got atomic.Value
	url := server(t, func(w http.ResponseWriter, r *http.Request) {
		got.Store(r.Header.Get("Authorization"))
		if r.URL.Path == "/echo" {
			http.Error(w, r.Header.Get("Authorization"), http.StatusForbidden)
			return
		}
		io.WriteString(w, "[]")
	})
	s := configured(t, "url="+url, "token_file="+path)
	finds(t, s, "")
	if got.Load() != "Bearer secret-1" {
		t.Errorf("sent %q", got.Load())
	}
	must(t, os.WriteFile(path, []byte("secret-2"), 0o600)) // renewed
	finds(t, s, "")
	if got.Load() != "Bearer secret-2" {
		t.Errorf("sent %q", got.Load())
	}
	for _, bad := range []string{"", "secret 3", "secret\n3", "secret\x003"} {
		must(t, os.WriteFile(path, []byte(bad), 0o600))
		_, err := s.Discover(t.Context())
		if err == nil || !strings.HasPrefix(err.Error(), "http: setting token_file: "+path) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	must(t, os.WriteFile(path, []byte("secret-4"), 0o600))
	if _, err := configured(t, "url="+url+"/echo", "token_file="+path).Discover(t.Context()); err == nil || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
	err := (&source{}).Configure(settingsOf("url=http://192.0.2.1/", "token_file="+path))
	if err == nil || !strings.Contains(err.Error(), "by https only") {
		t.Error(err)
	}
}

func TestRedirects(t *testing.T) {
	var seen atomic.Value
	other := server(t, func(w http.ResponseWriter, r *http.Request) {
		seen.Store(r.Header.Get("Authorization"))
		io.WriteString(w, `[{"name":"a"}]`)
	})
	hops := 0
	url := server(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/near":
			http.Redirect(w, r, "/hosts", http.StatusFound)
		case "/far":
			http.Redirect(w, r, other+"/hosts?key=secret", http.StatusTemporaryRedirect)
		case "/round":
			hops++
			http.Redirect(w, r, "/round", http.StatusFound)
		default:
			io.WriteString(w, "[]")
		}
	})
	path := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(path, []byte("secret"), 0o600))
	token := "token_file=" + path
	finds(t, configured(t, "url="+url+"/near", token), "")
	finds(t, configured(t, "url="+url+"/far"), "a:1")
	if seen.Load() != "" {
		t.Errorf("sent %q", seen.Load())
	}
	seen.Store("nothing")
	fails(t, configured(t, "url="+url+"/far", token), url+"/far: redirected to "+other+", which must not see the token or certificate")
	if seen.Load() != "nothing" {
		t.Errorf("the other server was asked, with %q", seen.Load())
	}
	fails(t, configured(t, "url="+url+"/round"), "redirects more than 5 times")
	if hops != maxRedirects+1 {
		t.Errorf("%d requests", hops)
	}
}

// authority issues certificates.
type authority struct {
	t    *testing.T
	dir  string
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
	next int64
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir(), pool: x509.NewCertPool()}
	der, key := a.issue("ca", nil)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	a.cert, a.key = cert, key
	a.pool.AddCert(cert)
	return a
}

// issue writes name.crt and name.key.
func (a *authority) issue(name string, names []string) ([]byte, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(a.t, err)
	a.next++
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: name}, DNSNames: names,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	must(a.t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	must(a.t, err)
	must(a.t, os.WriteFile(a.path(name+".crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	must(a.t, os.WriteFile(a.path(name+".key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600))
	return der, key
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func TestTLS(t *testing.T) {
	a := newAuthority(t)
	a.issue("server", []string{"hosts.example"})
	a.issue("client", nil)
	cert, err := tls.LoadX509KeyPair(a.path("server.crt"), a.path("server.key"))
	must(t, err)
	var client atomic.Value
	plain := server(t, func(http.ResponseWriter, *http.Request) { t.Error("asked without TLS") })
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client.Store(r.TLS.PeerCertificates[0].SerialNumber.Int64())
		if r.URL.Path == "/down" {
			http.Redirect(w, r, plain, http.StatusFound)
			return
		}
		w.Header().Set("Connection", "close") // so that each request has a handshake
		fmt.Fprintf(w, `[{"name":"p-%d"}]`, r.ProtoMajor)
	}))
	srv.Config.ErrorLog = quiet()
	srv.EnableHTTP2 = true // the client does not use it
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, ClientCAs: a.pool, ClientAuth: tls.RequireAndVerifyClientCert}
	srv.StartTLS()
	t.Cleanup(srv.Close)
	base := []string{"url=" + srv.URL, "timeout=10s"}
	trust := append(slices.Clone(base), "ca_file="+a.path("ca.crt"), "server_name=hosts.example")
	mine := append(slices.Clone(trust), "cert_file="+a.path("client.crt"), "key_file="+a.path("client.key"))

	fails(t, configured(t, base...), "certificate")
	fails(t, configured(t, append(base, "ca_file="+a.path("ca.crt"))...), "x509: ")
	fails(t, configured(t, trust...), "tls: ")
	s := configured(t, mine...)
	finds(t, s, "p-1:1")
	first := client.Load()
	a.issue("client", nil) // renewed in the same files
	s.cfg.Load().client.CloseIdleConnections()
	finds(t, s, "p-1:1")
	if client.Load() == first {
		t.Error("the old certificate was shown again")
	}
	mine[0] += "/down"
	fails(t, configured(t, mine...), "redirected from https to "+plain)
	other := newAuthority(t)
	other.issue("client", nil)
	fails(t, configured(t, append(trust, "cert_file="+other.path("client.crt"), "key_file="+other.path("client.key"))...), "tls: ")
}

// pipes is a network in memory, whose connections can be used in a bubble of virtual time.
type pipes struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newPipes() *pipes { return &pipes{conns: make(chan net.Conn), done: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.done) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.done:
	case <-ctx.Done():
	}
	return nil, errors.New("nobody listens")
}

// watched runs Watch in virtual time against the handler. It returns the lists with their times,
// and the error.
func watched(t *testing.T, length time.Duration, h http.HandlerFunc, values ...string) (lists []string, result error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		network := newPipes()
		srv := &http.Server{Handler: h, ErrorLog: quiet()}
		served := make(chan struct{})
		go func() { defer close(served); srv.Serve(network) }()
		defer func() { srv.Close(); <-served }()
		s := &source{dial: network.dial}
		must(t, s.Configure(settingsOf(append(values, "url=http://h/")...)))
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), length)
		defer cancel()
		result = s.Watch(ctx, func(hosts []plan.Host) {
			lists = append(lists, fmt.Sprintf("%v %s", time.Since(start), toText(hosts)))
			clear(hosts) // the callee owns the list
		})
		lists = append(lists, fmt.Sprintf("%v end", time.Since(start)))
	})
	return lists, result
}

func expect(t *testing.T, lists []string, err error, wantErr string, want ...string) {
	t.Helper()
	if !slices.Equal(lists, want) {
		t.Errorf("found %q\nwant  %q", lists, want)
	}
	if err == nil || !strings.Contains(err.Error(), wantErr) {
		t.Errorf("ended with %v, want %s", err, wantErr)
	}
}

func TestWatchPolls(t *testing.T) {
	answers := []string{`[{"name":"a"}]`, `[{"name":"a"}]`, `[{"name":"a"},{"name":"b"}]`, "304", `[]`, "500", `[]`}
	lists, err := watched(t, time.Hour, func(w http.ResponseWriter, r *http.Request) {
		answer := answers[0]
		answers = answers[1:]
		w.Header().Set("ETag", `"x"`)
		switch answer {
		case "304":
			w.WriteHeader(http.StatusNotModified)
		case "500":
			w.WriteHeader(http.StatusInternalServerError)
		default:
			io.WriteString(w, answer)
		}
	}, "interval=10s")
	expect(t, lists, err, "status 500", "0s a:1", "20s a:1, b:1", "40s ", "50s end")
}

func TestWatchEndsWithContext(t *testing.T) {
	lists, err := watched(t, 12*time.Second, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "[]") })
	expect(t, lists, err, context.DeadlineExceeded.Error(), "0s ", "12s end")
}

// say writes and flushes.
func say(w http.ResponseWriter, text string) {
	io.WriteString(w, text)
	w.(http.Flusher).Flush()
}

// after waits in virtual time. It returns false if the client disconnects first.
func after(r *http.Request, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-r.Context().Done():
		return false
	}
}

func TestWatchStream(t *testing.T) {
	session := 0
	lists, err := watched(t, time.Hour, func(w http.ResponseWriter, r *http.Request) {
		switch session++; session {
		case 1:
			say(w, `[{"name":"a"}]`+"\n")
			after(r, 3*time.Second)
			say(w, "\n"+`[{"name":"a"}]`+"\n"+`[{"name":"b"}]`+"\n")
			after(r, 30*time.Second) // then it ends, as servers do, and the client asks again
		case 2:
			say(w, `[{"name":"b"}]`+"\n")
			after(r, time.Second)
			say(w, `[{"name":"c"}]`+"\n") // at 34 s; then it ends early, and the client asks again after the interval
		case 3: // 38 s: silent for too long, so the client asks again
			say(w, `[{"name":"d"}]`+"\n")
			after(r, time.Hour)
		case 4: // 158 s: heartbeats keep it open
			say(w, `[{"name":"e"}]`+"\n")
			for range 9 {
				after(r, time.Minute)
				say(w, "\n")
			}
			say(w, "[1]\n")
		}
	}, "stream=true")
	expect(t, lists, err, "a host must be an object",
		"0s a:1", "3s b:1", "34s c:1", "38s d:1", "2m38s e:1", "11m38s end")
}

func TestWatchStreamFails(t *testing.T) {
	for _, c := range []struct {
		name, err, end string
		handler        http.HandlerFunc
	}{
		{"no document", "http: http://h/: the stream ended without a document", "0s end", func(w http.ResponseWriter, r *http.Request) { say(w, "\n\n") }},
		{"silent", "http: http://h/ sent no document in 10s", "10s end", func(w http.ResponseWriter, r *http.Request) { after(r, time.Hour) }},
		{"only heartbeats", "http: http://h/ sent no document in 10s", "10s end", func(w http.ResponseWriter, r *http.Request) {
			for after(r, time.Second) {
				say(w, "\n")
			}
		}},
		{"refused", "http: http://h/: status 404 (Not Found)", "0s end", http.NotFound},
		{"half a document", "http: http://h/: not JSON, at byte 14", "0s end", func(w http.ResponseWriter, r *http.Request) { say(w, `[{"name":"a"},`) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			lists, err := watched(t, time.Hour, c.handler, "stream=true")
			expect(t, lists, err, c.err, c.end)
		})
	}
}

// TestWatchStreamBreaks: a stream that breaks is an error, although it has sent documents.
func TestWatchStreamBreaks(t *testing.T) {
	lists, err := watched(t, time.Hour, func(w http.ResponseWriter, r *http.Request) {
		say(w, "[]\n")
		panic(http.ErrAbortHandler)
	}, "stream=true")
	expect(t, lists, err, "unexpected EOF", "0s ", "0s end")
}

func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

func gzipped(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := io.WriteString(w, text)
	must(t, err)
	must(t, w.Close())
	return b.Bytes()
}
