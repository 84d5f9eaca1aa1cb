package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// secretJob returns a job that has its folder, and secrets that are in no file yet.
func secretJob(t *testing.T) *jobDir {
	t.Helper()
	authority, err := identity.NewAuthority("r1")
	if err != nil {
		t.Fatal(err)
	}
	d := &jobDir{path: filepath.Join(t.TempDir(), "job"), about: jobFile{Version: jobFileVersion, RunID: "r1", Boot: bootID()}}
	d.about.Host, _ = os.Hostname()
	d.secrets.launch = launchFile{Args: []string{"-np", "2"}, Env: []string{"TOKEN=hunter2"}, Orphan: time.Minute}
	if d.secrets.authority, err = authority.Encode(); err != nil {
		t.Fatal(err)
	}
	if err := safefile.MakeDir(d.path, safefile.Private); err != nil {
		t.Fatal(err)
	}
	return d
}

// privateDir returns a folder as a login has it.
func privateDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func quiet() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(&strings.Builder{})
	return log
}

// on has folders seem to be on network file systems, until the test ends.
func on(t *testing.T, names map[string]string) {
	local := network
	t.Cleanup(func() { network = local })
	network = func(path string) string { return names[path] }
}

// The best place is the first that is this user's alone and on this machine; the job's own folder
// is the last, with a warning where other machines may read it.
func TestSecretsPlace(t *testing.T) {
	good, remote, made := privateDir(t), privateDir(t), filepath.Join(t.TempDir(), "hvdrun-0")
	open := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(open, 0o755); err != nil {
		t.Fatal(err)
	}
	bad, afar := secretPlace{open, false}, secretPlace{remote, false}
	for name, c := range map[string]struct {
		places []secretPlace
		nfs    bool // the job's folder is on NFS
		want   string
		warns  string
	}{
		"login":             {[]secretPlace{{good, false}, {made, true}}, true, filepath.Join(good, "hvdrun", "keys", "r1"), ""},
		"not this user's":   {[]secretPlace{bad, {filepath.Join(good, "none"), false}, {made, true}}, true, filepath.Join(made, "keys", "r1"), ""},
		"on the network":    {[]secretPlace{afar, {made, true}}, true, filepath.Join(made, "keys", "r1"), ""},
		"none, folder here": {[]secretPlace{bad}, false, "", ""},
		"none, folder afar": {[]secretPlace{bad, afar}, true, "", "on NFS, whose other machines may read it"},
	} {
		d := secretJob(t)
		fs := map[string]string{remote: "SMB"}
		if c.nfs {
			fs[d.path] = "NFS"
		}
		on(t, fs)
		if c.want == "" {
			c.want = d.path
		}
		warning, err := d.secrets.put(c.places, d.path, "r1")
		if err != nil || d.secrets.dir != c.want || (warning == "") != (c.warns == "") || !strings.Contains(warning, c.warns) {
			t.Errorf("%s: they are in %s, want %s; warning %q, %v", name, d.secrets.dir, c.want, warning, err)
		}
		read, err := readSecrets(c.want)
		if err != nil || read.authority != d.secrets.authority || read.launch.Env[0] != "TOKEN=hunter2" {
			t.Errorf("%s: %+v, %v", name, read.launch, err)
		}
		if err := d.secrets.forget(); err != nil || d.secrets.dir != "" {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := readSecrets(c.want); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: forgotten secrets: %v", name, err)
		}
	}
}

