package jobrun

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/journal/etcd"
	"github.com/hvdrun/hvdrun/job"
)

// store connects to the etcd that holds the copy.
func store(ctx context.Context, j settings.JournalSettings, log logrus.FieldLogger) (*etcd.Store, error) {
	cfg, err := etcd.ParseURL(j.URL)
	if err != nil {
		return nil, fmt.Errorf("--journal: %w", err)
	}
	if j.KeyFile == "" {
		return nil, errors.New("--journal-key-file is missing: its key encrypts what is in etcd (hvdrun agent --generate-key F makes one)")
	}
	if cfg.Secret, err = identity.ReadClusterKey(j.KeyFile); err != nil {
		return nil, fmt.Errorf("--journal-key-file: %w", err)
	}
	if j.Lease != 0 && j.Lease < etcd.LeastLease {
		return nil, fmt.Errorf("--journal-lease: %v is less than %v", j.Lease, etcd.LeastLease)
	}
	cfg.Lease, cfg.Log = j.Lease, log
	store, err := etcd.Open(ctx, cfg)
	if err != nil {
		return nil, cli.Failed(fmt.Errorf("--journal: %w", err))
	}
	return store, nil
}

// checkJournal returns an error if settings of the copy contradict each other.
func checkJournal(s *settings.Settings) error {
	switch {
	case s.Journal.URL == "" && s.Journal.KeyFile != "":
		return fmt.Errorf("%s is given without --journal", s.Origin("journal-key-file"))
	case s.Journal.URL != "" && s.NoResume:
		return fmt.Errorf("%s and %s: a job that cannot be resumed needs no journal", s.Origin("journal"), s.Origin("no-resume"))
	}
	return nil
}

// Claim makes this process the only driver of its job, and copies what another driver needs to take
// the job over. It is an *etcd.Claim or a *seat.
type Claim interface {
	Append(payload []byte)
	Replace(records [][]byte)
	SetBehind()
	Put(name string, value []byte)
	Sync() error
	State() string
	Lost() <-chan struct{}
	Release(finished bool) error
}

// Claimed is a driver's claim on its job, with the copy of the job. It is a driver.Mirror.
type Claimed struct {
	Claim
	id    string       // of the claim, as recorded in job folders; empty for a seat
	close func() error // closes the store of the copy
	log   *logrus.Logger
	die   func() // ends this process at once; its workers keep running

	mu     sync.Mutex
	agents []client.KnownAgent // the agents in the copy: the last one of each host

	unwatch func() // ends the goroutine of Holds
}

// copyJournal makes the driver copy its journal if the process has a claim on the job. stop
// releases the claim.
func copyJournal(_ context.Context, r *run) (stop func(), err error) {
	if r.copy == nil {
		return nil, nil
	}
	r.cfg.Mirror = r.copy
	return func() { r.copy.Release(r.dir.About.Ended != nil) }, nil
}

// claimJob makes this process the job's only driver. It returns the id of the previous claim too.
func claimJob(ctx context.Context, p *cli.Program, store *etcd.Store, run string, log *logrus.Logger) (c *Claimed, previous string, err error) {
	host, _ := os.Hostname()
	claim, err := store.Claim(ctx, run, fmt.Sprintf("%s, process %d", host, os.Getpid()))
	if err != nil {
		return nil, "", err
	}
	c = Holds(p, claim, "etcd was not reached, or took no record, for four fifths of --journal-lease, or another hvdrun has the "+
		"job: this one ends, and the workers train on. hvdrun resume --journal takes the job over", log)
	c.id, c.close = claim.ID, store.Close
	return c, claim.Previous, nil
}

// Holds returns claim as a Claimed. When the claim is lost, it logs why and ends this process.
// Release ends the watch.
func Holds(p *cli.Program, claim Claim, why string, log *logrus.Logger) *Claimed {
	c := &Claimed{Claim: claim, close: func() error { return nil }, log: log}
	c.die = sync.OnceFunc(func() { leave(p, log, why) })
	c.unwatch = cli.Background(func(ctx context.Context) {
		select {
		case <-claim.Lost():
			c.die()
		case <-ctx.Done():
		}
	})
	return c
}

