package jobdir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// secretJob returns a job that has a folder, and secrets that have not been written to a file yet.
func secretJob(t *testing.T) *Dir {
	t.Helper()
	authority, err := identity.NewAuthority("r1")
	if err != nil {
		t.Fatal(err)
	}
	d := &Dir{Path: filepath.Join(t.TempDir(), "job"), About: File{Version: FileVersion, RunID: "r1", Boot: journal.BootID()}}
	d.About.Host, _ = os.Hostname()
	d.Secrets.Launch = launchFile{Args: []string{"-np", "2"}, Env: []string{"TOKEN=hunter2"}, Orphan: time.Minute}
	if d.Secrets.Authority, err = authority.Encode(); err != nil {
		t.Fatal(err)
	}
	if err := safefile.MakeDir(d.Path, safefile.Private); err != nil {
		t.Fatal(err)
	}
	return d
}

// privateDir returns a folder with the mode of a login's runtime folder.
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

// on makes folders appear to be on network file systems until the test ends.
func on(t *testing.T, names map[string]string) {
	local := network
	t.Cleanup(func() { network = local })
	network = func(path string) string { return names[path] }
}

// TestSecretsPlace: the best place is the first that belongs to this user alone and is on this
// machine; the job's own folder is the last, with a warning if other machines can read it.
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
			fs[d.Path] = "NFS"
		}
		on(t, fs)
		if c.want == "" {
			c.want = d.Path
		}
		warning, err := d.Secrets.put(c.places, d.Path, "r1")
		if err != nil || d.Secrets.Dir != c.want || (warning == "") != (c.warns == "") || !strings.Contains(warning, c.warns) {
			t.Errorf("%s: they are in %s, want %s; warning %q, %v", name, d.Secrets.Dir, c.want, warning, err)
		}
		read, err := readSecrets(c.want)
		if err != nil || read.Authority != d.Secrets.Authority || read.Launch.Env[0] != "TOKEN=hunter2" {
			t.Errorf("%s: %+v, %v", name, read.Launch, err)
		}
		if err := d.Secrets.forget(); err != nil || d.Secrets.Dir != "" {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := readSecrets(c.want); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: forgotten secrets: %v", name, err)
		}
	}
}

// TestSecretsOfDead: the secrets of a dead driver are of no use once its workers have ended by
// themselves.
func TestSecretsOfDead(t *testing.T) {
	d := secretJob(t)
	if err := d.Secrets.write(d.Path); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for ago, want := range map[time.Duration]bool{
		0: false, deadAfter: false, time.Minute + deadAfter - time.Second: false, time.Minute + deadAfter + time.Second: true,
	} {
		then := now.Add(-ago)
		for _, name := range []string{authorityName, launchName} {
			if err := os.Chtimes(filepath.Join(d.Path, name), then, then); err != nil {
				t.Fatal(err)
			}
		}
		if got := d.Secrets.dead(now); got != want {
			t.Errorf("%v after the driver's last sign of life, --orphan-timeout 1m: dead %v", ago, got)
		}
	}
	if err := os.Remove(filepath.Join(d.Path, launchName)); err != nil {
		t.Fatal(err)
	}
	if d.Secrets.dead(now.Add(deadAfter)) || !d.Secrets.dead(now.Add(settings.DefaultOrphan+2*deadAfter)) {
		t.Error("where it cannot be read how long the workers live, it is the default")
	}
	if empty := (Secrets{Dir: t.TempDir()}); empty.dead(now.Add(1000 * time.Hour)) {
		t.Error("a folder without secrets")
	}
}

// TestGuard: the login's folder is removed with its last session. The driver, which is alive, then
// writes the secrets elsewhere, and keeps marking them as in use.
func TestGuard(t *testing.T) {
	login, memory := privateDir(t), filepath.Join(t.TempDir(), "hvdrun-0")
	places := []secretPlace{{filepath.Join(login, "run"), false}, {memory, true}}
	if err := os.Mkdir(places[0].base, 0o700); err != nil {
		t.Fatal(err)
	}
	d := secretJob(t)
	if err := d.PutSecrets(places, quiet()); err != nil || d.Secrets.Dir != filepath.Join(login, "run", "hvdrun", "keys", "r1") {
		t.Fatal(d.Secrets.Dir, err)
	}
	old := time.Now().Add(-time.Hour)
	path := filepath.Join(d.Secrets.Dir, authorityName)
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		defer d.Guard(places, quiet())()
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
	about, err := Read(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := about.FindSecrets(nil); err != nil || s.Dir != filepath.Join(memory, "keys", "r1") || s.Authority != d.Secrets.Authority {
		t.Errorf("they are in %s, %v", s.Dir, err)
	}
}

// TestNoKey: if a job's key is missing, the error gives the reason, and where the key can be.
func TestNoKey(t *testing.T) {
	host, _ := os.Hostname()
	here := filepath.Join(t.TempDir(), "r1")
	for name, c := range map[string]struct {
		about File
		says  string
		lost  bool
	}{
		"memory":    {File{Version: FileVersion, Host: host, Boot: journal.BootID()}, "memory of its hvdrun alone", true},
		"removed":   {File{Version: FileVersion, Host: host, Boot: journal.BootID(), Keys: here}, here + " is gone", true},
		"restarted": {File{Version: FileVersion, Host: host, Boot: "before", Keys: here}, "restarted", true},
		"elsewhere": {File{Version: FileVersion, Host: "other", Boot: "theirs", Keys: here}, "on other, in " + here, false},
	} {
		d := &Dir{Path: t.TempDir(), About: c.about}
		d.About.RunID = "no such job"
		if _, err := d.FindSecrets(nil); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if err := d.KeyLost(); (err != nil) != c.lost {
			t.Errorf("%s: lost here: %v", name, err)
		}
	}
}

// TestStolenPlace: secrets in a folder that does not belong to this user alone are not read.
func TestStolenPlace(t *testing.T) {
	d := secretJob(t)
	if err := d.Secrets.write(d.Path); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(d.Path, authorityName)
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := readSecrets(d.Path); err == nil || !strings.Contains(err.Error(), "others may use") {
		t.Errorf("a key that others may read: %v", err)
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.Chmod(d.Path, 0o755)); err != nil {
		t.Fatal(err)
	}
	if _, err := readSecrets(d.Path); err == nil || !strings.Contains(err.Error(), "others may enter") {
		t.Errorf("a folder that others may enter: %v", err)
	}
}
