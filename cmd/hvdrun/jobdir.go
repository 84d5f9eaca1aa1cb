package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

const (
	// keepEnded is how long the folder of a job that has ended is kept, keepLost that of one whose
	// driver is gone.
	keepEnded = 7 * 24 * time.Hour
	keepLost  = 30 * 24 * time.Hour
)

// jobDir is the folder in which a job keeps what another driver must know to go on with it. Only
// its owner may enter it, and only its owner may read what is in it. Its secrets are elsewhere,
// unless a person has named the folder.
type jobDir struct {
	path    string
	named   bool // by --job-dir
	about   jobFile
	secrets jobSecrets
	agents  client.KnownFile // none: not open
}

// The files of a job's folder.
func (d *jobDir) journal() string     { return filepath.Join(d.path, "journal") }
func (d *jobDir) agentsPath() string  { return filepath.Join(d.path, "agents") }
func (d *jobDir) membersPath() string { return filepath.Join(d.path, "members") }
func (d *jobDir) aboutPath() string   { return filepath.Join(d.path, "job.json") }
func (d *jobDir) slurmPath() string   { return filepath.Join(d.path, "slurm") }

// jobFile is job.json: what is known of the job by those who list jobs.
type jobFile struct {
	Version int       `json:"version"`
	RunID   string    `json:"run"`
	Begun   time.Time `json:"begun"`
	Command []string  `json:"command"`
	Dir     string    `json:"dir"`
	// Host is the machine of the job's driver, Boot the machine's present start.
	Host string `json:"host,omitempty"`
	Boot string `json:"boot,omitempty"`
	// Keys is the folder of the job's secrets; empty where they are in its driver's memory alone.
	Keys string `json:"keys,omitempty"`
	// Claim is the last claim to the job of this folder's driver, where there is a copy in etcd.
	Claim string `json:"claim,omitempty"`
	// EventsFrom is how long the events file was.
	EventsFrom int64 `json:"events_from"`
	// Events and Output are where events and output go, on this machine; empty: nowhere.
	Events string `json:"events_file,omitempty"`
	Output string `json:"output,omitempty"`
	// Ended is set when the job has, Status is its exit status then.
	Ended  *time.Time `json:"ended,omitempty"`
	Status int        `json:"status"`
}

// jobFileVersion is the version of job.json. Of version 1, which held the secrets, jobs are listed
// and stopped, but not resumed.
const jobFileVersion = 2

// stateDirs are where jobs may have their folders, best first: the state folder, and for whoever
// has none that can be used the folder of the login, and last one of the user's own in temp.
func stateDirs(env []string, temp string) (all []string) {
	home, _ := lookup(env, "HOME")
	if dir, _ := lookup(env, "XDG_STATE_HOME"); filepath.IsAbs(dir) {
		all = append(all, filepath.Join(dir, "hvdrun", "jobs"))
	} else if filepath.IsAbs(home) {
		all = append(all, filepath.Join(home, ".local", "state", "hvdrun", "jobs"))
	}
	if dir, _ := lookup(env, "XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		all = append(all, filepath.Join(dir, "hvdrun", "jobs"))
	}
	return append(all, filepath.Join(temp, fmt.Sprintf("hvdrun-%d", os.Geteuid()), "jobs"))
}

// shared is a folder in which others may make files too.
const shared = "/tmp"

// usable returns why one of stateDirs cannot be used, where that is known before it is tried: those
// that are not below the home folder must be below one that is the user's alone. That in temp is
// made where asked for.
func usable(env []string, all, temp string, create bool) error {
	base := filepath.Dir(all)
	if runtime, _ := lookup(env, "XDG_RUNTIME_DIR"); runtime != "" && filepath.Dir(base) == filepath.Clean(runtime) {
		return safefile.SecretDir(runtime)
	}
	if filepath.Dir(base) != filepath.Clean(temp) || !strings.HasPrefix(filepath.Base(base), "hvdrun-") {
		return nil
	}
	if create {
		if err := safefile.MakeDir(base, safefile.Private); err != nil {
			return err
		}
	}
	return safefile.SecretDir(base)
}

