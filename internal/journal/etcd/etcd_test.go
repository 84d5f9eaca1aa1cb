package etcd

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hvdrun/hvdrun/internal/etcd"
	"github.com/hvdrun/hvdrun/test/etcdserver"
)

// server is a real etcd.
type server struct {
	*etcdserver.Server
	t *testing.T
}

// TestLeastLease: if the server becomes silent just after a renewal, a claim with the shortest
// lease lasts long enough to connect to another server, with a second to spare.
func TestLeastLease(t *testing.T) {
	left := LeastLease*4/5 - LeastLease/renewals
	if need := etcd.Silence + time.Second; left < need {
		t.Errorf("a claim of %v has %v for what takes %v", LeastLease, left, need)
	}
}

func newServer(t *testing.T) server {
	t.Helper()
	s, err := etcdserver.Start(t.Context(), t.TempDir(), "127.0.0.1")
	if errors.Is(err, etcdserver.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return server{s, t}
}

func quiet() logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func (s server) open(secret string, lease time.Duration) *Store {
	s.t.Helper()
	cfg, err := ParseURL("etcd://" + s.Endpoint + "/tests")
	if err != nil {
		s.t.Fatal(err)
	}
	cfg.Secret, cfg.Lease, cfg.Log = []byte(strings.Repeat(secret, 16)), lease, quiet()
	store, err := Open(s.t.Context(), cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = store.Close() })
	return store
}

func (s server) claim(store *Store) *Claim {
	s.t.Helper()
	c, err := store.Claim(s.t.Context(), "run", "here")
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func TestParseURL(t *testing.T) {
	for _, c := range []struct{ url, want, err string }{
		{"etcd://a", "[a:2379] /hvdrun", ""},
		{"etcd://a:1,b,[::1]:3/jobs/mine/", "[a:1 b:2379 [::1]:3] /jobs/mine", ""},
		{"etcd://a?ca=c.pem&cert=d.pem&key=e.pem", "[a:2379] /hvdrun c.pem d.pem e.pem", ""},
		{"etcd://", "", "names no host"},
		{"etcd://a,:1", "", "names no host"},
		{"http://a", "", `"http://a" is not etcd://HOST:PORT`},
		{"etcd://me:secret@a", "", "a password does not belong in a URL"},
		{"etcd://a?user=me", "", "user is not one of ca, cert and key"},
		{"etcd://a?cert=c", "", "cert and key belong together"},
		{"etcd://a?ca=", "", "ca is not one of"},
	} {
		cfg, err := ParseURL(c.url)
		got := strings.TrimSpace(fmt.Sprint(cfg.Endpoints, " ", cfg.Prefix, " ", cfg.CA, " ", cfg.Cert, " ", cfg.Key))
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: %v, want %q", c.url, err, c.err)
			}
			continue
		}
		if err != nil || got != c.want {
			t.Errorf("%s: %q, %v; want %q", c.url, got, err, c.want)
		}
	}
}

// TestCopy: what is written can be read, whatever its size, until it is replaced, but not without
// the key.
func TestCopy(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	store := s.open("k", 0)
	if _, err := store.Read(t.Context(), "run"); !errors.Is(err, ErrNoJob) {
		t.Errorf("a job that there is not: %v", err)
	}
	c := s.claim(store)
	want := Copy{Files: map[string][]byte{"a": []byte("first"), "b": {}}}
	sync := func() {
		t.Helper()
		if err := c.Sync(); err != nil {
			t.Fatal(err)
		}
		got, err := store.Read(t.Context(), "run")
		if err != nil {
			t.Fatal(err)
		}
		if !slices.EqualFunc(got.Records, want.Records, bytes.Equal) {
			t.Errorf("%d records read, %d written", len(got.Records), len(want.Records))
		}
		for name, value := range want.Files {
			if !bytes.Equal(got.Files[name], value) || len(got.Files) != len(want.Files) {
				t.Errorf("file %s is %q of %d files", name, got.Files[name], len(got.Files))
			}
		}
	}
	c.Replace(nil)
	c.Put("a", []byte("first"))
	c.Put("b", nil)
	sync()
	for _, size := range []int{1, 0, 100, chunkBytes, chunkBytes - 4, 3*chunkBytes + 1, 7} {
		r := random(size)
		want.Records = append(want.Records, r)
		c.Append(r)
	}
	sync()
	for i := range 500 {
		r := fmt.Appendf(nil, "record %d", i)
		want.Records = append(want.Records, r)
		c.Append(r)
	}
	c.Put("a", []byte("second"))
	want.Files["a"] = []byte("second")
	sync()
	want.Records = [][]byte{random(2 * chunkBytes), []byte("small")}
	c.Append([]byte("is replaced"))
	c.Replace(want.Records)
	c.Append([]byte("next"))
	want.Records = append(want.Records, []byte("next"))
	sync()
	if r, err := store.client.Get(t.Context(), store.names("run").journals(), clientv3.WithPrefix(), clientv3.WithCountOnly()); err != nil || r.Count != 4 {
		t.Errorf("%d parts of journals, %v; want the 4 of the last", r.Count, err)
	}

	c.SetBehind()
	if err := c.Sync(); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Read(t.Context(), "run"); !errors.Is(err, errBehind) {
		t.Errorf("a journal that lacks records: %v", err)
	}
	c.Replace(want.Records)
	sync()
	if _, err := s.open("other", 0).Read(t.Context(), "run"); !errors.Is(err, errKey) {
		t.Errorf("with another key: %v", err)
	}
	if runs, err := store.Jobs(t.Context()); err != nil || !slices.Equal(runs, []string{"run"}) {
		t.Errorf("jobs %v, %v", runs, err)
	}
	if err := c.Release(true); err != nil {
		t.Error(err)
	}
	if r, err := store.client.Get(t.Context(), "/", clientv3.WithPrefix(), clientv3.WithCountOnly()); err != nil || r.Count != 0 {
		t.Errorf("%d values are left of a job that has finished: %v", r.Count, err)
	}
}

