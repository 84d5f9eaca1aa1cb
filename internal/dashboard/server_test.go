package dashboard_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/internal/dashboard/dashboardtest"
	"github.com/hvdrun/hvdrun/job"
)

// site is a served page and a browser that has no token yet.
type site struct {
	t      *testing.T
	url    string
	tokens dashboard.Tokens
	client *http.Client
	landed string // the page that the token led to
}

func newSite(t *testing.T, j *dashboardtest.Job) *site {
	t.Helper()
	tokens := dashboard.NewTokens()
	server, err := dashboard.Listen(dashboard.Config{
		Job: dashboard.Job{Source: j, Recorded: j.Events}, Listen: "127.0.0.1:0", Tokens: tokens, Interval: 10 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx) }()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t, strings.TrimSuffix(server.URL(), "/"), tokens, &http.Client{Jar: jar}, ""}
	t.Cleanup(func() {
		s.client.CloseIdleConnections()
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return s
}

// ask sends a request and returns its status and body.
func (s *site) ask(method, path, body string, headers ...string) (int, string, http.Header) {
	s.t.Helper()
	r, err := http.NewRequest(method, s.url+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
		if headers[i] == "Host" {
			r.Host = headers[i+1]
		}
	}
	answer, err := s.client.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return answer.StatusCode, string(text), answer.Header
}

func (s *site) enter(token string) {
	s.t.Helper()
	status, text, header := s.ask("GET", "/?token="+token, "")
	cookie := header.Get("Set-Cookie")
	s.landed = text
	if strings.Contains(cookie, token) {
		s.t.Errorf("the cookie, which goes to all ports of the host, has the token: %q", cookie)
	}
	if status != 200 || !strings.Contains(cookie, "HttpOnly") || !strings.Contains(cookie, "SameSite=Strict") {
		s.t.Fatalf("status %d, cookie %q", status, cookie)
	}
}

// proof returns the proof that the page sends with commands.
func (s *site) proof() string {
	s.t.Helper()
	_, rest, _ := strings.Cut(s.landed, "#steer=")
	proof, _, _ := strings.Cut(rest, `"`)
	_, text, _ := s.ask("GET", "/api/rights", "", "X-Hvdrun-Proof", proof)
	var r struct{ Write bool }
	if err := json.Unmarshal([]byte(text), &r); err != nil || r.Write != (proof != "") {
		s.t.Errorf("with the proof %q: %s, %v", proof, text, err)
	}
	return proof
}

// TestCookieAlone: the cookie, which browsers send to every port of the host, and to whatever has
// the page's port later, does not permit steering, and is of no use to the next server.
func TestCookieAlone(t *testing.T) {
	j := dashboardtest.Story()
	s := newSite(t, j)
	s.enter(s.tokens.Write)
	_, text, _ := s.ask("GET", "/api/rights", "")
	if strings.Contains(text, "true") || strings.Contains(text, s.proof()) {
		t.Errorf("the cookie alone has the rights %s", text)
	}
	for _, proof := range []string{"", s.tokens.Write, s.tokens.Read} {
		if status, _, _ := s.ask("POST", "/api/command", `{"verb":"stop"}`, "Content-Type", "application/json", "X-Hvdrun-Proof", proof); status != 403 {
			t.Errorf("a command with the cookie and %q: status %d", proof, status)
		}
	}
	next := newSite(t, j)
	from, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range s.client.Jar.Cookies(from) {
		_, port, _ := strings.Cut(strings.TrimPrefix(next.url, "http://"), ":")
		if status, _, _ := next.ask("GET", "/api/view", "", "Cookie", "hvdrun-"+port+"="+c.Value); status != 401 {
			t.Errorf("a cookie of the server before: status %d", status)
		}
	}
	if n := len(j.Commands()); n != 0 {
		t.Errorf("%d commands", n)
	}
}

// TestConnectionsAreBounded: a viewer can have a bounded number of connections.
func TestConnectionsAreBounded(t *testing.T) {
	s := newSite(t, dashboardtest.Story())
	s.enter(s.tokens.Read)
	from, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}
	cookie := s.client.Jar.Cookies(from)[0]
	s.client.CloseIdleConnections()
	const most = 128
	refused := 0
	for range most + 10 {
		conn, err := net.Dial("tcp", from.Host)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := fmt.Fprintf(conn, "GET /api/view HTTP/1.1\r\nHost: %s\r\nCookie: %s\r\n\r\n", from.Host, cookie); err != nil {
			t.Fatal(err)
		}
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		if answer.StatusCode == 503 {
			refused++
		}
	}
	if refused < 10 {
		t.Errorf("%d of %d connections are refused, at most %d are kept", refused, most+10, most)
	}
}