// newJobDir makes the folder of a job that begins; nil where there can be none and none was asked
// for.
func (p *program) newJobDir(s *settings, command []string, authority *identity.Authority, log logrus.FieldLogger) (*jobDir, error) {
	pruneSecrets(p.env, time.Now())
	d := &jobDir{path: s.jobDir, named: s.jobDir != ""}
	d.about = jobFile{Version: jobFileVersion, RunID: s.runID, Begun: time.Now(), Command: command, Boot: bootID()}
	d.about.Host, _ = os.Hostname()
	key, err := authority.Encode()
	if err != nil {
		return nil, workFailed(err)
	}
	if d.about.Output, err = absolute(s.outputDir); err != nil {
		return nil, workFailed(err)
	}
	d.secrets = jobSecrets{authority: key, launch: launchFile{Args: p.args, Env: p.env, Config: s.configText, Orphan: s.orphanTime()}}
	if d.named {
		if err = d.make(s.eventsFile); err == nil {
			err = p.keepSecrets(s, d, log)
		}
		if err != nil {
			return nil, workFailed(fmt.Errorf("%s: %w", s.origin("job-dir"), err))
		}
		return d, nil
	}
	var failed []string
	home, _ := lookup(p.env, "HOME")
	if state, _ := lookup(p.env, "XDG_STATE_HOME"); !filepath.IsAbs(state) && !filepath.IsAbs(home) {
		failed = append(failed, "neither XDG_STATE_HOME nor HOME says where")
	}
	for _, all := range stateDirs(p.env, shared) {
		d.path = filepath.Join(all, d.about.RunID)
		err := usable(p.env, all, shared, true)
		if err == nil {
			prune(all, time.Now())
			err = d.make(s.eventsFile)
		}
		if err == nil {
			if len(failed) > 0 {
				log.Warnf("the job's folder is %s: %s", d.path, strings.Join(failed, "; "))
			}
			if err := p.keepSecrets(s, d, log); err != nil {
				log.WithError(err).Warn("the job cannot be resumed: there is no place for its key")
			}
			return d, nil
		}
		failed = append(failed, err.Error())
		d.undo()
	}
	log.Warnf("the job has no folder, so no command reaches it and it cannot be resumed: %s; --job-dir names one", strings.Join(failed, "; "))
	return nil, nil
}

// keepSecrets puts the job's secrets where another driver finds them, unless that is not wanted,
// and writes job.json.
func (p *program) keepSecrets(s *settings, d *jobDir, log logrus.FieldLogger) error {
	if s.noResume {
		return d.write()
	}
	d.secrets.launch.Job = d.path
	if err := d.putSecrets(secretPlaces(p.env), log); err != nil {
		d.secrets.dir, d.about.Keys = "", ""
		return errors.Join(err, d.write())
	}
	return nil
}

// undo removes what make has made before it failed.
func (d *jobDir) undo() {
	if d.agents.Journal != nil {
		_ = d.agents.Close() // nothing is in it
		d.agents = client.KnownFile{}
	}
	_ = os.RemoveAll(d.path) // no other job has the name
}

// make makes the folder and what is in it from the beginning, but job.json.
func (d *jobDir) make(eventsFile string) (err error) {
	if d.about.Dir, err = os.Getwd(); err != nil {
		return err
	}
	if fi, err := os.Stat(eventsFile); err == nil && eventsFile != "" {
		d.about.EventsFrom = fi.Size()
	}
	if d.about.Events, err = absolute(eventsFile); err != nil {
		return err
	}
	if d.path, err = filepath.Abs(d.path); err != nil {
		return err
	}
	_, missing := os.Lstat(d.path)
	if err := safefile.MakeDir(d.path, safefile.Private); err != nil {
		return err
	}
	if err := d.private(); err != nil {
		if errors.Is(missing, fs.ErrNotExist) {
			_ = os.Remove(d.path) // an empty folder would be all that is left
		}
		return err
	}
	if _, err := os.Lstat(d.journal()); err == nil {
		return fmt.Errorf("%s is the folder of another job", d.path)
	}
	d.agents, err = client.CreateKnown(d.agentsPath(), d.about.RunID)
	return err
}

// absolute is filepath.Abs, but an empty path stays one.
func absolute(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	return filepath.Abs(path)
}

// private refuses a folder that belongs to another user, or that others may enter. One that holds
// secrets must not be in a folder of others either, and nothing that root writes.
func (d *jobDir) private() error {
	if d.named || os.Geteuid() == 0 {
		return safefile.SecretDir(d.path)
	}
	return safefile.PrivateDir(d.path)
}

// write writes job.json, all of it or nothing.
func (d *jobDir) write() error {
	b, err := json.MarshalIndent(d.about, "", "\t")
	if err != nil {
		return err
	}
	return safefile.Replace(d.aboutPath(), append(b, '\n'), safefile.Private)
}

// maxAbout bounds job.json, in bytes: of version 1 it holds an environment.
const maxAbout = 64 << 20

// readJobDir returns the folder of a job, for looking.
func readJobDir(path string) (*jobDir, error) {
	d := &jobDir{path: path}
	text, err := readBounded(d.aboutPath(), maxAbout)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &d.about); err != nil {
		return nil, fmt.Errorf("%s: %w", d.aboutPath(), err)
	}
	if v := d.about.Version; v != jobFileVersion && v != 1 {
		return nil, fmt.Errorf("%s is of version %d; this program knows version %d", d.aboutPath(), d.about.Version, jobFileVersion)
	}
	if d.about.Version == 1 && d.about.Ended == nil {
		d.about.Keys = d.path
	}
	return d, nil
}

