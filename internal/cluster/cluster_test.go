package cluster

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

var begin = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)

func newDir(t testing.TB) *Dir {
	t.Helper()
	d, err := Init(filepath.Join(t.TempDir(), "c"), Grant{Expires: begin.Add(time.Hour), Reusable: true}, begin)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func keyHash(n byte) [sha256.Size]byte { return sha256.Sum256([]byte{n}) }

func TestTokenText(t *testing.T) {
	good := newToken(keyHash(1))
	text := good.Encode()
	back, err := parseToken("\n" + text + " \n")
	if err != nil || !back.Key().Equal(good.Key()) || back.Authority() != good.Authority() {
		t.Fatalf("%v", err)
	}
	for _, bad := range []string{"", "x", text[1:], text[:len(text)-1], text + "A", strings.Replace(text, "-1-", "-2-", 1), text[:60] + "\n" + text[60:]} {
		if _, err := parseToken(bad); err == nil {
			t.Errorf("%q was taken", bad)
		} else if len(bad) > 40 && strings.Contains(err.Error(), bad[20:30]) {
			t.Errorf("the error shows the text: %v", err)
		}
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		if s := fmt.Sprintf(verb, good); s != "token(redacted)" {
			t.Errorf("%s prints %s", verb, s)
		}
		if s := fmt.Sprintf(verb, struct{ t Token }{good}); strings.Contains(s, fmt.Sprintf("%x", good.seed[:4])) || strings.Contains(s, fmt.Sprintf("%d %d %d", good.seed[0], good.seed[1], good.seed[2])) {
			t.Errorf("%s prints %s", verb, s)
		}
	}
}

func TestAdmit(t *testing.T) {
	hour := begin.Add(time.Hour)
	for _, tt := range []struct {
		name  string
		grant Grant
		used  string // the ring version that this host already used, with key 1
		host  string
		key   byte
		now   time.Time
		err   string
	}{
		{"first", Grant{Expires: hour}, "", "a", 1, begin, ""},
		{"in its last moment", Grant{Expires: hour}, "", "a", 1, hour, ""},
		{"expired", Grant{Expires: hour}, "", "a", 1, hour.Add(1), "expired at 2030-01-01T13:00:00Z"},
		{"second host", Grant{Expires: hour}, "a", "b", 2, begin, `used by host "a"`},
		{"same host, another key", Grant{Expires: hour}, "a", "a", 2, begin, `used by host "a"`},
		{"another host, same key", Grant{Expires: hour}, "a", "b", 1, begin, `used by host "a"`},
		{"the answer was lost", Grant{Expires: hour}, "a", "a", 1, begin, ""},
		{"reusable", Grant{Expires: hour, Reusable: true}, "a", "b", 2, begin, ""},
		{"reusable, expired", Grant{Expires: hour, Reusable: true}, "a", "b", 2, hour.Add(1), "expired"},
		{"pattern", Grant{Expires: hour, Hosts: "node[0-9]"}, "", "node7", 1, begin, ""},
		{"not of the pattern", Grant{Expires: hour, Hosts: "node[0-9]"}, "", "node10", 1, begin, "pattern"},
		{"no name", Grant{Expires: hour}, "", "", 1, begin, "name of a host"},
		{"strange name", Grant{Expires: hour}, "", "-oProxyCommand=x", 1, begin, "name of a host"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newState(begin)
			public, _, err := ed25519.GenerateKey(rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Admit(public, "a", keyHash(1), begin); err == nil {
				t.Fatal("an unknown token admits")
			}
			if err := s.addToken(public, tt.grant, begin); err != nil {
				t.Fatal(err)
			}
			if tt.used != "" {
				if err := s.Admit(public, tt.used, keyHash(1), begin); err != nil {
					t.Fatal(err)
				}
			}
			err = s.Admit(public, tt.host, keyHash(tt.key), tt.now)
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("got %v, want %q", err, tt.err)
			}
		})
	}
}