// TestOneClaim: one driver has the claim, the next waits for its end, and what the first writes
// after that has no effect.
func TestOneClaim(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	store := s.open("k", 0)
	first := s.claim(store)
	first.Replace([][]byte{[]byte("kept")})
	if err := first.Sync(); err != nil {
		t.Fatal(err)
	}
	_, err := store.Claim(t.Context(), "run", "there")
	var held *HeldError
	if !errors.As(err, &held) || held.By != "here" {
		t.Fatalf("a second claim: %v", err)
	}
	waited := make(chan error, 1)
	go func() { waited <- store.Await(t.Context(), "run") }()
	if _, err := store.client.Revoke(t.Context(), first.lease); err != nil { // as if it had run out
		t.Fatal(err)
	}
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	second := s.claim(store)
	if second.Previous != first.ID || first.Previous != "" || second.ID == first.ID {
		t.Errorf("claims %q after %q, and %q after %q", first.ID, first.Previous, second.ID, second.Previous)
	}
	first.Append([]byte("too late"))
	first.Put("file", nil)
	if err := first.Sync(); !errors.Is(err, errLost) {
		t.Errorf("the first claim writes: %v", err)
	}
	<-first.Lost()
	got, err := store.Read(t.Context(), "run")
	if err != nil || len(got.Records) != 1 || len(got.Files) != 0 {
		t.Errorf("read %q, %v", got, err)
	}
	_ = first.Release(true) // its lease is gone
	second.Replace([][]byte{[]byte("1"), []byte("2")})
	if err := second.Sync(); err != nil {
		t.Error(err)
	}
	if err := second.Release(false); err != nil {
		t.Error(err)
	}
	if err := store.Await(t.Context(), "run"); err != nil {
		t.Error(err)
	}
	third := s.claim(store)
	if got, err := store.Read(t.Context(), "run"); err != nil || len(got.Records) != 2 || third.Previous != second.ID {
		t.Errorf("read %d records, %v, after %q", len(got.Records), err, third.Previous)
	}
	if err := third.Release(false); err != nil {
		t.Error(err)
	}
}

