package runas

import (
	"errors"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hvdrun/hvdrun/internal/identity"
)

const policy = `
# who                     as whom
user=alice                as=alice
user=bob run=nightly-*    as=trainer groups=video,trainer cgroup=/sys/fs/cgroup/training/
  uid=1000-1999           as=@user
uid=7 user=?             as=seven
user=d* run=d*           as=dora
`

func TestFind(t *testing.T) {
	p, err := Parse("policy", policy)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		user, uid, run string
		line           int
	}{
		{"alice", "1", "r", 3}, {"alice", "", "r", 3}, {"bob", "1", "nightly-7", 4}, {"bob", "1", "daily", 0},
		{"bob", "1000", "daily", 5}, {"carol", "1999", "r", 5}, {"carol", "2000", "r", 0}, {"carol", "", "r", 0},
		{"x", "7", "r", 6}, {"xy", "7", "r", 0}, {"", "", "r", 0}, {"*", "", "r", 0}, {"carol", "01500", "r", 5},
		{"dora", "", "daily", 7}, {"dora", "", "nightly", 0}, {"x", "", "daily", 0},
	} {
		who := identity.Subject{Role: identity.Driver, RunID: tt.run, User: tt.user, UID: tt.uid}
		r, err := p.find(who)
		if tt.line == 0 {
			if err == nil || !strings.Contains(err.Error(), "no line of policy lets user") {
				t.Errorf("%+v: %+v, %v", who, r, err)
			}
			continue
		}
		if err != nil || r.line != tt.line {
			t.Errorf("%+v: line %v, %v, want %d", who, r, err, tt.line)
		}
	}
	if r := p.rules[1]; r.as != "trainer" || strings.Join(r.groups, " ") != "video trainer" || r.cgroup != "/sys/fs/cgroup/training" {
		t.Errorf("%+v", r)
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                               "p: no line says",
		"# nothing\n\n":                  "p: no line says",
		"user=a":                         "p:1: as=USER is missing",
		"\nuser=a as=b color=red":        `p:2: unknown key "color"`,
		"user=a alice":                   `p:1: "alice" is not key=value`,
		"user= as=b":                     `p:1: "user=" is not key=value`,
		"user=a user=b as=c":             "p:1: user is given twice",
		"uid=1 uid=2 as=c":               "p:1: uid is given twice",
		"as=a as=b":                      "p:1: as is given twice",
		"user=[ as=c":                    `p:1: "[" is not a pattern`,
		"uid=x as=c":                     `p:1: uid "x" is not`,
		"uid=9-3 as=c":                   `p:1: uid "9-3" is not`,
		"uid=-1 as=c":                    `p:1: uid "-1" is not`,
		"uid=4294967296 as=c":            "p:1: uid",
		"as=c cgroup=training":           `p:1: cgroup "training" is not an absolute path`,
		strings.Repeat("#", maxPolicy):   "p: no line says",
		strings.Repeat("#", maxPolicy+1): "p: the policy is longer than",
	} {
		if _, err := Parse("p", text); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
}

func TestFor(t *testing.T) {
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ text, user, err string }{
		{"user=* as=root", "x", ""},
		{"user=* as=@user", "root", "p:1: @user is never root"},
		{"user=* as=@user", "", "p:1: the driver's certificate names no user"},
		{"user=* as=@user", "nobody-has-this-name", `p:1: this host has no user "nobody-has-this-name"`},
		{"user=* as=nobody-has-this-name", "x", `p:1: this host has no user`},
		{"user=* as=root groups=nobody-has-this-name", "x", `p:1: this host has no group`},
	} {
		p, err := Parse("p", tt.text)
		if err != nil {
			t.Fatal(err)
		}
		r, err := p.For(identity.Subject{Role: identity.Driver, RunID: "r", User: tt.user})
		if tt.err == "" && (err != nil || r.As.UID != 0 || r.As.Home == "") {
			t.Errorf("%s: %+v, %v", tt.text, r, err)
		}
		if tt.err != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.err)) {
			t.Errorf("%s: %+v, %v, want %s", tt.text, r, err, tt.err)
		}
	}
	file := filepath.Join(t.TempDir(), "policy")
	if err := os.WriteFile(file, []byte("user=* as="+me.Username+" cgroup=/x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := Read(file)
	if err != nil {
		t.Fatal(err)
	}
	refuses := func(string) error { return errors.New("no cgroup") }
	if err := p.Check(refuses); err == nil || err.Error() != file+":1: no cgroup" {
		t.Errorf("%v", err)
	}
	if err := p.Check(func(string) error { return nil }); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(file, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(file); err == nil || !strings.Contains(err.Error(), "others may write to "+file) {
		t.Errorf("a policy of everybody's: %v", err)
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can give the policy to another user")
	}
	if err := errors.Join(os.Chmod(file, 0o644), os.Chown(file, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(file); err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
		t.Errorf("a policy of another user: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(policy)
	f.Add("uid=1-2 as=@user")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse("p", text)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "p:") {
				t.Errorf("an error without its file: %v", err)
			}
			return
		}
		if _, err := p.find(identity.Subject{User: "alice", UID: "1000", RunID: "r"}); err == nil && len(p.rules) == 0 {
			t.Error("a rule of none")
		}
	})
}