func TestTokensAreForgotten(t *testing.T) {
	s := newState(begin)
	add := func(g Grant, now time.Time) ed25519.PublicKey {
		t.Helper()
		public, _, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.addToken(public, g, now); err != nil {
			t.Fatal(err)
		}
		return public
	}
	first := add(Grant{Expires: begin.Add(time.Hour)}, begin)
	add(Grant{Expires: begin.Add(48 * time.Hour)}, begin.Add(2*time.Hour))
	if !s.KnowsToken(first) {
		t.Error("who has a token that has just expired is not told so")
	}
	add(Grant{Expires: begin.Add(72 * time.Hour)}, begin.Add(26*time.Hour))
	if s.KnowsToken(first) || len(s.Tokens) != 2 {
		t.Errorf("%d tokens are kept", len(s.Tokens))
	}
	if err := s.addToken(first, Grant{Hosts: "["}, begin); err == nil {
		t.Error("an invalid pattern was taken")
	}
}

// TestRotation: the gossip key is replaced in steps that each wait for all hosts: any two hosts
// have a key in common at any time.
func TestRotation(t *testing.T) {
	s := newState(begin)
	now := begin
	for _, host := range []string{"a", "b", "gone", "late"} {
		s.Issued(host, begin.Add(time.Hour), now)
		s.Heard(host, s.Ring.Version)
	}
	s.Issued("late", begin.Add(time.Minute), now) // no earlier than it was
	if err := s.Remove("gone"); err != nil {
		t.Fatal(err)
	}
	old := s.Ring.Keys[0]
	rings := [][][]byte{s.Ring.Keys}
	if !s.BeginRotation(now) || s.BeginRotation(now) {
		t.Fatal("a rotation begins once")
	}
	for s.Ring.Phase != Stable {
		ring := s.Ring
		rings = append(rings, ring.Keys)
		for i, host := range []string{"a", "b", "late"} {
			now = now.Add(time.Minute)
			_, waiting := s.AdvanceRotation(now, time.Second)
			if want := []string{"a", "b", "late"}[i:]; !slices.Equal(waiting, want) {
				t.Fatalf("%s waits for %v, want %v", s.Ring.Phase, waiting, want)
			}
			if !s.Heard(host, ring.Version) || s.Heard(host, ring.Version) {
				t.Fatal("news is what has not been heard before")
			}
		}
		if ring.Phase != Removing {
			if advanced, waiting := s.AdvanceRotation(ring.Since.Add(time.Second-1), time.Second); advanced || len(waiting) > 0 {
				t.Fatalf("%s ended before drivers have looked", ring.Phase)
			}
		}
		if advanced, waiting := s.AdvanceRotation(now, time.Second); !advanced {
			t.Fatalf("%s waits for %v", ring.Phase, waiting)
		}
		if err := s.Ring.check(); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.Ring.Keys) != 1 || string(s.Ring.Keys[0]) == string(old) || len(rings) != 4 {
		t.Errorf("after %d rings: %d keys", len(rings), len(s.Ring.Keys))
	}
	for i := range len(rings) - 1 { // a host can be one phase behind the others
		for _, pair := range [][2][][]byte{{rings[i], rings[i+1]}, {rings[i+1], rings[i]}} {
			if !slices.ContainsFunc(pair[1], func(k []byte) bool { return string(k) == string(pair[0][0]) }) {
				t.Errorf("rings %d and %d do not understand each other", i, i+1)
			}
		}
	}
	s.BeginRotation(now)
	if _, waiting := s.AdvanceRotation(begin.Add(time.Hour), time.Second); len(waiting) != 0 {
		t.Errorf("it waits for %v, whose certificates have ended", waiting)
	}
	s.Issued("new", begin.Add(3*time.Hour), begin.Add(2*time.Hour))
	if len(s.Hosts) != 1 {
		t.Errorf("hosts that are gone are kept: %v", s.Hosts)
	}
}

