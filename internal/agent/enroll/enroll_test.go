package enroll

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/wire/enrollpb"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(sandbox.Tests{M: m}) }

func quiet() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

// served is a cluster with a registrar on loopback.
type served struct {
	t    *testing.T
	dir  *cluster.Dir
	path string
	addr string
}

// serve serves a new cluster until the test ends.
func serve(t *testing.T, s Server) served {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cluster")
	dir, err := cluster.Init(path, cluster.Grant{Expires: time.Now().Add(time.Hour), Reusable: true}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ln, err := identity.Enrollment.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.Dir, s.AgentLife, s.Pause = dir, cmp.Or(s.AgentLife, DefaultAgentLife), cmp.Or(s.Pause, DefaultPause)
	if s.Log == nil {
		s.Log = quiet()
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return served{t, dir, path, ln.Addr().String()}
}

// token creates a token and returns its file.
func (s served) token(g cluster.Grant) string {
	s.t.Helper()
	file := filepath.Join(s.t.TempDir(), "token")
	token, err := s.dir.NewToken(g, time.Now())
	if err != nil {
		s.t.Fatal(err)
	}
	if err := token.WriteFile(file); err != nil {
		s.t.Fatal(err)
	}
	return file
}

func (s served) config(host, token string) Config {
	return Config{Addr: s.addr, TokenFile: token, Host: host, Dir: filepath.Join(s.t.TempDir(), "state"), Log: quiet()}
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithDeadline(context.Background(), sandbox.Limit())
	t.Cleanup(cancel)
	return ctx
}

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := sandbox.Limit(); !is(); {
		if time.Now().After(end) {
			t.Fatalf("it is not so that %s", what)
		}
		<-time.After(5 * time.Millisecond)
	}
}

func TestJoin(t *testing.T) {
	s := serve(t, Server{})
	hour := time.Now().Add(time.Hour)
	cfg := s.config("a", s.token(cluster.Grant{Expires: hour}))
	m, err := Join(within(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if who := m.Credentials().Subject(); who != (identity.Subject{Role: identity.Agent, Host: "a"}) {
		t.Errorf("it is %+v", who)
	}
	state, err := s.dir.View()
	if err != nil || len(m.Keys()) != 1 || !bytes.Equal(m.Keys()[0], state.Ring.Keys[0]) {
		t.Errorf("%d keys, %v", len(m.Keys()), err)
	}
	files, err := os.ReadDir(cfg.Dir)
	if err != nil || len(files) != 2 {
		t.Errorf("%v, %v", files, err)
	}
	for _, f := range files {
		if fi, err := f.Info(); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f.Name(), fi.Mode(), err)
		}
	}
	// An agent that is started again does not need a token.
	cfg.TokenFile = ""
	again, err := Join(within(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	_, first := m.Credentials().Valid()
	if _, now := again.Credentials().Valid(); !now.Equal(first) {
		t.Error("another certificate was made")
	}
	cfg.Addr = "127.0.0.1:1" // it does not need the registrar either
	if _, err := Join(within(t), cfg); err != nil {
		t.Error(err)
	}
	cfg.Host = "b"
	if _, err := Join(within(t), cfg); err == nil || !strings.Contains(err.Error(), `is of agent a, and this is host "b": a token is needed`) {
		t.Errorf("another host with the folder of the first: %v", err)
	}
	if err := os.Chmod(cfg.Dir, 0o750); err != nil {
		t.Fatal(err)
	}
	if _, err := Join(within(t), cfg); err == nil || !strings.Contains(err.Error(), "chmod 700") {
		t.Errorf("a folder that others can read: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	s, other := serve(t, Server{}), serve(t, Server{})
	hour := time.Now().Add(time.Hour)
	used := s.token(cluster.Grant{Expires: hour})
	if _, err := Join(within(t), s.config("first", used)); err != nil {
		t.Fatal(err)
	}
	garbage := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(garbage, []byte("hunter2"), 0o600); err != nil {
		t.Fatal(err)
	}
	unknown := s.token(cluster.Grant{Expires: hour})
	err := s.dir.Update(func(st *cluster.State) error { st.Tokens = st.Tokens[:len(st.Tokens)-1]; return nil })
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ token, err string }{
		"used":              {used, `was used by host "first"`},
		"expired":           {s.token(cluster.Grant{Expires: time.Now().Add(-time.Minute)}), "expired at"},
		"another host's":    {s.token(cluster.Grant{Expires: hour, Hosts: "node*"}), `pattern "node*"`},
		"another cluster's": {other.token(cluster.Grant{Expires: hour}), "not of its cluster"},
		"unknown":           {unknown, "not of its cluster"},
		"garbage":           {garbage, "is not a token"},
		"none":              {"", "a token is needed"},
		"missing":           {filepath.Join(t.TempDir(), "none"), "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := s.config("a", tt.token)
			if _, err := Join(within(t), cfg); err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("got %v, want %q", err, tt.err)
			}
			if left, err := os.ReadDir(cfg.Dir); err != nil || len(left) > 0 {
				t.Errorf("%v, %v are left", left, err)
			}
		})
	}
}

// TestAgentsAskForThemselves: an agent gets certificates for its own host only, whatever it
// requests.
func TestAgentsAskForThemselves(t *testing.T) {
	s := serve(t, Server{})
	m, err := Join(within(t), s.config("a", s.token(cluster.Grant{Expires: time.Now().Add(time.Hour)})))
	if err != nil {
		t.Fatal(err)
	}
	key, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	request, err := identity.NewRequest(key)
	if err != nil {
		t.Fatal(err)
	}
	as := m.Credentials().ClientTLS(identity.Subject{Role: identity.Registrar})
	if _, err := ask(within(t), s.addr, as, &enrollpb.EnrollRequest{Host: "b", Request: request}); !errors.Is(err, errRefused) {
		t.Errorf("it became another host: %v", err)
	}
	if _, err := ask(within(t), s.addr, as, &enrollpb.EnrollRequest{Host: "a", Request: make([]byte, 100)}); !errors.Is(err, errRefused) {
		t.Errorf("an invalid request: %v", err)
	}
	if err := s.dir.Update(func(st *cluster.State) error { return st.Remove("a") }); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(within(t), s.addr, as, &enrollpb.EnrollRequest{Host: "a"}); !errors.Is(err, errRefused) || !strings.Contains(err.Error(), "removed") {
		t.Errorf("a host that was removed: %v", err)
	}
	back, err := Join(within(t), s.config("a", s.token(cluster.Grant{Expires: time.Now().Add(time.Hour)})))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := back.refresh(within(t), nil, time.Now()); err != nil {
		t.Errorf("it is back with another token: %v", err)
	}
}

// TestRemovedHostHasToken: the agent of a removed host, which still has its folder, joins again if
// it has a valid token. Otherwise it continues with the contents of its folder.
func TestRemovedHostHasToken(t *testing.T) {
	s := serve(t, Server{})
	once := s.token(cluster.Grant{Expires: time.Now().Add(time.Hour)})
	cfg := s.config("a", once)
	if _, err := Join(within(t), cfg); err != nil {
		t.Fatal(err)
	}
	removed := func() bool {
		state, err := s.dir.View()
		if err != nil {
			t.Fatal(err)
		}
		return state.Hosts["a"].Removed
	}
	if err := s.dir.Update(func(st *cluster.State) error { return st.Remove("a") }); err != nil {
		t.Fatal(err)
	}
	if _, err := Join(within(t), cfg); err != nil || !removed() {
		t.Errorf("with a token that was used: %v, removed %v", err, removed())
	}
	cfg.TokenFile = s.token(cluster.Grant{Expires: time.Now().Add(time.Hour)})
	m, err := Join(within(t), cfg)
	if err != nil || removed() {
		t.Fatalf("with a new token: %v, removed %v", err, removed())
	}
	if _, err := m.refresh(within(t), nil, time.Now()); err != nil {
		t.Error(err)
	}
}

func TestDue(t *testing.T) {
	from := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	until := from.Add(6 * time.Hour)
	for _, tt := range []struct {
		age         time.Duration
		renew, late bool
	}{
		{-time.Hour, false, false}, {0, false, false}, {2 * time.Hour, false, false}, {2*time.Hour + 1, true, false},
		{3 * time.Hour, true, false}, {3*time.Hour + 1, true, true}, {7 * time.Hour, true, true},
	} {
		if renew, late := due(from, until, from.Add(tt.age)); renew != tt.renew || late != tt.late {
			t.Errorf("at %v: renew %v, late %v", tt.age, renew, late)
		}
	}
}

// follower follows a membership until the test ends.
type follower struct {
	mu   sync.Mutex
	keys [][]byte
}

func follow(t *testing.T, m *Membership) *follower {
	f := &follower{keys: m.Keys()}
	ctx, cancel := context.WithCancel(context.Background())
	var following sync.WaitGroup
	following.Go(func() {
		m.Follow(ctx, func() map[string]uint32 { return map[string]uint32{"run": 2} }, func(keys [][]byte) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.keys = keys
			return nil
		})
	})
	t.Cleanup(func() {
		cancel()
		following.Wait()
	})
	return f
}

func (f *follower) primary() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return string(f.keys[0])
}

