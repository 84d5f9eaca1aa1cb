package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/journal/etcd"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// The files of a job's copy in etcd.
const (
	copiedAbout  = "job.json"
	copiedLaunch = "launch.json"
	copiedKey    = "authority"
	copiedAgents = "agents"
)

// journalSettings say where the copy of a job's journal is, with which a driver on another machine
// goes on with the job.
type journalSettings struct {
	url, keyFile string
	lease        time.Duration
}

// store connects to where the copy is.
func (j journalSettings) store(ctx context.Context, log logrus.FieldLogger) (*etcd.Store, error) {
	cfg, err := etcd.ParseURL(j.url)
	if err != nil {
		return nil, fmt.Errorf("--journal: %w", err)
	}
	if j.keyFile == "" {
		return nil, errors.New("--journal-key-file is missing: what is in etcd is sealed with the key in it (hvdrun agent --generate-key F)")
	}
	if cfg.Secret, err = identity.ReadClusterKey(j.keyFile); err != nil {
		return nil, fmt.Errorf("--journal-key-file: %w", err)
	}
	if j.lease != 0 && j.lease < etcd.LeastLease {
		return nil, fmt.Errorf("--journal-lease: %v is less than %v", j.lease, etcd.LeastLease)
	}
	cfg.Lease, cfg.Log = j.lease, log
	store, err := etcd.Open(ctx, cfg)
	if err != nil {
		return nil, workFailed(fmt.Errorf("--journal: %w", err))
	}
	return store, nil
}

// checkJournal checks the settings of the copy against each other.
func (s *settings) checkJournal() error {
	switch {
	case s.journal.url == "" && s.journal.keyFile != "":
		return fmt.Errorf("%s is given without --journal", s.origin("journal-key-file"))
	case s.journal.url != "" && s.noResume:
		return fmt.Errorf("%s and %s: a job that cannot be resumed needs no journal", s.origin("journal"), s.origin("no-resume"))
	}
	return nil
}

// jobClaim makes this process its job's only driver, and takes what another one needs to go on with
// the job. It is an *etcd.Claim or a *seat.
type jobClaim interface {
	Append(payload []byte)
	Replace(records [][]byte)
	SetBehind()
	Put(name string, value []byte)
	Sync() error
	State() string
	Lost() <-chan struct{}
	Release(finished bool) error
}

// claimed is a driver's claim to its job, and the job's copy.
type claimed struct {
	claim jobClaim
	id    string       // of the claim, where folders of jobs name it
	close func() error // of where the copy is
	log   *logrus.Logger
	die   func() // ends this process at once; its workers stay

	mu     sync.Mutex
	agents []byte // what is copied of the job's agents, a line each

	done     chan struct{}
	watching sync.WaitGroup
}

// claimJob makes this process the job's only driver, and returns the claim before this one.
func (p *program) claimJob(ctx context.Context, store *etcd.Store, run string, log *logrus.Logger) (c *claimed, previous string, err error) {
	host, _ := os.Hostname()
	claim, err := store.Claim(ctx, run, fmt.Sprintf("%s, process %d", host, os.Getpid()))
	if err != nil {
		return nil, "", err
	}
	c = p.holds(claim, "etcd was not reached for the time of --journal-lease: another hvdrun may go on with the job, so this one "+
		"ends; the workers train on. hvdrun resume --journal takes the job over", log)
	c.id, c.close = claim.ID, store.Close
	return c, claim.Previous, nil
}

// holds ends this process when it loses its claim, and says why.
func (p *program) holds(claim jobClaim, why string, log *logrus.Logger) *claimed {
	c := &claimed{claim: claim, close: func() error { return nil }, log: log, done: make(chan struct{})}
	c.die = sync.OnceFunc(func() {
		log.Error(why)
		_ = p.log.flush(hurriedFlush)
		os.Exit(job.ExitStatus(errors.New("")))
	})
	c.watching.Go(func() {
		select {
		case <-claim.Lost():
			c.die()
		case <-c.done:
		}
	})
	return c
}

// Append, Replace, SetBehind, Sync and State implement driver.Mirror.
func (c *claimed) Append(payload []byte)    { c.claim.Append(payload) }
func (c *claimed) Replace(records [][]byte) { c.claim.Replace(records) }
func (c *claimed) SetBehind()               { c.claim.SetBehind() }
func (c *claimed) State() string            { return c.claim.State() }
func (c *claimed) Sync() {
	if c.claim.Sync() != nil {
		c.die()
	}
}