// TestTokens: without a token nothing about the job is served, and a token for watching does not
// permit steering.
func TestTokens(t *testing.T) {
	j := dashboardtest.Story()
	s := newSite(t, j)
	for _, path := range []string{"/", "/app.js", "/api/view", "/api/stream", "/api/rights", "/api/output?rank=0&stream=stdout", "/?token=wrong"} {
		if status, text, _ := s.ask("GET", path, ""); status != 401 || strings.Contains(text, "gpu-a1") {
			t.Errorf("%s: status %d, %s", path, status, text)
		}
	}
	if status, text, _ := s.ask("GET", "/favicon.ico", ""); status != 200 || !strings.Contains(text, "<svg") {
		t.Errorf("the icon that browsers ask for: %d", status)
	}
	s.enter(s.tokens.Read)
	if status, text, _ := s.ask("GET", "/api/view", ""); status != 200 || !strings.Contains(text, "gpu-a1") {
		t.Errorf("status %d, %s", status, text)
	}
	if s.proof() != "" {
		t.Error("a token for watching gets the proof for commands")
	}
	if status, _, _ := s.ask("POST", "/api/command", `{"verb":"stop"}`, "Content-Type", "application/json"); status != 403 {
		t.Errorf("a command of one who watches: status %d", status)
	}
	if n := len(j.Commands()); n != 0 {
		t.Errorf("%d commands", n)
	}
}

// TestCommands: a command requires the token, the proof and the page's own origin, and is then
// carried out.
func TestCommands(t *testing.T) {
	j := dashboardtest.Story()
	s := newSite(t, j)
	s.enter(s.tokens.Write)
	proof := s.proof()
	const drain = `{"verb":"drain","host":"gpu-a1","slot":3}`
	for _, c := range []struct {
		name, body string
		headers    []string
		status     int
	}{
		{"no proof", drain, []string{"Content-Type", "application/json"}, 403},
		{"a false proof", drain, []string{"Content-Type", "application/json", "X-Hvdrun-Proof", "x"}, 403},
		{"another site", drain, []string{"Content-Type", "application/json", "X-Hvdrun-Proof", proof, "Sec-Fetch-Site", "cross-site"}, 403},
		{"another origin", drain, []string{"Content-Type", "application/json", "X-Hvdrun-Proof", proof, "Origin", "http://evil.example"}, 403},
		{"a form", drain, []string{"Content-Type", "text/plain", "X-Hvdrun-Proof", proof}, 415},
		{"no JSON", "{", []string{"Content-Type", "application/json", "X-Hvdrun-Proof", proof}, 400},
		{"an unknown field", `{"verb":"stop","by":"root"}`, []string{"Content-Type", "application/json", "X-Hvdrun-Proof", proof}, 400},
		{"no host", `{"verb":"drain"}`, []string{"Content-Type", "application/json", "X-Hvdrun-Proof", proof}, 400},
		{"too long", `{"verb":"drain","host":"` + strings.Repeat("a", 8192) + `"}`, []string{"Content-Type", "application/json", "X-Hvdrun-Proof", proof}, 400},
	} {
		if status, text, _ := s.ask("POST", "/api/command", c.body, c.headers...); status != c.status {
			t.Errorf("%s: status %d, want %d: %s", c.name, status, c.status, text)
		}
	}
	if n := len(j.Commands()); n != 0 {
		t.Fatalf("%d commands were carried out", n)
	}
	good := []string{"Content-Type", "application/json", "X-Hvdrun-Proof", proof, "Origin", s.url, "Sec-Fetch-Site", "same-origin"}
	if status, text, _ := s.ask("POST", "/api/command", drain, good...); status != 200 {
		t.Fatalf("status %d: %s", status, text)
	}
	if got := j.Commands(); len(got) != 1 || got[0].Verb != job.Drain || got[0].Host != "gpu-a1" || *got[0].Slot != 3 {
		t.Errorf("commands: %+v", got)
	}
	j.Refuse("fewer than --min-np slots would be left")
	if status, text, _ := s.ask("POST", "/api/command", drain, good...); status != 409 || !strings.Contains(text, "fewer than") {
		t.Errorf("a refusal: status %d: %s", status, text)
	}
}