// What a dead driver has left is of no use from when the workers have ended by themselves.
func TestSecretsOfDead(t *testing.T) {
	d := secretJob(t)
	if err := d.secrets.write(d.path); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for ago, want := range map[time.Duration]bool{
		0: false, deadAfter: false, time.Minute + deadAfter - time.Second: false, time.Minute + deadAfter + time.Second: true,
	} {
		then := now.Add(-ago)
		for _, name := range []string{authorityName, launchName} {
			if err := os.Chtimes(filepath.Join(d.path, name), then, then); err != nil {
				t.Fatal(err)
			}
		}
		if got := d.secrets.dead(now); got != want {
			t.Errorf("%v after the driver's last sign of life, --orphan-timeout 1m: dead %v", ago, got)
		}
	}
	if err := os.Remove(filepath.Join(d.path, launchName)); err != nil {
		t.Fatal(err)
	}
	if d.secrets.dead(now.Add(deadAfter)) || !d.secrets.dead(now.Add(defaultOrphan+2*deadAfter)) {
		t.Error("where it cannot be read how long the workers live, it is the default")
	}
	if empty := (jobSecrets{dir: t.TempDir()}); empty.dead(now.Add(1000 * time.Hour)) {
		t.Error("a folder without secrets")
	}
}

// The login's folder goes with its last session: the driver, which lives, puts the secrets
// elsewhere, and shows that it lives.
func TestGuard(t *testing.T) {
	login, memory := privateDir(t), filepath.Join(t.TempDir(), "hvdrun-0")
	places := []secretPlace{{filepath.Join(login, "run"), false}, {memory, true}}
	if err := os.Mkdir(places[0].base, 0o700); err != nil {
		t.Fatal(err)
	}
	d := secretJob(t)
	if err := d.putSecrets(places, quiet()); err != nil || d.secrets.dir != filepath.Join(login, "run", "hvdrun", "keys", "r1") {
		t.Fatal(d.secrets.dir, err)
	}
	old := time.Now().Add(-time.Hour)
	path := filepath.Join(d.secrets.dir, authorityName)
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		defer d.guard(places, quiet())()
		next := func() {
			<-time.After(touchEvery + 1) // virtual
			synctest.Wait()
		}
		next()
		if fi, err := os.Stat(path); err != nil || fi.ModTime().Equal(old) {
			t.Errorf("the driver has not shown that it lives: %v", err)
		}
		if err := os.RemoveAll(places[0].base); err != nil {
			t.Fatal(err)
		}
		next()
	})
	about, err := readJobDir(d.path)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := about.findSecrets(nil); err != nil || s.dir != filepath.Join(memory, "keys", "r1") || s.authority != d.secrets.authority {
		t.Errorf("they are in %s, %v", s.dir, err)
	}
}

// A job whose key is gone says why, and where its key may be.
func TestNoKey(t *testing.T) {
	host, _ := os.Hostname()
	here := filepath.Join(t.TempDir(), "r1")
	for name, c := range map[string]struct {
		about jobFile
		says  string
		lost  bool
	}{
		"memory":    {jobFile{Version: jobFileVersion, Host: host, Boot: bootID()}, "memory of its hvdrun alone", true},
		"removed":   {jobFile{Version: jobFileVersion, Host: host, Boot: bootID(), Keys: here}, here + " is gone", true},
		"restarted": {jobFile{Version: jobFileVersion, Host: host, Boot: "before", Keys: here}, "restarted", true},
		"elsewhere": {jobFile{Version: jobFileVersion, Host: "other", Boot: "theirs", Keys: here}, "on other, in " + here, false},
	} {
		d := &jobDir{path: t.TempDir(), about: c.about}
		d.about.RunID = "no such job"
		if _, err := d.findSecrets(nil); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if err := d.keyLost(); (err != nil) != c.lost {
			t.Errorf("%s: lost here: %v", name, err)
		}
	}
}

// Secrets in a folder that is not this user's alone are not read.
func TestStolenPlace(t *testing.T) {
	d := secretJob(t)
	if err := d.secrets.write(d.path); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(d.path, authorityName)
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := readSecrets(d.path); err == nil || !strings.Contains(err.Error(), "others may use") {
		t.Errorf("a key that others may read: %v", err)
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.Chmod(d.path, 0o755)); err != nil {
		t.Fatal(err)
	}
	if _, err := readSecrets(d.path); err == nil || !strings.Contains(err.Error(), "others may enter") {
		t.Errorf("a folder that others may enter: %v", err)
	}
}
