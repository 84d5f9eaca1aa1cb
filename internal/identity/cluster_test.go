package identity

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var clusterKey = bytes.Repeat([]byte{7}, ClusterKeyLen)

func clusterOf(t testing.TB, key []byte, label string) *Authority {
	t.Helper()
	a, err := ForCluster(key, label)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// TestClusterMeets: both ends derive the same authority and trust each other's credentials.
func TestClusterMeets(t *testing.T) {
	agents, drivers := clusterOf(t, clusterKey, "blue"), clusterOf(t, clusterKey, "blue")
	if !agents.cert.Equal(drivers.cert) {
		t.Error("two members make different authorities")
	}
	agent := issue(t, agents, Subject{Role: Agent, Host: "a"})
	for _, run := range []string{"r1", "r2"} {
		driver := issue(t, drivers, Subject{RunID: run, Role: Driver})
		_, _, sErr, cErr := handshake(t, agent.ServerTLS(Driver), driver.ClientTLS(Subject{Role: Agent, Host: "a"}))
		if sErr != nil || cErr != nil {
			t.Errorf("run %s: server %v, client %v", run, sErr, cErr)
		}
	}
	if got := agent.Subject(); got != (Subject{Role: Agent, Host: "a"}) {
		t.Errorf("subject %+v", got)
	}
}

func TestClusterRefuses(t *testing.T) {
	ours := clusterOf(t, clusterKey, "blue")
	agent := issue(t, ours, Subject{Role: Agent, Host: "a"})
	other := bytes.Clone(clusterKey)
	other[31] ^= 1
	job := newAuthority(t, "r")
	for name, driver := range map[string]*Credentials{
		"wrong key":     issue(t, clusterOf(t, other, "blue"), Subject{RunID: "r", Role: Driver}),
		"other cluster": issue(t, clusterOf(t, clusterKey, "red"), Subject{RunID: "r", Role: Driver}),
		"no label":      issue(t, clusterOf(t, clusterKey, ""), Subject{RunID: "r", Role: Driver}),
		"a job's":       issue(t, job, Subject{Role: Driver}),
		"an agent":      issue(t, ours, Subject{Role: Agent, Host: "b"}),
	} {
		if _, _, sErr, cErr := handshake(t, agent.ServerTLS(Driver), driver.ClientTLS(Subject{Role: Agent})); sErr == nil || cErr == nil {
			t.Errorf("%s: server %v, client %v", name, sErr, cErr)
		}
	}
	driver := issue(t, ours, Subject{RunID: "r", Role: Driver})
	_, _, _, cErr := handshake(t, agent.ServerTLS(Driver), driver.ClientTLS(Subject{Role: Agent, Host: "b"}))
	if cErr == nil || !strings.Contains(cErr.Error(), "agent of a, not of b") {
		t.Errorf("the agent of another host: %v", cErr)
	}
	worker := issue(t, job, Subject{Role: Worker, Host: "a", Incarnation: "1"})
	if _, _, sErr, cErr := handshake(t, worker.ServerTLS(Driver), driver.ClientTLS(Subject{Role: Worker})); sErr == nil || cErr == nil {
		t.Errorf("a cluster's driver and a job's worker: server %v, client %v", sErr, cErr)
	}
}

func TestClusterIssues(t *testing.T) {
	a := clusterOf(t, clusterKey, "blue")
	for _, s := range []Subject{
		{RunID: "r", Role: Worker, Host: "a"}, {Role: Driver}, {RunID: "r", Role: Agent, Host: "a"}, {Role: "guest"},
	} {
		if c, err := a.Issue(s); err == nil {
			t.Errorf("issued %v", c)
		}
	}
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%x"} {
		if text := fmt.Sprintf(format, a); text != "authority(cluster, redacted)" {
			t.Errorf("%s prints %q", format, text)
		}
	}
	if _, err := ForCluster(clusterKey[1:], ""); err == nil {
		t.Error("a short key was taken")
	}
	if _, err := ForCluster(clusterKey, strings.Repeat("x", 256)); err == nil {
		t.Error("a long label was taken")
	}
}

