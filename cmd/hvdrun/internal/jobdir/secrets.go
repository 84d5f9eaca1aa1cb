package jobdir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// The secrets of a job are what another driver needs to take it over and nobody else may have. They
// are not in the job's folder, which may be in a home directory that other machines can read, but
// in a private folder of the user in this machine's memory. They are removed when the job ends, and
// are lost when the machine restarts. With --job-dir they are in the folder that it names, and with
// --no-resume only in the driver's memory.
const (
	authorityName = "authority"
	launchName    = "launch.json"
)

const (
	// touchEvery is the interval at which a driver updates the times of the two files to show that
	// it runs.
	touchEvery = time.Minute
	// deadAfter is how long after the last update, plus the time that workers outlive their driver,
	// the secrets are removed as useless.
	deadAfter = 5 * touchEvery
)

var network = safefile.Network // tests have no such file system

// launchFile is launch.json: how the job's hvdrun was called. A driver that takes over needs all of
// it: it starts workers on new hosts with the same environment as the first workers, and reads the
// settings again from the flags, the environment and the text of the config file.
type launchFile struct {
	// Job is the job's folder.
	Job  string   `json:"job"`
	Args []string `json:"args"`
	Env  []string `json:"env"`
	// Config is the text of the config file, which may be changed while the job runs.
	Config string `json:"config,omitempty"`
	// Hosts is the text of the hostfile, for the same reason.
	Hosts string `json:"hosts,omitempty"`
	// Orphan is how long the workers outlive their driver.
	Orphan time.Duration `json:"orphan"`
}

// Secrets are the contents of the two files, and their folder.
type Secrets struct {
	Dir       string // "": they are in no file
	Authority string
	Launch    launchFile
}

// secretPlace is a folder for the secrets of all jobs of this user.
type secretPlace struct {
	base string // must belong to this user alone
	made bool   // base is made if it does not exist
}

func (p secretPlace) jobs() string {
	if p.made {
		return filepath.Join(p.base, "keys")
	}
	return filepath.Join(p.base, "hvdrun", "keys")
}

// usable returns the reason why the place cannot be used. If create is true, it makes the place
// first.
func (p secretPlace) usable(create bool) error {
	if p.made && create {
		if err := safefile.MakeDir(p.base, safefile.Private); err != nil {
			return err
		}
	}
	return safefile.SecretDir(p.base)
}

// SecretPlaces returns the places for the secrets of jobs, best first. On most machines none of
// them survives a restart. The first two are removed with the user's last session, unless lingering
// is enabled; Dir.Guard then stores the secrets in another place.
func SecretPlaces(env []string) (all []secretPlace) {
	uid := strconv.Itoa(os.Geteuid())
	if dir, _ := cli.Lookup(env, "XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		all = append(all, secretPlace{dir, false})
	}
	return append(all, secretPlace{"/run/user/" + uid, false},
		secretPlace{"/dev/shm/hvdrun-" + uid, true}, secretPlace{filepath.Join(Shared, "hvdrun-"+uid), true})
}

// put writes the secrets of a job into the best place that can be used, and returns a warning if
// that is on a network file system. folder is the job's folder, the last resort; run names the job.
func (s *Secrets) put(places []secretPlace, folder, run string) (warning string, err error) {
	var failed []error
	remote := ""
	for _, p := range places {
		err := p.usable(true)
		if err == nil && network(p.base) != "" {
			remote, err = p.base, fmt.Errorf("%s is on %s", p.base, network(p.base))
		}
		if err == nil {
			err = s.write(filepath.Join(p.jobs(), run))
		}
		if err == nil {
			return "", nil
		}
		failed = append(failed, err)
	}
	if err := safefile.SecretDir(folder); err != nil {
		return "", errors.Join(append(failed, err)...)
	}
	if remote != "" || network(folder) != "" {
		warning = fmt.Sprintf("the job's key is in %s: set XDG_RUNTIME_DIR to a local folder of mode 0700, or use --no-resume",
			where(folder))
	}
	return warning, s.write(folder)
}

