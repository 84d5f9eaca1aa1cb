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
	// keepEnded is how long the folder of a job that has ended is kept, and keepLost how long the
	// folder of a job whose driver is gone.
	keepEnded = 7 * 24 * time.Hour
	keepLost  = 30 * 24 * time.Hour
)

// Dir is the folder in which a job keeps what another driver needs to take it over. Only its owner
// may enter the folder or read its files. The job's secrets are elsewhere, unless the user named
// the folder.
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

// MembersPath is the file with the addresses of some members of the agents' cluster.
func (d *Dir) MembersPath() string { return filepath.Join(d.Path, "members") }

// SlurmPath is the folder with the files that the agents on Slurm's nodes need.
func (d *Dir) SlurmPath() string { return filepath.Join(d.Path, "slurm") }

// ControlPath is the socket at which the driver accepts commands.
func (d *Dir) ControlPath() string { return filepath.Join(d.Path, control.SocketName) }

// TasksPath is the socket at which the scheduler of tasks accepts clients.
func (d *Dir) TasksPath() string { return filepath.Join(d.Path, scheduler.SocketName) }

// OutputPath is the file of the output of hvdrun and its workers when they run in the background.
func (d *Dir) OutputPath() string { return filepath.Join(d.Path, "output") }

// PagePath is the file with the address at which the driver serves the job's page.
func (d *Dir) PagePath() string { return filepath.Join(d.Path, "dashboard") }

func (d *Dir) aboutPath() string { return filepath.Join(d.Path, "job.json") }

// File is the content of job.json, which describes the job to commands that list jobs.
type File struct {
	Version int    `json:"version"`
	RunID   string `json:"run"`
	// Name is the name that the user gave the job; empty: none.
	Name    string    `json:"name,omitempty"`
	Begun   time.Time `json:"begun"`
	Command []string  `json:"command"`
	Dir     string    `json:"dir"`
	// Host is the machine of the job's driver, and Boot identifies the machine's boot.
	Host string `json:"host,omitempty"`
	Boot string `json:"boot,omitempty"`
	// Keys is the folder of the job's secrets. Empty: only the driver's memory has them.
	Keys string `json:"keys,omitempty"`
	// Claim identifies the last claim of this folder's driver to the job, if the job has a copy in
	// etcd.
	Claim string `json:"claim,omitempty"`
	// EventsFrom is the length of the events file, in bytes, when the job began.
	EventsFrom int64 `json:"events_from"`
	// Events and Output are the files on this machine to which events and output are written;
	// empty: none.
	Events string `json:"events_file,omitempty"`
	Output string `json:"output,omitempty"`
	// Ended is when the job ended, and Status its exit status. nil: it has not ended.
	Ended  *time.Time `json:"ended,omitempty"`
	Status int        `json:"status"`
}

// FileVersion is the version of job.json.
const FileVersion = 2

// StateDirs returns the places for the folders of jobs, best first: the user's state folder; if
// that cannot be used, the folder of the login session; as the last resort, a folder in temp that
// belongs to the user.
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

// Shared is a folder in which other users may create files too.
const Shared = "/tmp"

// Usable returns the reason why one of StateDirs cannot be used, as far as that is known without
// creating a file there: a place outside the home folder must be below a folder that only the user
// may enter. If create is true, Usable makes the one in temp.
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