// TestHostsAndHeaders: the page is not served under a foreign host name, and runs no foreign
// scripts.
func TestHostsAndHeaders(t *testing.T) {
	s := newSite(t, dashboardtest.Story())
	s.enter(s.tokens.Write)
	for host, want := range map[string]int{"evil.example": 421, "localhost:9000": 200, "127.0.0.1": 200, "10.0.0.1": 421, "[::1]:80": 200, "localhost.evil.example": 421} {
		if status, _, _ := s.ask("GET", "/app.css", "", "Host", host); status != want {
			t.Errorf("%s: status %d, want %d", host, status, want)
		}
	}
	_, text, header := s.ask("GET", "/", "")
	policy := header.Get("Content-Security-Policy")
	if strings.Contains(policy, "unsafe") || !strings.Contains(policy, "default-src 'none'") || !strings.Contains(policy, "frame-ancestors 'none'") {
		t.Errorf("policy: %s", policy)
	}
	if strings.Contains(text, "<script>") || strings.Contains(text, " onclick=") || strings.Contains(text, " style=") || strings.Contains(text, "http://") {
		t.Error("the page has inline scripts or styles, or names another host")
	}
}

// TestStream: a stream begins with the complete state and continues with the changes; so does that
// of a client that reconnects.
func TestStream(t *testing.T) {
	j := dashboardtest.Story()
	s := newSite(t, j)
	s.enter(s.tokens.Read)
	read := func(until func(name, data string) bool) {
		t.Helper()
		r, err := http.NewRequest("GET", s.url+"/api/stream", nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := s.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		lines := bufio.NewScanner(answer.Body)
		lines.Buffer(nil, 8<<20)
		name := ""
		for lines.Scan() {
			key, value, _ := strings.Cut(lines.Text(), ": ")
			switch key {
			case "event":
				name = value
			case "data":
				if until(name, value) {
					return
				}
			}
		}
		t.Fatalf("the stream has ended: %v", lines.Err())
	}
	for round := range 2 {
		failure := fmt.Sprintf("the source has failed %d times", round+1)
		want := "full"
		read(func(name, data string) bool {
			if name != want {
				t.Errorf("round %d: %s, want %s", round, name, want)
			}
			if want == "full" {
				if !strings.Contains(data, `"gpu-b2"`) || strings.Count(data, "the source has failed") != round {
					t.Errorf("round %d: it does not begin with all that is known", round)
				}
				j.Tell(time.Now(), job.DiscoveryFailed, "error", failure+"<script>alert(1)</script>")
			}
			if strings.Contains(data, "<script>") {
				t.Error("markup is not escaped")
			}
			want = "patch"
			return strings.Contains(data, failure)
		})
	}
}

// TestHistory: the view contains the story's generations and their causes.
func TestHistory(t *testing.T) {
	j := dashboardtest.Story()
	f := dashboard.NewFeed(dashboard.Job{Source: j, Recorded: j.Events})
	defer f.Close()
	v := f.Look(t.Context(), time.Now())
	var kinds []string
	for _, w := range v.Worlds {
		kinds = append(kinds, string(w.Kind))
	}
	if got := strings.Join(kinds, " "); got != "start grown failure grown drained stall grown failure grown" {
		t.Errorf("generations by cause: %s", got)
	}
	if got, want := v.Worlds[3].Lost, 0.15; math.Abs(got-want) > 1e-9 {
		t.Errorf("generation 4 took %g s, as the driver says %g", got, want)
	}
	if v.Status.Goodput.Seconds == 0 {
		t.Error("the view lacks what the driver says of the job's time")
	}
}