// where describes the location of a folder, for a warning.
func where(folder string) string {
	if name := network(folder); name != "" {
		return folder + ", on " + name + ", whose other machines may read it"
	}
	return folder
}

// write writes both files into a folder, which it makes.
func (s *Secrets) write(dir string) error {
	if err := safefile.MakeDir(dir, safefile.Private); err != nil {
		return err
	}
	if err := safefile.PrivateDir(dir); err != nil {
		return err
	}
	launch, err := json.Marshal(s.Launch)
	if err != nil {
		return err
	}
	s.Dir = dir
	err = safefile.Replace(filepath.Join(dir, launchName), append(launch, '\n'), safefile.Private)
	if err == nil {
		err = safefile.Replace(filepath.Join(dir, authorityName), []byte(s.Authority+"\n"), safefile.Private)
	}
	if err != nil {
		return errors.Join(err, s.forget())
	}
	return nil
}

// readSecrets returns the secrets in a folder.
func readSecrets(dir string) (s Secrets, err error) {
	if err := safefile.SecretDir(dir); err != nil {
		return s, err
	}
	text, err := readSecret(filepath.Join(dir, authorityName))
	if err != nil {
		return s, err
	}
	s.Dir, s.Authority = dir, strings.TrimSpace(text)
	if _, err := identity.DecodeAuthority(s.Authority); err != nil {
		return s, fmt.Errorf("%s: %w", filepath.Join(dir, authorityName), err)
	}
	path := filepath.Join(dir, launchName)
	if text, err = readSecret(path); err != nil {
		return s, err
	}
	if err := json.Unmarshal([]byte(text), &s.Launch); err != nil {
		return s, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// maxSecret bounds the size of each file in bytes: an environment has a few MiB at most.
const maxSecret = 64 << 20

func readSecret(path string) (string, error) {
	text, err := safefile.SecretText(path, maxSecret)
	return string(text), err
}

// forget removes the files, and their folder if it is then empty.
func (s *Secrets) forget() error {
	if s.Dir == "" {
		return nil
	}
	err := errors.Join(gone(os.Remove(filepath.Join(s.Dir, authorityName))), gone(os.Remove(filepath.Join(s.Dir, launchName))))
	_ = os.Remove(s.Dir) // fails for the job's folder, which is not empty
	s.Dir = ""
	return err
}

// touch updates the times of the files, so that PruneSecrets does not take the driver for dead.
func (s *Secrets) touch() error {
	now := time.Now()
	return errors.Join(os.Chtimes(filepath.Join(s.Dir, authorityName), now, now), os.Chtimes(filepath.Join(s.Dir, launchName), now, now))
}

// Guard starts a goroutine that keeps the secrets stored while the driver runs. If their folder
// disappears, as a session's folder does with the user's last session, the goroutine stores the
// secrets in another place. stop ends the goroutine and waits for it.
func (d *Dir) Guard(places []secretPlace, log logrus.FieldLogger) (stop func()) {
	if d.Secrets.Dir == "" {
		return func() {}
	}
	return cli.Background(func(ctx context.Context) {
		tick := time.NewTicker(touchEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			if d.Secrets.touch() == nil {
				continue
			}
			lost := d.Secrets.Dir
			if err := d.PutSecrets(places, log); err != nil {
				d.Secrets.Dir = lost // the next tick tries again
				log.WithError(err).Warnf("the job cannot be resumed: its key in %s is gone", lost)
			} else {
				log.Infof("the job's key is in %s: %s is gone", d.Secrets.Dir, lost)
			}
		}
	})
}

// PutSecrets writes the secrets and job.json, which says where they are.
func (d *Dir) PutSecrets(places []secretPlace, log logrus.FieldLogger) error {
	if d.Named {
		places = nil // the user named the folder
	}
	warning, err := d.Secrets.put(places, d.Path, d.About.RunID)
	if warning != "" {
		log.Warn(warning)
	}
	if err != nil {
		return err
	}
	d.About.Keys = d.Secrets.Dir
	return d.Write()
}

// Moved rewrites job.json if its entries are out of date: the driver now runs on another machine,
// the machine has been restarted, or the secrets are in another place.
func (d *Dir) Moved() error {
	was := d.About
	d.About.Host, _ = os.Hostname()
	d.About.Boot, d.About.Keys = journal.BootID(), d.Secrets.Dir
	if d.About.Host == was.Host && d.About.Boot == was.Boot && d.About.Keys == was.Keys {
		return nil
	}
	return d.Write()
}

// FindSecrets returns the secrets of a job. It also searches places that job.json does not name:
// the place in job.json may be gone, for instance with a login session.
func (d *Dir) FindSecrets(env []string) (Secrets, error) {
	dirs := []string{d.Path}
	if d.About.Keys != "" {
		dirs = []string{d.About.Keys}
	}
	for _, p := range SecretPlaces(env) {
		dirs = append(dirs, filepath.Join(p.jobs(), d.About.RunID))
	}
	for _, dir := range dirs {
		if _, err := os.Lstat(filepath.Join(dir, authorityName)); err == nil {
			return readSecrets(dir)
		}
	}
	return Secrets{}, d.noKey()
}

// noKey returns an error that explains why the job has no key.
func (d *Dir) noKey() error {
	host, _ := os.Hostname()
	switch {
	case d.About.Keys == "":
		return errors.New("its key was in the memory of its hvdrun alone (--no-resume)")
	case d.About.Boot != journal.BootID() && d.About.Host != host:
		return fmt.Errorf("its key is on %s, in %s: do this there", d.About.Host, d.About.Keys)
	case d.About.Boot != journal.BootID():
		return fmt.Errorf("its key was in %s, and is gone since %s was restarted; its workers on other hosts end by themselves, "+
			"after --orphan-timeout", d.About.Keys, host)
	}
	return fmt.Errorf("its key in %s is gone", d.About.Keys)
}

// KeyLost returns the error of noKey if the job has no key on this machine. It returns nil if the
// job has one, or was started on another machine.
func (d *Dir) KeyLost() error {
	host, _ := os.Hostname()
	if d.About.Keys != "" && d.About.Boot != journal.BootID() && d.About.Host != host {
		return nil
	}
	if d.About.Keys != "" {
		if _, err := os.Lstat(filepath.Join(d.About.Keys, authorityName)); !errors.Is(err, fs.ErrNotExist) {
			return nil
		}
	}
	return d.noKey()
}

// PruneSecrets removes the secrets of drivers that died so long ago that their workers have ended
// and no driver can take over.
func PruneSecrets(env []string, now time.Time) {
	var dirs []string
	for _, p := range SecretPlaces(env) {
		if p.usable(false) == nil {
			dirs = append(dirs, p.jobs())
		}
	}
	for _, all := range StateDirs(env, Shared) { // the last resort
		if Usable(env, all, Shared, false) == nil {
			dirs = append(dirs, all)
		}
	}
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir) // there may be none yet
		for _, e := range entries {
			s := Secrets{Dir: filepath.Join(dir, e.Name())}
			if s.dead(now) {
				_ = s.forget() // the next hvdrun tries again
			}
		}
	}
}

// dead reports whether the folder holds the secrets of a job whose driver died so long ago that its
// workers have ended too.
func (s Secrets) dead(now time.Time) bool {
	found := false
	for _, name := range []string{authorityName, launchName} {
		fi, err := os.Lstat(filepath.Join(s.Dir, name))
		if err != nil {
			continue
		}
		if found = true; now.Sub(fi.ModTime()) < deadAfter {
			return false
		}
		orphan := settings.DefaultOrphan
		if text, err := readSecret(filepath.Join(s.Dir, launchName)); err == nil {
			var launch launchFile
			if json.Unmarshal([]byte(text), &launch) == nil {
				orphan = launch.Orphan
			}
		}
		if now.Sub(fi.ModTime()) < orphan+deadAfter {
			return false
		}
	}
	return found
}