// leave logs why and ends this process at once. Its workers keep running.
func leave(p *cli.Program, log logrus.FieldLogger, why string) {
	log.Error(why)
	_ = p.Log.Flush(cli.HurriedFlush)
	os.Exit(job.ExitStatus(errors.New("")))
}

// Sync blocks until the copy has all records. If another driver has claimed the job, it ends this
// process.
func (c *Claimed) Sync() {
	if c.Claim.Sync() != nil {
		c.die()
	}
}

// copy writes into the copy what another driver needs besides the journal.
func (c *Claimed) copy(d *jobdir.Dir, known []client.KnownAgent) error {
	about := d.About
	about.Keys = ""
	for name, value := range map[string]any{jobdir.CopiedAbout: about, jobdir.CopiedLaunch: d.Secrets.Launch} {
		text, err := json.Marshal(value)
		if err != nil {
			return err
		}
		c.Put(name, text)
	}
	c.Put(jobdir.CopiedKey, []byte(d.Secrets.Authority))
	if err := c.putAgents(known...); err != nil {
		return err
	}
	c.Sync()
	return nil
}

// begun writes an agent of the job into the copy, before the agent is used.
func (c *Claimed) begun(k client.KnownAgent) error {
	if err := c.putAgents(k); err != nil {
		return err
	}
	c.Sync()
	return nil
}

// putAgents adds the agents that have begun to the list of the job's agents and queues the list for
// the copy, one line per agent. If two agents are on one host, the list has only the later one.
func (c *Claimed) putAgents(begun ...client.KnownAgent) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range begun {
		c.agents = append(slices.DeleteFunc(c.agents, func(a client.KnownAgent) bool { return a.Host == k.Host }), k)
	}
	var lines bytes.Buffer
	for _, k := range c.agents {
		if err := json.NewEncoder(&lines).Encode(k); err != nil {
			return err
		}
	}
	c.Put(jobdir.CopiedAgents, lines.Bytes())
	return nil
}

// Release ends the claim. If finished is true, it also removes the copy. It waits for the goroutine
// of Holds.
func (c *Claimed) Release(finished bool) {
	c.unwatch()
	if err := c.Claim.Release(finished); err != nil {
		c.log.WithError(err).Warn("etcd keeps the job's journal until its lease ends")
	}
	_ = c.close()
}

// beginCopy claims a new job and copies it.
func beginCopy(ctx context.Context, p *cli.Program, s *settings.Settings, d *jobdir.Dir, log *logrus.Logger) (*Claimed, error) {
	if d == nil || d.Secrets.Dir == "" {
		return nil, fmt.Errorf("%s: the job cannot be resumed: it has no folder, or no place for its key", s.Origin("journal"))
	}
	store, err := store(ctx, s.Journal, log)
	if err != nil {
		return nil, err
	}
	c, _, err := claimJob(ctx, p, store, s.RunID, log)
	if err == nil {
		err = c.keep(d, nil)
	}
	if err != nil {
		return nil, cli.Failed(errors.Join(fmt.Errorf("%s: %w", s.Origin("journal"), err), store.Close()))
	}
	return c, nil
}

// keep records the id of this claim in the job's folder, and copies the job.
func (c *Claimed) keep(d *jobdir.Dir, known []client.KnownAgent) error {
	d.About.Claim = c.id
	if err := d.Write(); err != nil {
		return err
	}
	return c.copy(d, known)
}

// resumeCopy claims a job that is resumed from its folder on this machine, and copies it. It fails
// if another machine has claimed the job since.
func resumeCopy(ctx context.Context, p *cli.Program, s *settings.Settings, d *jobdir.Dir, known []client.KnownAgent, log *logrus.Logger) (*Claimed, error) {
	store, err := store(ctx, s.Journal, log)
	if err != nil {
		return nil, err
	}
	c, previous, err := claimJob(ctx, p, store, d.About.RunID, log)
	if err == nil && previous != d.About.Claim {
		c.Release(false)
		return nil, errors.New("another machine has taken it over since: hvdrun resume --journal takes the job from etcd")
	}
	if err == nil {
		err = c.keep(d, known)
	}
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return c, nil
}