// New makes the folder of a new job. It returns nil if no folder can be made and the user asked for
// none.
func New(p *cli.Program, s *settings.Settings, command []string, authority *identity.Authority, log logrus.FieldLogger) (*Dir, error) {
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
		failed = append(failed, "neither XDG_STATE_HOME nor HOME is set")
	}
	for _, all := range StateDirs(p.Env, Shared) {
		d.Path = filepath.Join(all, d.About.RunID)
		err := Usable(p.Env, all, Shared, true)
		if err == nil {
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

// keepSecrets stores the job's secrets where another driver finds them, unless --no-resume is set,
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

// Undo removes what make made before it failed.
func (d *Dir) Undo() {
	if d.Agents.Journal != nil {
		_ = d.Agents.Close() // nothing is in it
		d.Agents = client.KnownFile{}
	}
	_ = os.RemoveAll(d.Path) // no other job has the name
}

// make makes the folder and its initial files, except job.json.
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

// absolute is like filepath.Abs, but leaves an empty path empty.
func absolute(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	return filepath.Abs(path)
}

// private refuses a folder that belongs to another user, or that others may enter. A folder that
// holds secrets, or that root writes to, must not be inside a folder of another user either.
func (d *Dir) private() error {
	if d.Named || os.Geteuid() == 0 {
		return safefile.SecretDir(d.Path)
	}
	return safefile.PrivateDir(d.Path)
}

// Write writes job.json atomically.
func (d *Dir) Write() error {
	b, err := json.MarshalIndent(d.About, "", "\t")
	if err != nil {
		return err
	}
	return safefile.Replace(d.aboutPath(), append(b, '\n'), safefile.Private)
}

// maxAbout bounds job.json, in bytes.
const maxAbout = 64 << 20

// Read returns the folder of a job, for reading only.
func Read(path string) (*Dir, error) {
	d := &Dir{Path: path}
	text, err := safefile.Text(d.aboutPath(), maxAbout)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &d.About); err != nil {
		return nil, fmt.Errorf("%s: %w", d.aboutPath(), err)
	}
	if d.About.Version != FileVersion {
		return nil, fmt.Errorf("%s is of version %d; this program knows version %d", d.aboutPath(), d.About.Version, FileVersion)
	}
	return d, nil
}

// Open prepares the folder for a driver that takes over the job, and returns what the previous
// driver left: the job's authority and the agents that its drivers started.
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

// End removes the secrets of a job that has ended, and the whole folder of a job that never began.
// It leaves the folder of a job that has not ended unchanged, for instance when its new driver
// could not start.
func (d *Dir) End(result error, log logrus.FieldLogger) {
	err := d.Agents.Close()
	job, unread := d.Inspect()
	switch {
	case errors.Is(unread, fs.ErrNotExist):
		err = errors.Join(err, d.forget(), os.RemoveAll(d.SlurmPath()), os.Remove(d.aboutPath()), gone(os.Remove(d.Path)))
	case unread != nil && !errors.Is(unread, journal.ErrBehind):
		err = errors.Join(err, unread)
	case job.Finished, unread != nil: // the journal does not record the end
		now := time.Now()
		d.About.Keys, d.About.Ended, d.About.Status = "", &now, cli.Status(result)
		err = errors.Join(err, d.forget(), d.Write())
	}
	if err != nil {
		log.WithError(err).Warn("the job's folder is not as expected")
	}
}

// Prune removes the folders of this user's jobs that ended long ago, and the secrets that
// PruneSecrets removes.
func Prune(env []string, now time.Time) {
	PruneSecrets(env, now)
	for _, all := range StateDirs(env, Shared) {
		if Usable(env, all, Shared, false) == nil {
			prune(all, now)
		}
	}
}

// prune does the work of Prune in one folder of jobs. Every job prunes, so prune reads only the
// job.json files that were last written long ago.
func prune(all string, now time.Time) {
	entries, _ := os.ReadDir(all) // the folder may not exist yet
	for _, e := range entries {
		path := filepath.Join(all, e.Name())
		if fi, err := os.Lstat((&Dir{Path: path}).aboutPath()); err != nil || now.Sub(fi.ModTime()) <= keepEnded {
			continue
		}
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
// An agent ends the workers of a run when another driver of the same user uses the same run id. So
// jobs of one name that run at the same time, from several machines, need different ids.
const nameDigits = 8

// NewRunID returns a run id that no job folder uses: random digits, after the job's name if name is
// not empty.
func NewRunID(env []string, name string) string {
	entries, _, _ := JobEntries(env) // if they cannot be read, a random id is unlikely to be taken
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

// isJob reports whether a folder is that of a job.
func isJob(path string) bool {
	_, err := os.Lstat((&Dir{Path: path}).aboutPath())
	return err == nil
}

// Find returns the folder of the job that name identifies: by its run id, by the beginning of the
// run id, by its name, or by its path. If several jobs match, Find returns the one that has not
// ended, or an error if that is not exactly one.
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
	case len(found) == 0 && isJob(name):
		return nil, fmt.Errorf("there is no job %s; the one in the folder of this name is ./%[1]s", name)
	case len(found) == 0 && len(places) == 0:
		return nil, fmt.Errorf("there is no job %s: no folder of jobs is known, as neither XDG_STATE_HOME nor HOME is set", name)
	case len(found) == 0:
		return nil, fmt.Errorf("there is no job %s in %s; `hvdrun jobs` lists the existing ones", name, strings.Join(places, " or "))
	case len(found) == 1:
		return Read(found[0])
	}
	return oneOf(found, name)
}

// oneOf returns the one of several folders whose run ids begin with name. It prefers jobs whose
// name is exactly that, and among these the one that has not ended.
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

// OneJob returns the run id that begins with name, or the only run id if name is empty.
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

// JobEntries returns the paths of all job folders, sorted by name within each place, and the
// places.
func JobEntries(env []string) (paths, places []string, err error) {
	for i, all := range StateDirs(env, Shared) {
		if err := Usable(env, all, Shared, false); err != nil {
			continue // it belongs to another user and holds no job of this user
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

// List returns all job folders, sorted by name, and an error in bad for each folder that cannot be
// read.
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

// forget removes the secrets of a job that is over, and what only its drivers and agents need. The
// output of agents on Slurm's nodes stays.
func (d *Dir) forget() error {
	err := d.Secrets.forget()
	c := settings.SlurmSettings{Folder: d.SlurmPath()}
	for _, path := range []string{d.AgentsPath(), d.MembersPath(), c.KeyPath(), c.JoinPath(), c.AgentPath(), c.BatchPath()} {
		err = errors.Join(err, gone(os.Remove(path)))
	}
	_ = os.Remove(c.Folder) // only if it is empty
	for _, path := range []string{d.TasksJournal(), d.TasksJournal() + ".damaged"} {
		err = errors.Join(err, gone(journal.Remove(path)))
	}
	return err
}

// Close records the end of a job that was stopped without its driver, and removes its secrets.
func (d *Dir) Close() error {
	err := errors.Join(d.Agents.Close(), d.forget())
	if d.About.Version != 0 { // otherwise no job.json was read that could be rewritten
		stopped := time.Now()
		d.About.Keys, d.About.Ended = "", &stopped
		d.About.Status = cli.Status(cli.Failed(job.StopSignal{Signal: syscall.SIGTERM}))
		err = errors.Join(err, d.Write())
	}
	return cli.Failed(err)
}

// gone returns err, or nil if err reports that the file does not exist.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// TasksJournal is the journal of the job's tasks.
func (d *Dir) TasksJournal() string { return filepath.Join(d.Path, "tasks.journal") }
