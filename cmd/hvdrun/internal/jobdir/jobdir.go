// Package jobdir creates, finds and lists the folders of jobs, in which a job keeps what another
// driver needs to take it over, stores their secrets, and talks to their drivers.
package jobdir

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

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

const (
	// keepEnded is how long the folder of a job that has ended is kept, keepLost that of one whose
	// driver is gone.
	keepEnded = 7 * 24 * time.Hour
	keepLost  = 30 * 24 * time.Hour
)

// Dir is the folder in which a job keeps what another driver must know to go on with it. Only
// its owner may enter it, and only its owner may read what is in it. Its secrets are elsewhere,
// unless a person has named the folder.
type Dir struct {
	Path    string
	Named   bool // by --job-dir
	About   File
	Secrets Secrets
	Agents  client.KnownFile // none: not open
}

// Journal is the driver's journal.
func (d *Dir) Journal() string { return filepath.Join(d.Path, "journal") }

// AgentsPath is the journal of the agents that the job's drivers have started.
func (d *Dir) AgentsPath() string { return filepath.Join(d.Path, "agents") }

// MembersPath has the addresses of some members of the agents' cluster.
func (d *Dir) MembersPath() string { return filepath.Join(d.Path, "members") }

// SlurmPath is the folder of what the agents on Slurm's nodes need.
func (d *Dir) SlurmPath() string { return filepath.Join(d.Path, "slurm") }

// ControlPath is the socket at which the driver takes commands.
func (d *Dir) ControlPath() string { return filepath.Join(d.Path, control.SocketName) }

// TasksPath is the socket at which the scheduler of tasks takes clients.
func (d *Dir) TasksPath() string { return filepath.Join(d.Path, scheduler.SocketName) }

// OutputPath is the file of what hvdrun and the workers print in the background.
func (d *Dir) OutputPath() string { return filepath.Join(d.Path, "output") }

// PagePath says where the driver serves the job's page.
func (d *Dir) PagePath() string { return filepath.Join(d.Path, "dashboard") }

func (d *Dir) aboutPath() string { return filepath.Join(d.Path, "job.json") }