// open makes the folder that of a driver that goes on with the job, and returns what the one before
// had.
func (d *jobDir) open(env []string) (authority *identity.Authority, known []client.KnownAgent, err error) {
	if err := d.private(); err != nil {
		return nil, nil, err
	}
	if d.secrets, err = d.findSecrets(env); err != nil {
		return nil, nil, err
	}
	d.named = d.secrets.dir == d.path
	if authority, err = identity.DecodeAuthority(d.secrets.authority); err != nil {
		return nil, nil, err
	}
	d.agents, known, err = client.OpenKnown(d.agentsPath())
	return authority, known, err
}

// end forgets the secrets of a job that has ended, and all of one that never began. One that has
// not ended, since its new driver could not even begin, stays as it is.
func (d *jobDir) end(result error, log logrus.FieldLogger) {
	err := d.agents.Close()
	job, unread := d.inspect()
	switch {
	case errors.Is(unread, fs.ErrNotExist):
		err = errors.Join(err, os.Remove(d.agentsPath()), os.Remove(d.aboutPath()), gone(os.Remove(d.membersPath())), d.forgetTasks(),
			os.RemoveAll(d.slurmPath()), d.secrets.forget(), gone(os.Remove(d.path)))
	case unread != nil && !errors.Is(unread, journal.ErrBehind):
		err = errors.Join(err, unread)
	case job.Finished, unread != nil: // the end is not in the journal
		now := time.Now()
		d.about.Keys, d.about.Ended, d.about.Status = "", &now, status(result)
		err = errors.Join(err, d.secrets.forget(), d.write(), os.Remove(d.agentsPath()), gone(os.Remove(d.membersPath())), d.forgetTasks(),
			d.forgetSlurm())
	}
	if err != nil {
		log.WithError(err).Warn("the job's folder is not in order")
	}
}

// prune removes the folders of jobs that ended long ago.
func prune(all string, now time.Time) {
	entries, _ := os.ReadDir(all) // there may be none yet
	for _, e := range entries {
		path := filepath.Join(all, e.Name())
		d, err := readJobDir(path)
		if err != nil {
			continue
		}
		fi, err := os.Stat(d.journal())
		switch {
		case d.about.Ended != nil && now.Sub(*d.about.Ended) > keepEnded:
		case errors.Is(err, fs.ErrNotExist) && now.Sub(d.about.Begun) > keepEnded:
		case err == nil && now.Sub(fi.ModTime()) > keepLost:
			if running, err := journal.Locked(d.journal()); running || err != nil {
				continue
			}
		default:
			continue
		}
		_ = os.RemoveAll(path) // the next job tries again
	}
}

// findJob returns the folder of the job that a person means: by its run id, by the beginning of
// that, or by its path.
func findJob(env []string, name string) (*jobDir, error) {
	if strings.ContainsRune(name, filepath.Separator) {
		return readJobDir(name)
	}
	entries, places, err := jobEntries(env)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, path := range entries {
		if filepath.Base(path) == name {
			return readJobDir(path)
		}
		if name != "" && strings.HasPrefix(filepath.Base(path), name) {
			found = append(found, path)
		}
	}
	switch len(found) {
	case 0:
		return nil, fmt.Errorf("there is no job %s in %s; `hvdrun jobs` lists those there are", name, strings.Join(places, " or "))
	case 1:
		return readJobDir(found[0])
	}
	for i, path := range found {
		found[i] = filepath.Base(path)
	}
	return nil, fmt.Errorf("%s may be any of the jobs %s", name, strings.Join(found, " "))
}

// oneJob returns the run id that a person means, by its beginning, or the only one.
func oneJob(runs []string, name string) (string, error) {
	if slices.Contains(runs, name) {
		return name, nil
	}
	found := slices.DeleteFunc(slices.Clone(runs), func(run string) bool { return !strings.HasPrefix(run, name) })
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return "", fmt.Errorf("which of the jobs? %s", strings.Join(found, " "))
	case name == "":
		return "", errors.New("there is no job in etcd")
	}
	return "", fmt.Errorf("there is no job %s in etcd", name)
}

// jobEntries returns the paths of all folders of jobs, those of one place in the order of their
// names, and the places.
func jobEntries(env []string) (paths, places []string, err error) {
	for i, all := range stateDirs(env, shared) {
		if err := usable(env, all, shared, false); err != nil {
			continue // it is not this user's, and holds no job of theirs
		}
		entries, err := os.ReadDir(all)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) && !errors.Is(err, syscall.ENOTDIR) {
			return nil, nil, err
		}
		if err == nil || i == 0 {
			places = append(places, all)
		}
		for _, e := range entries {
			paths = append(paths, filepath.Join(all, e.Name()))
		}
	}
	return paths, places, nil
}

// listJobs returns all folders of jobs, in the order of their names, and those that cannot be read
// as errors.
func listJobs(env []string) (dirs []*jobDir, bad []error, err error) {
	entries, _, err := jobEntries(env)
	if err != nil {
		return nil, nil, err
	}
	for _, path := range entries {
		d, err := readJobDir(path)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		dirs = append(dirs, d)
	}
	return dirs, bad, nil
}

// inspect returns the state of the job.
func (d *jobDir) inspect() (driver.Job, error) { return driver.Inspect(d.journal()) }