// TestMissingParts: a copy that lacks a part is refused, even if it is the last one.
func TestMissingParts(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	store := s.open("k", 0)
	c := s.claim(store)
	n := store.names("run")
	for parts := uint64(1); parts <= 3; parts++ {
		c.Replace([][]byte{[]byte("first")})
		for range parts - 1 {
			c.Append([]byte("more"))
			if err := c.Sync(); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Sync(); err != nil {
			t.Fatal(err)
		}
		for chunk := range parts {
			name := n.chunk(c.number, chunk)
			value, err := store.get(t.Context(), name)
			if err != nil || value == nil {
				t.Fatalf("%s: %v", name, err)
			}
			if _, err := store.client.Delete(t.Context(), name); err != nil {
				t.Fatal(err)
			}
			if got, err := store.Read(t.Context(), "run"); err == nil || !strings.Contains(err.Error(), name+" is missing") {
				t.Errorf("without part %d of %d: %d records, %v", chunk, parts, len(got.Records), err)
			}
			if _, err := store.client.Put(t.Context(), name, string(value)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := c.Release(true); err != nil {
		t.Error(err)
	}
}

// TestClaimOfTheSameRevision: an etcd that was restored from a backup repeats revisions; a claim at
// the same revision is still a different one.
func TestClaimOfTheSameRevision(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	store := s.open("k", 0)
	c := s.claim(store)
	name := store.names("run").driver()
	before, err := store.client.Get(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	after, err := store.client.Put(t.Context(), name, store.sealed(name, []byte("here")), clientv3.WithPrevKV())
	if err != nil || after.PrevKv.CreateRevision != before.Kvs[0].CreateRevision {
		t.Fatalf("the same revision cannot be made: %v", err)
	}
	c.Append([]byte("too late"))
	if err := c.Sync(); !errors.Is(err, errLost) {
		t.Errorf("a claim writes under another: %v", err)
	}
	_ = c.Release(false) // its lease has gone with the value
}

// warned receives the warnings of a log.
type warned chan string

func (warned) Levels() []logrus.Level { return []logrus.Level{logrus.WarnLevel} }

func (w warned) Fire(e *logrus.Entry) error {
	select {
	case w <- e.Message:
	default:
	}
	return nil
}

// warned returns a channel that receives the store's warnings.
func (s *Store) warned() warned {
	w := make(warned, 1)
	log := logrus.New()
	log.SetOutput(io.Discard)
	log.AddHook(w)
	s.cfg.Log = log
	return w
}

// TestEtcdIsAway: what is written while etcd is down is stored once it is up again, and the claim
// remains.
func TestEtcdIsAway(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	store := s.open("k", 0)
	noticed := store.warned()
	c := s.claim(store)
	c.Replace(nil)
	if err := c.Sync(); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	c.Append([]byte("meanwhile"))
	<-noticed
	if c.State() == "" {
		t.Error("the state does not tell that etcd is away")
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Sync(); err != nil {
		t.Fatal(err)
	}
	if got, err := store.Read(t.Context(), "run"); err != nil || len(got.Records) != 1 || c.State() != "" {
		t.Errorf("read %q, %v, %s", got.Records, err, c.State())
	}
	select {
	case <-c.Lost():
		t.Error("the claim is lost")
	default:
	}
	if err := c.Release(true); err != nil {
		t.Error(err)
	}
}

// TestEtcdIsGone: a driver that cannot reach etcd stops.
func TestEtcdIsGone(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	c := s.claim(s.open("k", LeastLease))
	if err := s.Suspend(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	c.Append([]byte("x"))
	if err := c.Sync(); !errors.Is(err, errLost) {
		t.Errorf("what etcd has not answered is written: %v", err)
	}
	<-c.Lost()
	t.Logf("the claim ended after %v, its lease is %v", time.Since(began), LeastLease)
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	_ = c.Release(false) // the lease may be gone
}

// TestEtcdIsFull: a driver whose records etcd permanently refuses gives the reason and stops,
// although etcd renews its lease.
func TestEtcdIsFull(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	store := s.open("k", LeastLease)
	log, hook := logtest.NewNullLogger()
	store.cfg.Log = log
	c := s.claim(store)
	full := &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, Alarm: pb.AlarmType_NOSPACE}
	if _, err := pb.NewMaintenanceClient(store.client.ActiveConnection()).Alarm(t.Context(), full); err != nil {
		t.Fatal(err)
	}
	c.Append([]byte("x"))
	if err := c.Sync(); !errors.Is(err, errLost) {
		t.Errorf("what etcd has refused is written: %v", err)
	}
	<-c.Lost()
	last := hook.LastEntry()
	if why, _ := last.Data[logrus.ErrorKey].(error); !errors.Is(why, rpctypes.ErrNoSpace) || !strings.Contains(last.Message, "has not taken a write") {
		t.Errorf("the log ends with %q: %v", last.Message, why)
	}
	if state := c.State(); !strings.Contains(state, rpctypes.ErrNoSpace.Error()) {
		t.Errorf("the state is %q", state)
	}
	if err := c.Release(false); err != nil {
		t.Error(err)
	}
}

// TestReplacedTwice: of several replacements that wait for etcd, only the last one is written, so
// that a driver that dies meanwhile does not leave an empty journal that counts.
func TestReplacedTwice(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	store := s.open("k", 0)
	noticed := store.warned()
	c := s.claim(store)
	c.Replace([][]byte{[]byte("kept")})
	if err := c.Sync(); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	c.Append([]byte("is being written"))
	<-noticed
	c.Replace([][]byte{[]byte("first")})
	c.Put("file", nil)
	c.Replace([][]byte{[]byte("second")})
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Sync(); err != nil {
		t.Fatal(err)
	}
	got, err := store.Read(t.Context(), "run")
	if err != nil || len(got.Records) != 1 || string(got.Records[0]) != "second" || len(got.Files) != 1 {
		t.Errorf("read %q and %d files, %v", got.Records, len(got.Files), err)
	}
	if c.number != 2 {
		t.Errorf("journal %d is the last of two that were to be written", c.number)
	}
	if err := c.Release(true); err != nil {
		t.Error(err)
	}
}

func TestOpenFails(t *testing.T) {
	cfg, err := ParseURL("etcd://127.0.0.1:1") // nothing listens there
	if err != nil {
		t.Fatal(err)
	}
	cfg.Log = quiet()
	if _, err := Open(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "a key of 0 bytes") {
		t.Errorf("without a key: %v", err)
	}
	cfg.Secret, cfg.Lease = make([]byte, 32), time.Second
	if _, err := Open(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "a lease of 1s") {
		t.Errorf("a short lease: %v", err)
	}
	cfg.Lease = 0
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Open(ctx, cfg); err == nil || !strings.Contains(err.Error(), cfg.Endpoints[0]) {
		t.Errorf("nobody listens: %v", err)
	}
}