// File is job.json: what is known of the job by those who list jobs.
type File struct {
	Version int    `json:"version"`
	RunID   string `json:"run"`
	// Name is the name that a person has given the job; empty: none.
	Name    string    `json:"name,omitempty"`
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

// FileVersion is the version of job.json. Jobs of version 1, which held the secrets, are listed and
// stopped, but not resumed.
const FileVersion = 2

// StateDirs are where jobs may have their folders, best first: the state folder, and for whoever
// has none that can be used the folder of the login, and last one of the user's own in temp.
func StateDirs(env []string, temp string) (all []string) {
	home, _ := cli.Lookup(env, "HOME")
	if dir, _ := cli.Lookup(env, "XDG_STATE_HOME"); filepath.IsAbs(dir) {
		all = append(all, filepath.Join(dir, "hvdrun", "jobs"))
	} else if filepath.IsAbs(home) {
		all = append(all, filepath.Join(home, ".local", "state", "hvdrun", "jobs"))
	}
	if dir, _ := cli.Lookup(env, "XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		all = append(all, filepath.Join(dir, "hvdrun", "jobs"))
	}
	return append(all, filepath.Join(temp, fmt.Sprintf("hvdrun-%d", os.Geteuid()), "jobs"))
}

// Shared is a folder in which others may make files too.
const Shared = "/tmp"

// Usable returns why one of StateDirs cannot be used, where that is known before it is tried: those
// that are not below the home folder must be below one that is the user's alone. With create it
// makes the one in temp.
func Usable(env []string, all, temp string, create bool) error {
	base := filepath.Dir(all)
	if runtime, _ := cli.Lookup(env, "XDG_RUNTIME_DIR"); runtime != "" && filepath.Dir(base) == filepath.Clean(runtime) {
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

// New makes the folder of a job that begins; nil where there can be none and none was asked
// for.
func New(p *cli.Program, s *settings.Settings, command []string, authority *identity.Authority, log logrus.FieldLogger) (*Dir, error) {
	PruneSecrets(p.Env, time.Now())
	d := &Dir{Path: s.JobDir, Named: s.JobDir != ""}
	d.About = File{Version: FileVersion, RunID: s.RunID, Name: s.Name, Begun: time.Now(), Command: command, Boot: journal.BootID()}
	d.About.Host, _ = os.Hostname()
	key, err := authority.Encode()
	if err != nil {
		return nil, cli.Failed(err)
	}
	if d.About.Output, err = absolute(s.OutputDir); err != nil {
		return nil, cli.Failed(err)
	}
	d.Secrets = Secrets{Authority: key, Launch: launchFile{Args: p.Args, Env: p.Env, Config: s.ConfigText, Hosts: s.HostsText, Orphan: s.OrphanTime()}}
	if d.Named {
		if err = d.make(s.EventsFile); err == nil {
			err = keepSecrets(p, s, d, log)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Origin("job-dir"), err)
		}
		return d, nil
	}
	var failed []string
	home, _ := cli.Lookup(p.Env, "HOME")
	if state, _ := cli.Lookup(p.Env, "XDG_STATE_HOME"); !filepath.IsAbs(state) && !filepath.IsAbs(home) {
		failed = append(failed, "neither XDG_STATE_HOME nor HOME says where")
	}
	for _, all := range StateDirs(p.Env, Shared) {
		d.Path = filepath.Join(all, d.About.RunID)
		err := Usable(p.Env, all, Shared, true)
		if err == nil {
			prune(all, time.Now())
			err = d.make(s.EventsFile)
		}
		if err == nil {
			if len(failed) > 0 {
				log.Warnf("the job's folder is %s: %s", d.Path, strings.Join(failed, "; "))
			}
			if err := keepSecrets(p, s, d, log); err != nil {
				log.WithError(err).Warn("the job cannot be resumed: there is no place for its key")
			}
			return d, nil
		}
		failed = append(failed, err.Error())
		d.Undo()
	}
	log.Warnf("the job has no folder, so no command reaches it and it cannot be resumed: %s; --job-dir names one", strings.Join(failed, "; "))
	return nil, nil
}

// keepSecrets puts the job's secrets where another driver finds them, unless that is not wanted,
// and writes job.json.
func keepSecrets(p *cli.Program, s *settings.Settings, d *Dir, log logrus.FieldLogger) error {
	if s.NoResume {
		return d.Write()
	}
	d.Secrets.Launch.Job = d.Path
	if err := d.PutSecrets(SecretPlaces(p.Env), log); err != nil {
		d.Secrets.Dir, d.About.Keys = "", ""
		return errors.Join(err, d.Write())
	}
	return nil
}

// Undo removes what make has made before it failed.
func (d *Dir) Undo() {
	if d.Agents.Journal != nil {
		_ = d.Agents.Close() // nothing is in it
		d.Agents = client.KnownFile{}
	}
	_ = os.RemoveAll(d.Path) // no other job has the name
}

// make makes the folder and what is in it from the beginning, but job.json.
func (d *Dir) make(eventsFile string) (err error) {
	if d.About.Dir, err = os.Getwd(); err != nil {
		return err
	}
	if fi, err := os.Stat(eventsFile); err == nil && eventsFile != "" {
		d.About.EventsFrom = fi.Size()
	}
	if d.About.Events, err = absolute(eventsFile); err != nil {
		return err
	}
	if d.Path, err = filepath.Abs(d.Path); err != nil {
		return err
	}
	_, missing := os.Lstat(d.Path)
	if err := safefile.MakeDir(d.Path, safefile.Private); err != nil {
		return err
	}
	if err := d.private(); err != nil {
		if errors.Is(missing, fs.ErrNotExist) {
			_ = os.Remove(d.Path) // an empty folder would be all that is left
		}
		return err
	}
	if _, err := os.Lstat(d.Journal()); err == nil {
		return fmt.Errorf("%s is the folder of another job", d.Path)
	}
	d.Agents, err = client.CreateKnown(d.AgentsPath(), d.About.RunID)
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
func (d *Dir) private() error {
	if d.Named || os.Geteuid() == 0 {
		return safefile.SecretDir(d.Path)
	}
	return safefile.PrivateDir(d.Path)
}

// Write writes job.json, all of it or nothing.
func (d *Dir) Write() error {
	b, err := json.MarshalIndent(d.About, "", "\t")
	if err != nil {
		return err
	}
	return safefile.Replace(d.aboutPath(), append(b, '\n'), safefile.Private)
}

// maxAbout bounds job.json, in bytes. In version 1 it contains an environment.
const maxAbout = 64 << 20

// Read returns the folder of a job, for looking.
func Read(path string) (*Dir, error) {
	d := &Dir{Path: path}
	text, err := cli.ReadBounded(d.aboutPath(), maxAbout)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &d.About); err != nil {
		return nil, fmt.Errorf("%s: %w", d.aboutPath(), err)
	}
	if v := d.About.Version; v != FileVersion && v != 1 {
		return nil, fmt.Errorf("%s is of version %d; this program knows version %d", d.aboutPath(), d.About.Version, FileVersion)
	}
	if d.About.Version == 1 && d.About.Ended == nil {
		d.About.Keys = d.Path
	}
	return d, nil
}

// Open makes the folder that of a driver that goes on with the job, and returns what the one before
// had.
func (d *Dir) Open(env []string) (authority *identity.Authority, known []client.KnownAgent, err error) {
	if err := d.private(); err != nil {
		return nil, nil, err
	}
	if d.Secrets, err = d.FindSecrets(env); err != nil {
		return nil, nil, err
	}
	d.Named = d.Secrets.Dir == d.Path
	if authority, err = identity.DecodeAuthority(d.Secrets.Authority); err != nil {
		return nil, nil, err
	}
	d.Agents, known, err = client.OpenKnown(d.AgentsPath())
	return authority, known, err
}

// End forgets the secrets of a job that has ended, and all of one that never began. One that has
// not ended, since its new driver could not even begin, stays as it is.
func (d *Dir) End(result error, log logrus.FieldLogger) {
	err := d.Agents.Close()
	job, unread := d.Inspect()
	switch {
	case errors.Is(unread, fs.ErrNotExist):
		err = errors.Join(err, os.Remove(d.AgentsPath()), os.Remove(d.aboutPath()), gone(os.Remove(d.MembersPath())), d.forgetTasks(),
			os.RemoveAll(d.SlurmPath()), d.Secrets.forget(), gone(os.Remove(d.Path)))
	case unread != nil && !errors.Is(unread, journal.ErrBehind):
		err = errors.Join(err, unread)
	case job.Finished, unread != nil: // the end is not in the journal
		now := time.Now()
		d.About.Keys, d.About.Ended, d.About.Status = "", &now, cli.Status(result)
		err = errors.Join(err, d.Secrets.forget(), d.Write(), os.Remove(d.AgentsPath()), gone(os.Remove(d.MembersPath())), d.forgetTasks(),
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
		d, err := Read(path)
		if err != nil {
			continue
		}
		fi, err := os.Stat(d.Journal())
		switch {
		case d.About.Ended != nil && now.Sub(*d.About.Ended) > keepEnded:
		case errors.Is(err, fs.ErrNotExist) && now.Sub(d.About.Begun) > keepEnded:
		case err == nil && now.Sub(fi.ModTime()) > keepLost:
			if running, err := journal.Locked(d.Journal()); running || err != nil {
				continue
			}
		default:
			continue
		}
		_ = os.RemoveAll(path) // the next job tries again
	}
}

// nameDigits is the number of random digits after the name in the run id of a job that has a name.
// Agents end the workers of a run whose id another driver of the same user brings, so that jobs of
// one name that run at the same time, from several machines, must differ.
const nameDigits = 8

// NewRunID returns a run id that no folder of a job has: a random one, with the job's name before
// it unless that is empty.
func NewRunID(env []string, name string) string {
	entries, _, _ := JobEntries(env) // where they cannot be read, chance must do
	for {
		id := driver.NewRunID()
		if name != "" {
			id = name + "-" + id[:nameDigits]
		}
		if !slices.ContainsFunc(entries, func(path string) bool { return filepath.Base(path) == id }) {
			return id
		}
	}
}

// Find returns the folder of the job that a person means: by its run id, by the beginning of
// that, by its name, or by its path. Of several jobs that match, the one that has not ended is
// meant.
func Find(env []string, name string) (*Dir, error) {
	if strings.ContainsRune(name, filepath.Separator) {
		return Read(name)
	}
	entries, places, err := JobEntries(env)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, path := range entries {
		if filepath.Base(path) == name {
			return Read(path)
		}
		if name != "" && strings.HasPrefix(filepath.Base(path), name) {
			found = append(found, path)
		}
	}
	switch {
	case len(found) == 0 && len(places) == 0:
		return nil, fmt.Errorf("there is no job %s: no folder of jobs is known, as neither XDG_STATE_HOME nor HOME is set", name)
	case len(found) == 0:
		return nil, fmt.Errorf("there is no job %s in %s; `hvdrun jobs` lists the existing ones", name, strings.Join(places, " or "))
	case len(found) == 1:
		return Read(found[0])
	}
	return oneOf(found, name)
}

// oneOf returns the one of several folders that a person means by the beginning of its run id: of
// those whose job has that name, or else of all, the one whose job has not ended.
func oneOf(paths []string, name string) (*Dir, error) {
	var named, all []*Dir
	for _, path := range paths {
		if d, err := Read(path); err == nil {
			all = append(all, d)
			if d.About.Name == name {
				named = append(named, d)
			}
		}
	}
	if len(named) > 0 {
		all = named
	}
	if len(all) == 1 {
		return all[0], nil
	}
	if open := slices.DeleteFunc(slices.Clone(all), func(d *Dir) bool { return d.About.Ended != nil }); len(open) == 1 {
		return open[0], nil
	}
	var ids []string
	for _, d := range all {
		ids = append(ids, d.About.RunID)
	}
	return nil, fmt.Errorf("%s may be any of the jobs %s", name, strings.Join(ids, " "))
}

// OneJob returns the run id that a person means, by its beginning, or the only one.
func OneJob(runs []string, name string) (string, error) {
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

// JobEntries returns the paths of all folders of jobs, those of one place in the order of their
// names, and the places.
func JobEntries(env []string) (paths, places []string, err error) {
	for i, all := range StateDirs(env, Shared) {
		if err := Usable(env, all, Shared, false); err != nil {
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

// List returns all folders of jobs, in the order of their names, and those that cannot be read
// as errors.
func List(env []string) (dirs []*Dir, bad []error, err error) {
	entries, _, err := JobEntries(env)
	if err != nil {
		return nil, nil, err
	}
	for _, path := range entries {
		d, err := Read(path)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		dirs = append(dirs, d)
	}
	return dirs, bad, nil
}

// Inspect returns the state of the job.
func (d *Dir) Inspect() (driver.Job, error) { return driver.Inspect(d.Journal()) }

// forgetSlurm removes the key of a job that has ended, and what needs it. The agents' output stays.
func (d *Dir) forgetSlurm() error {
	c := settings.SlurmSettings{Folder: d.SlurmPath()}
	var failed error
	for _, path := range []string{c.KeyPath(), c.JoinPath(), c.AgentPath(), c.BatchPath()} {
		failed = errors.Join(failed, gone(os.Remove(path)))
	}
	_ = os.Remove(c.Folder) // where nothing is in it
	return failed
}

// Close forgets the secrets of a job that was stopped without its driver.
func (d *Dir) Close() error {
	err := errors.Join(d.Agents.Close(), d.Secrets.forget(), gone(os.Remove(d.AgentsPath())), gone(os.Remove(d.MembersPath())))
	if d.About.Version != 0 { // else there is no job.json that could be written anew
		stopped := time.Now()
		d.About.Keys, d.About.Ended = "", &stopped
		d.About.Status = cli.Status(cli.Failed(job.StopSignal{Signal: syscall.SIGTERM}))
		err = errors.Join(err, d.Write())
	}
	if err != nil {
		return cli.Failed(err)
	}
	return nil
}

// gone drops an error that says that there is no such file.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// TasksJournal is where the job's tasks are written down.
func (d *Dir) TasksJournal() string { return filepath.Join(d.Path, "tasks.journal") }

// forgetTasks removes the journal of tasks of a job that is over.
func (d *Dir) forgetTasks() error {
	for _, path := range []string{d.TasksJournal(), d.TasksJournal() + ".damaged"} {
		if err := journal.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