// copy puts what another driver needs besides the journal into etcd.
func (c *claimed) copy(d *jobDir, known []client.KnownAgent) error {
	about := d.about
	about.Keys = ""
	for name, value := range map[string]any{copiedAbout: about, copiedLaunch: d.secrets.launch} {
		text, err := json.Marshal(value)
		if err != nil {
			return err
		}
		c.claim.Put(name, text)
	}
	c.claim.Put(copiedKey, []byte(d.secrets.authority))
	for _, k := range known {
		if err := c.begun(k); err != nil {
			return err
		}
	}
	c.Sync()
	return nil
}

// begun puts an agent of the job into etcd, before it is used.
func (c *claimed) begun(k client.KnownAgent) error {
	text, err := json.Marshal(k)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.agents = append(append(c.agents, text...), '\n')
	c.claim.Put(copiedAgents, bytes.Clone(c.agents))
	c.Sync()
	return nil
}

// release ends the claim, and removes the copy of a job that has finished.
func (c *claimed) release(finished bool) {
	close(c.done)
	c.watching.Wait()
	if err := c.claim.Release(finished); err != nil {
		c.log.WithError(err).Warn("etcd keeps the job's journal until its lease ends")
	}
	_ = c.close()
}

// beginCopy claims a job that begins, and copies it.
func (p *program) beginCopy(ctx context.Context, s *settings, d *jobDir, log *logrus.Logger) (*claimed, error) {
	if d == nil || d.secrets.dir == "" {
		return nil, fmt.Errorf("%s: the job cannot be resumed: it has no folder, or no place for its key", s.origin("journal"))
	}
	store, err := s.journal.store(ctx, log)
	if err != nil {
		return nil, err
	}
	c, _, err := p.claimJob(ctx, store, s.runID, log)
	if err == nil {
		err = c.keep(d, nil)
	}
	if err != nil {
		return nil, workFailed(errors.Join(fmt.Errorf("%s: %w", s.origin("journal"), err), store.Close()))
	}
	return c, nil
}

// keep writes down in the job's folder which claim it has seen last, and copies the job.
func (c *claimed) keep(d *jobDir, known []client.KnownAgent) error {
	d.about.Claim = c.id
	if err := d.write(); err != nil {
		return err
	}
	return c.copy(d, known)
}

// resumeCopy claims a job that goes on from its folder on this machine.
func (p *program) resumeCopy(ctx context.Context, s *settings, d *jobDir, known []client.KnownAgent, log *logrus.Logger) (*claimed, error) {
	store, err := s.journal.store(ctx, log)
	if err != nil {
		return nil, err
	}
	c, previous, err := p.claimJob(ctx, store, d.about.RunID, log)
	if err == nil && previous != d.about.Claim {
		c.release(false)
		return nil, errors.New("another machine has gone on with it since: hvdrun resume --journal takes the job from etcd")
	}
	if err == nil {
		err = c.keep(d, known)
	}
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return c, nil
}

// resumeFlags are those of hvdrun resume.
type resumeFlags struct {
	journal journalSettings
	standby bool
}

func (f *resumeFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.journal.url, "journal", "", "take the job from its copy `URL` (etcd://HOST:PORT), on any machine")
	cmd.Flags().StringVar(&f.journal.keyFile, "journal-key-file", "", "with --journal, `F` holds the key of the copy")
	cmd.Flags().BoolVar(&f.standby, "standby", false, "with --journal, wait until the job's driver is gone")
}

// check returns what is wrong with the flags.
func (f *resumeFlags) check() error {
	if f.journal.url == "" && (f.standby || f.journal.keyFile != "") {
		return errors.New("--standby and --journal-key-file need --journal")
	}
	return nil
}

// resumeFromCopy goes on with a job whose driver was on another machine perhaps.
func (p *program) resumeFromCopy(ctx context.Context, f resumeFlags, name string) error {
	log := p.logger(&settings{outputSettings: outputSettings{logLevel: logrus.InfoLevel}})
	store, err := f.journal.store(ctx, log)
	if err != nil {
		return err
	}
	run, c, err := p.awaitClaim(ctx, store, name, f.standby, log)
	if err != nil {
		return workFailed(errors.Join(err, store.Close()))
	}
	found, err := store.Read(ctx, run)
	var d *jobDir
	if err == nil {
		d, err = p.placeCopy(c, run, jobCopy{Records: found.Records, Files: found.Files})
	}
	if err != nil {
		c.release(false)
		if errors.Is(err, etcd.ErrNoJob) && f.standby {
			log.Infof("job %s has ended", run)
			return nil
		}
		return workFailed(fmt.Errorf("job %s cannot be resumed: %w", run, err))
	}
	return p.resumeClaimed(ctx, d, c)
}