// TestJobAgents: a job's own agents are accepted by its driver, but not in a cluster or another
// job.
func TestJobAgents(t *testing.T) {
	job := newAuthority(t, "r")
	agent, driver := issue(t, job, Subject{Role: Agent, Host: "a"}), issue(t, job, Subject{Role: Driver})
	caller, called, sErr, cErr := handshake(t, agent.ServerTLS(Driver), driver.ClientTLS(Subject{Role: Agent, Host: "a"}))
	from, err1 := SubjectOf(caller)
	to, err2 := SubjectOf(called)
	if err := errors.Join(sErr, cErr, err1, err2); err != nil || from.RunID != "r" || to != (Subject{RunID: "r", Role: Agent, Host: "a"}) {
		t.Errorf("%v and %v: %v", from, to, err)
	}
	cluster := clusterOf(t, clusterKey, "blue")
	for name, stranger := range map[string]*Credentials{
		"another job's":   issue(t, newAuthority(t, "other"), Subject{Role: Driver}),
		"a cluster's":     issue(t, cluster, Subject{RunID: "r", Role: Driver}),
		"the same name's": issue(t, newAuthority(t, "r"), Subject{Role: Driver}),
	} {
		if _, _, sErr, cErr := handshake(t, agent.ServerTLS(Driver), stranger.ClientTLS(Subject{Role: Agent})); sErr == nil || cErr == nil {
			t.Errorf("%s driver: server %v, client %v", name, sErr, cErr)
		}
	}
	worker := issue(t, job, Subject{Role: Worker, Host: "a", Incarnation: "1"})
	if _, _, sErr, _ := handshake(t, agent.ServerTLS(Driver), worker.ClientTLS(Subject{Role: Agent})); sErr == nil {
		t.Error("a worker was taken for a driver")
	}
	if _, _, _, cErr := handshake(t, agent.ServerTLS(Driver), driver.ClientTLS(Subject{Role: Agent, Host: "b"})); cErr == nil {
		t.Error("the agent of a was taken for that of b")
	}
}

func TestClusterKeyFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "key")
	if err := GenerateClusterKey(path); err != nil {
		t.Fatal(err)
	}
	key, err := ReadClusterKey(path)
	if err != nil || len(key) != ClusterKeyLen || bytes.Equal(key, make([]byte, ClusterKeyLen)) {
		t.Fatalf("%x, %v", key, err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	if err := GenerateClusterKey(path); err == nil {
		t.Error("an existing key was written over")
	}
	if again, err := ReadClusterKey(path); err != nil || !bytes.Equal(again, key) {
		t.Errorf("another key after all: %v", err)
	}

	read := func(text string, mode os.FileMode) ([]byte, error) {
		path := filepath.Join(t.TempDir(), "other")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return ReadClusterKey(path)
	}
	for _, text := range []string{
		fmt.Sprintf("%x", key), fmt.Sprintf(" %X\r\n", key), base64.StdEncoding.EncodeToString(key) + "\n",
		base64.RawURLEncoding.EncodeToString(key),
	} {
		if got, err := read(text, 0o400); err != nil || !bytes.Equal(got, key) {
			t.Errorf("%q: %v", text, err)
		}
	}
	secret := fmt.Sprintf("%x", key[:31])
	for _, text := range []string{"", secret, secret + "zz", fmt.Sprintf("%x00", key), strings.Repeat("A", 4096)} {
		got, err := read(text, 0o600)
		if err == nil || got != nil || !strings.Contains(err.Error(), "64 hexadecimal digits") {
			t.Errorf("%.80q: %v", text, err)
		}
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("the error shows the key: %v", err)
		}
	}
	for _, mode := range []os.FileMode{0o640, 0o604, 0o620, 0o602, 0o644} {
		if _, err := read(fmt.Sprintf("%x", key), mode); err == nil || !strings.Contains(err.Error(), "chmod 600") {
			t.Errorf("mode %#o: %v", mode, err)
		}
	}
	if _, err := ReadClusterKey(filepath.Join(dir, "none")); err == nil {
		t.Error("no file, no error")
	}
	if _, err := ReadClusterKey(dir); err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("a folder: %v", err)
	}
}

func FuzzParseClusterKey(f *testing.F) {
	f.Add([]byte(strings.Repeat("0f", 32)))
	f.Add([]byte(base64.StdEncoding.EncodeToString(clusterKey)))
	f.Add([]byte("no key"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if key, err := parseClusterKey(text); (err == nil) != (len(key) == ClusterKeyLen) {
			t.Errorf("%q: %d bytes, %v", text, len(key), err)
		}
	})
}