// TestRenewal: a short-lived certificate is renewed repeatedly, in memory and in the folder.
func TestRenewal(t *testing.T) {
	s := serve(t, Server{AgentLife: time.Minute, Pause: leastPause})
	cfg := s.config("a", s.token(cluster.Grant{Expires: time.Now().Add(time.Hour)}))
	m, err := Join(within(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	_, before := m.Credentials().Valid()
	if _, err := m.refresh(within(t), nil, time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, now := m.Credentials().Valid(); !now.Equal(before) {
		t.Error("renewed at once")
	}
	kept, err := os.ReadFile(m.file(credentialsFile))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.refresh(within(t), nil, time.Now().Add(30*time.Second)); err != nil {
		t.Fatal(err)
	}
	now, err := os.ReadFile(m.file(credentialsFile))
	if err != nil || bytes.Equal(now, kept) {
		t.Errorf("the folder has the old certificate: %v", err)
	}
	again := &Membership{cfg: cfg}
	if err := again.load(time.Now()); err != nil {
		t.Error(err)
	}
	if err := again.load(time.Now().Add(2 * time.Minute)); err == nil || !strings.Contains(err.Error(), "ended at") {
		t.Errorf("long after: %v", err)
	}
}

// TestRotation: the gossip key is replaced while agents follow the membership, and an agent that
// joins meanwhile follows too.
func TestRotation(t *testing.T) {
	s := serve(t, Server{Pause: leastPause})
	token := filepath.Join(s.path, cluster.TokenFile)
	join := func(host string) *follower {
		m, err := Join(within(t), s.config(host, token))
		if err != nil {
			t.Fatal(err)
		}
		return follow(t, m)
	}
	all := []*follower{join("a"), join("b")}
	old := all[0].primary()
	if err := s.dir.Update(func(st *cluster.State) error { st.BeginRotation(time.Now()); return nil }); err != nil {
		t.Fatal(err)
	}
	all = append(all, join("c"))
	until(t, "the rotation ends", func() bool {
		stable := false
		err := s.dir.Update(func(st *cluster.State) error {
			st.AdvanceRotation(time.Now(), 0)
			stable = st.Ring.Phase == cluster.Stable
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return stable
	})
	state, err := s.dir.View()
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range all {
		f.mu.Lock()
		if len(f.keys) != 1 || !bytes.Equal(f.keys[0], state.Ring.Keys[0]) || string(f.keys[0]) == old {
			t.Errorf("agent %d has %d keys", i, len(f.keys))
		}
		f.mu.Unlock()
	}
}

// TestRegistrarIsAway: an agent that cannot reach the registrar keeps its certificate, and warns
// when it will soon expire.
func TestRegistrarIsAway(t *testing.T) {
	ctx, cancel := context.WithCancel(within(t))
	s := serve(t, Server{})
	cfg := s.config("a", s.token(cluster.Grant{Expires: time.Now().Add(time.Hour)}))
	m, err := Join(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	log := logrus.New()
	log.SetOutput(&text)
	m.cfg.Log = log
	from, until := m.Credentials().Valid()
	failed := errors.New("nobody there")
	third, late := from.Add(until.Sub(from)*2/5), from.Add(until.Sub(from)*3/5)
	if warned := m.complain(failed, time.Time{}, third); !warned.IsZero() || text.Len() > 0 {
		t.Errorf("too early: %s", text.String())
	}
	warned := m.complain(failed, time.Time{}, late)
	m.complain(failed, warned, late.Add(time.Second))
	if n := strings.Count(text.String(), "cannot be renewed"); n != 1 {
		t.Errorf("%d warnings: %s", n, text.String())
	}
	// If no registrar answers the first enrollment, the agent retries until it is stopped.
	away := s.config("b", filepath.Join(s.path, cluster.TokenFile))
	away.Addr = "127.0.0.1:1"
	away.Log = logrus.New()
	away.Log.(*logrus.Logger).SetOutput(writer(func(b []byte) { cancel() }))
	if _, err := Join(ctx, away); !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
}

type writer func([]byte)

func (w writer) Write(b []byte) (int, error) { w(b); return len(b), nil }

// TestSeen: the folder records when each host's agent made its last request, which slots are used
// there, and how far its clock is ahead, and forgets hosts that are no longer known. Of a host that
// reports too much, only the time is recorded.
func TestSeen(t *testing.T) {
	s := serve(t, Server{Pause: leastPause})
	if seen, err := s.dir.Seen(); err != nil || len(seen) > 0 {
		t.Fatalf("%v, %v", seen, err)
	}
	token := s.token(cluster.Grant{Expires: time.Now().Add(time.Hour), Reusable: true})
	begin := time.Now()
	for _, host := range []string{"a", "b"} {
		m, err := Join(within(t), s.config(host, token))
		if err != nil {
			t.Fatal(err)
		}
		follow(t, m)
	}
	var seen map[string]cluster.Seen
	until(t, "both hosts are seen", func() bool {
		var err error
		if seen, err = s.dir.Seen(); err != nil {
			t.Fatal(err)
		}
		return len(seen) == 2
	})
	for host, at := range seen {
		if at.At.Before(begin) || at.Used["run"] != 2 || len(at.Used) != 1 || at.Ahead == nil || at.Ahead.Abs() > cluster.ClocksApart {
			t.Errorf("%s: %+v", host, at)
		}
	}
	many := map[string]uint32{}
	for i := range mostRuns + 1 {
		many[fmt.Sprint(i)] = 1
	}
	r := &registrar{Server: Server{Dir: s.dir, Pause: leastPause, Log: quiet()}, seen: map[string]cluster.Seen{"unknown": {}}}
	r.see(&enrollpb.EnrollRequest{Host: "c", Used: many}, begin)
	if err := s.dir.Update(func(state *cluster.State) error {
		state.Issued("c", begin.Add(time.Hour), begin)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	r.see(&enrollpb.EnrollRequest{Host: "c", Used: many}, begin.Add(time.Hour))
	if seen, err := s.dir.Seen(); err != nil || len(seen) != 3 || seen["c"].At.IsZero() || seen["c"].Used != nil {
		t.Errorf("%v, %v", seen, err)
	}
}

// TestClock: the folder records how far a host's clock is ahead. The log warns once if it is far
// from the registrar's, and again when the difference has changed.
func TestClock(t *testing.T) {
	s := serve(t, Server{})
	now := time.Now()
	if err := s.dir.Update(func(state *cluster.State) error { state.Issued("a", now.Add(time.Hour), now); return nil }); err != nil {
		t.Fatal(err)
	}
	log, hook := logtest.NewNullLogger()
	r := &registrar{Server: Server{Dir: s.dir, Log: log}, seen: map[string]cluster.Seen{}, warned: map[string]time.Duration{}}
	for i, c := range []struct {
		ahead time.Duration
		want  string // empty: no warning
	}{
		{time.Second, ""},
		{-62 * time.Minute, `enroll: the clock of host "a" is 1h2m0s behind that of this machine`},
		{-62*time.Minute + time.Second, ""},
		{2 * time.Minute, `enroll: the clock of host "a" is 2m0s ahead of that of this machine`},
		{0, ""},
		{2 * time.Minute, `enroll: the clock of host "a" is 2m0s ahead of that of this machine`},
	} {
		hook.Reset()
		r.see(&enrollpb.EnrollRequest{Host: "a", UnixNano: now.Add(c.ahead).UnixNano()}, now)
		if seen, err := s.dir.Seen(); err != nil || seen["a"].Ahead == nil || *seen["a"].Ahead != c.ahead {
			t.Errorf("%d: %v, %+v", i, err, seen["a"])
		}
		said := ""
		if last := hook.LastEntry(); last != nil {
			said = last.Message
		}
		if said != c.want || len(hook.AllEntries()) > 1 {
			t.Errorf("%d: the log says %q, want %q", i, said, c.want)
		}
	}
	r.see(&enrollpb.EnrollRequest{Host: "a"}, now)
	if seen, err := s.dir.Seen(); err != nil || seen["a"].Ahead != nil {
		t.Errorf("the clock of an agent that does not tell it is known: %v, %+v", err, seen["a"])
	}
}

// TestRation: one applicant cannot keep the registrar busy with certificates.
func TestRation(t *testing.T) {
	r := &registrar{Server: Server{Log: quiet()}, recent: map[string]int{}}
	now := time.Now()
	agent := identity.Applicant{Agent: identity.Subject{Role: identity.Agent, Host: "a"}}
	for range mostCertificates {
		if err := r.ration(agent, now); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.ration(agent, now); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more: %v", err)
	}
	if err := r.ration(identity.Applicant{Token: make(ed25519.PublicKey, ed25519.PublicKeySize)}, now); err != nil {
		t.Errorf("another: %v", err)
	}
	if err := r.ration(agent, now.Add(certificateWindow+1)); err != nil {
		t.Errorf("later: %v", err)
	}
}