// awaitClaim claims the job that a person means, or the only one. With standby it waits until the
// job's driver is gone.
func (p *program) awaitClaim(
	ctx context.Context, store *etcd.Store, name string, standby bool, log *logrus.Logger,
) (run string, c *claimed, err error) {
	runs, err := store.Jobs(ctx)
	if err == nil {
		run, err = oneJob(runs, name)
	}
	for told := false; err == nil; told = true {
		if c, _, err = p.claimJob(ctx, store, run, log); err == nil {
			return run, c, nil
		}
		var held *etcd.HeldError
		if !errors.As(err, &held) || !standby {
			return run, nil, fmt.Errorf("job %s cannot be resumed: %w", run, err)
		}
		if !told {
			log.Infof("job %s: %v; waiting for its end", run, held)
		}
		err = store.Await(ctx, run)
	}
	return run, nil, err
}

// jobCopy is the copy of a job as it is found.
type jobCopy struct {
	Records [][]byte
	Files   map[string][]byte
	Args    []string // of hvdrun on this machine; nil: those of the copy
}

// placeCopy makes a job's folder on this machine from its copy. An empty run is that of the copy.
func (p *program) placeCopy(c *claimed, run string, found jobCopy) (*jobDir, error) {
	d := &jobDir{}
	if err := errors.Join(
		json.Unmarshal(found.Files[copiedAbout], &d.about), json.Unmarshal(found.Files[copiedLaunch], &d.secrets.launch),
	); err != nil {
		return nil, err
	}
	if run != "" && d.about.RunID != run || d.about.Version != jobFileVersion {
		return nil, fmt.Errorf("the copy is of run %q and version %d; this program knows version %d", d.about.RunID, d.about.Version, jobFileVersion)
	}
	d.about.EventsFrom, d.about.Events, d.about.Output = 0, "", ""
	d.secrets.authority = string(found.Files[copiedKey])
	if found.Args != nil {
		d.secrets.launch.Args = found.Args
	}
	if err := d.chooseFolder(p.env); err != nil {
		return nil, err
	}
	d.secrets.launch.Job = d.path
	if err := d.fill(found); err != nil {
		d.undo()
		return nil, err
	}
	if err := d.putSecrets(secretPlaces(p.env), c.log); err != nil {
		return nil, err
	}
	d.about.Claim = c.id
	d.about.Host, _ = os.Hostname()
	d.about.Boot = bootID()
	return d, d.write()
}

// chooseFolder makes the first folder in which the job may be on this machine. What a driver of
// this machine has left there is removed: etcd has what counts.
func (d *jobDir) chooseFolder(env []string) error {
	var failed []error
	for _, all := range stateDirs(env, shared) {
		d.path = filepath.Join(all, d.about.RunID)
		err := usable(env, all, shared, true)
		if err == nil {
			var running bool
			running, err = journal.Locked(d.journal())
			switch {
			case running:
				return errors.New("its driver on this machine is running")
			case errors.Is(err, fs.ErrNotExist):
				err = nil
			case err == nil:
				err = os.RemoveAll(d.path)
			}
		}
		if err == nil {
			err = safefile.MakeDir(d.path, safefile.Private)
		}
		if err == nil {
			err = d.private()
		}
		if err == nil {
			return nil
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}

// fill writes the journals of the copy into the folder.
func (d *jobDir) fill(found jobCopy) error {
	agents := bytes.Split(bytes.TrimSpace(found.Files[copiedAgents]), []byte("\n"))
	for path, records := range map[string][][]byte{d.journal(): found.Records, d.agentsPath(): agents} {
		j, err := journal.Create(path, d.about.RunID)
		if err != nil {
			return err
		}
		for _, r := range records {
			if len(r) > 0 && err == nil {
				err = j.Append(r)
			}
		}
		if err := errors.Join(err, j.Sync(), j.Close()); err != nil {
			return err
		}
	}
	return nil
}