// resumeFlags are the flags of hvdrun resume.
type resumeFlags struct {
	journal settings.JournalSettings
	standby bool
}

func (f *resumeFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.journal.URL, "journal", "", "take the job from its copy `URL` (etcd://HOST:PORT), on any machine")
	cmd.Flags().StringVar(&f.journal.KeyFile, "journal-key-file", "", "with --journal, `F` holds the key of the copy")
	cmd.Flags().BoolVar(&f.standby, "standby", false, "with --journal, wait until the job's driver is gone")
}

// check returns an error if the flags contradict each other.
func (f *resumeFlags) check() error {
	if f.journal.URL == "" && (f.standby || f.journal.KeyFile != "") {
		return errors.New("--standby and --journal-key-file need --journal")
	}
	return nil
}

// resumeFromCopy resumes a job from its copy in etcd. Its last driver may have run on another
// machine.
func resumeFromCopy(ctx context.Context, p *cli.Program, f resumeFlags, name string) error {
	log := settings.LoggerAt(p, logrus.InfoLevel)
	store, err := store(ctx, f.journal, log)
	if err != nil {
		return err
	}
	run, c, err := awaitClaim(p, ctx, store, name, f.standby, log)
	if err != nil {
		return cli.Failed(errors.Join(err, store.Close()))
	}
	found, err := store.Read(ctx, run)
	var d *jobdir.Dir
	if err == nil {
		d, err = PlaceCopy(p, c, run, jobdir.Copy{Records: found.Records, Files: found.Files})
	}
	if err != nil {
		c.Release(false)
		if errors.Is(err, etcd.ErrNoJob) && f.standby {
			log.Infof("job %s has ended", run)
			return nil
		}
		return cli.Failed(fmt.Errorf("job %s cannot be resumed: %w", run, err))
	}
	return ResumeClaimed(ctx, p, d, c)
}

// awaitClaim claims the job that name identifies, or the only one if name is empty. If standby is
// true, it blocks until the job's driver is gone.
func awaitClaim(p *cli.Program,
	ctx context.Context, store *etcd.Store, name string, standby bool, log *logrus.Logger,
) (run string, c *Claimed, err error) {
	runs, err := store.Jobs(ctx)
	if err == nil {
		run, err = jobdir.OneJob(runs, name)
	}
	for told := false; err == nil; told = true {
		if c, _, err = claimJob(ctx, p, store, run, log); err == nil {
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

// PlaceCopy makes a job's folder on this machine from its copy. If run is empty, the run id is that
// of the copy.
func PlaceCopy(p *cli.Program, c *Claimed, run string, found jobdir.Copy) (*jobdir.Dir, error) {
	d := &jobdir.Dir{}
	if err := errors.Join(
		json.Unmarshal(found.Files[jobdir.CopiedAbout], &d.About), json.Unmarshal(found.Files[jobdir.CopiedLaunch], &d.Secrets.Launch),
	); err != nil {
		return nil, err
	}
	if run != "" && d.About.RunID != run || d.About.Version != jobdir.FileVersion {
		return nil, fmt.Errorf("the copy is of run %q and version %d; this program knows version %d", d.About.RunID, d.About.Version, jobdir.FileVersion)
	}
	d.About.EventsFrom, d.About.Events, d.About.Output = 0, "", ""
	d.Secrets.Authority = string(found.Files[jobdir.CopiedKey])
	if found.Args != nil {
		d.Secrets.Launch.Args = found.Args
	}
	if err := d.ChooseFolder(p.Env); err != nil {
		return nil, err
	}
	d.Secrets.Launch.Job = d.Path
	if err := d.Fill(found); err != nil {
		d.Undo()
		return nil, err
	}
	if err := d.PutSecrets(jobdir.SecretPlaces(p.Env), c.log); err != nil {
		return nil, err
	}
	d.About.Claim = c.id
	d.About.Host, _ = os.Hostname()
	d.About.Boot = journal.BootID()
	return d, d.Write()
}