func TestDir(t *testing.T) {
	d := newDir(t)
	again, err := Open(d.path)
	if err != nil || again.Authority().Fingerprint() != d.Authority().Fingerprint() {
		t.Fatal(err)
	}
	token, err := ReadToken(d.file(TokenFile))
	if err != nil || token.Authority() != d.Authority().Fingerprint() {
		t.Fatal(err)
	}
	if s, err := again.View(); err != nil || !s.KnowsToken(token.Key().Public().(ed25519.PublicKey)) {
		t.Errorf("the token of the file is unknown: %v", err)
	}
	files, err := os.ReadDir(d.path)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if fi, err := f.Info(); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, %v", f.Name(), fi.Mode(), err)
		}
	}
	state, err := os.ReadFile(d.file(stateFile))
	if err != nil || strings.Contains(string(state), token.Encode()[20:40]) {
		t.Errorf("the state shows the token, or cannot be read: %v", err)
	}
	if _, err := Init(d.path, Grant{}, begin); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("a cluster was replaced: %v", err)
	}
	if _, err := Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "hvdrun cluster init") {
		t.Errorf("an empty folder: %v", err)
	}
	refused := errors.New("no")
	if err := d.Update(func(s *State) error { s.Ring.Version = 99; return refused }); !errors.Is(err, refused) {
		t.Error(err)
	}
	if s, err := d.View(); err != nil || s.Ring.Version != 1 {
		t.Errorf("a refused change was made: %v", err)
	}
	for _, name := range []string{stateFile, authorityFile} {
		if err := os.Chmod(d.file(name), 0o640); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(d.path); err == nil || !strings.Contains(err.Error(), "chmod 600") {
			t.Errorf("%s that others may read: %v", name, err)
		}
		if err := os.Chmod(d.file(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(d.file(stateFile), []byte(`{"Version": 2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(d.path); err == nil || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("a newer format: %v", err)
	}
}

// TestUpdatesAreNotLost: concurrent changes of several processes are all kept. Here each descriptor
// acts as a process.
func TestUpdatesAreNotLost(t *testing.T) {
	d := newDir(t)
	const writers, changes = 4, 8
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			own, err := Open(d.path)
			if err != nil {
				t.Error(err)
				return
			}
			for i := range changes {
				err := own.Update(func(s *State) error {
					s.Issued(fmt.Sprintf("h%d-%d", w, i), begin.Add(time.Hour), begin)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
				if s, err := own.View(); err != nil || len(s.Hosts) == 0 {
					t.Errorf("%v", err)
				}
			}
		})
	}
	all.Wait()
	if s, err := d.View(); err != nil || len(s.Hosts) != writers*changes {
		t.Errorf("%d hosts, %v", len(s.Hosts), err)
	}
}

func TestDriverFollows(t *testing.T) {
	d := newDir(t)
	creds, err := d.Driver("r", "alice", "1000", begin)
	if err != nil {
		t.Fatal(err)
	}
	_, first := creds.Valid()
	if err := d.renew(creds, begin.Add(driverLife/2-time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, until := creds.Valid(); !until.Equal(first) {
		t.Error("renewed before half of the life was over")
	}
	if err := d.renew(creds, begin.Add(driverLife/2)); err != nil {
		t.Fatal(err)
	}
	if _, until := creds.Valid(); !until.Equal(begin.Add(driverLife * 3 / 2)) {
		t.Errorf("valid until %v", until)
	}
	if who := creds.Subject(); who.User != "alice" || who.UID != "1000" || who.RunID != "r" {
		t.Errorf("%+v", who)
	}
	calls := 0
	use := func(keys [][]byte) error { calls++; return nil }
	used, err := d.useRing(1, use)
	if err != nil || used != 1 || calls != 0 {
		t.Errorf("nothing has changed: %d, %v", used, err)
	}
	if err := d.Update(func(s *State) error { s.BeginRotation(begin); return nil }); err != nil {
		t.Fatal(err)
	}
	if used, err = d.useRing(1, func([][]byte) error { return os.ErrInvalid }); err == nil || used != 1 {
		t.Errorf("what could not be used is used: %d, %v", used, err)
	}
	if used, err = d.useRing(used, use); err != nil || used != 2 || calls != 1 {
		t.Errorf("%d, %v, %d calls", used, err, calls)
	}
}

func FuzzParseToken(f *testing.F) {
	f.Add(newToken(keyHash(1)).Encode())
	f.Add(tokenMark)
	f.Fuzz(func(t *testing.T, text string) {
		if token, err := parseToken(text); err == nil && token.Encode() != strings.TrimSpace(text) {
			t.Errorf("%q is read as another token", text)
		}
	})
}

func FuzzDecodeState(f *testing.F) {
	f.Add([]byte(`{"Version":1,"Ring":{"Version":1,"Keys":["AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="],"Since":"2030-01-01T12:00:00Z"}}`))
	f.Add([]byte(`{"Version":1,"Tokens":[{"Hosts":"["}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := decodeState(text)
		if err != nil {
			return
		}
		s.BeginRotation(begin)
		s.Issued("h", begin, begin)
		for range 4 {
			s.AdvanceRotation(begin.Add(24*time.Hour), 0)
		}
		if err := s.Ring.check(); err != nil {
			t.Error(err)
		}
	})
}
