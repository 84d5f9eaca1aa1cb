// Package jobrun begins or resumes a job, and runs it: the driver, and the metrics, the page, the
// tasks and the traces beside it.
package jobrun

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// checkInterfaces warns of network interfaces that this machine lacks, and returns an error if it
// has none of those listed.
func checkInterfaces(s *settings.Settings, log logrus.FieldLogger) error {
	missing := 0
	for _, name := range s.Tuning.NetworkInterfaces {
		if _, err := net.InterfaceByName(name); err != nil {
			missing++
			log.Warnf("%s: this machine has no interface %q", s.Origin("network-interfaces"), name)
		}
	}
	if missing > 0 && missing == len(s.Tuning.NetworkInterfaces) {
		return fmt.Errorf("%s: this machine has no such interface; `ip link` lists its interfaces", s.Origin("network-interfaces"))
	}
	return nil
}

// Run runs the command with the settings, and blocks until the job is done, has failed or is
// stopped. c, if not nil, is the claim on the job.
func Run(ctx context.Context, p *cli.Program, s *settings.Settings, command []string, c *Claimed) error {
	told := inBackground(p)
	if s.Detach && told == nil {
		return detach(ctx, p, s.Hostfile == settings.StandardInput) // the new process reports invalid settings
	}
	log := settings.Logger(p, s)
	j, err := validate(ctx, p, s, command, log)
	if err != nil {
		return err
	}
	if err := makeOutput(s, log); err != nil {
		return err
	}
	if names := s.ExposedSecrets(); len(names) > 0 {
		log.Warnf("everybody may read the config file, which holds secrets (%s): chmod 600 it", strings.Join(names, ", "))
	}
	if text := hostsource.Taken(s, j.Size.NP); text != "" {
		log.Info(text)
	}
	s.RunID = jobdir.NewRunID(p.Env, s.Name)
	if j.Authority, err = identity.NewAuthority(s.RunID); err != nil {
		return cli.Failed(err)
	}
	if j.dir, err = jobdir.New(p, s, command, j.Authority, log); err != nil {
		return err
	}
	if told != nil {
		if err := settle(told, j.dir); err != nil {
			if j.dir != nil {
				j.dir.Undo()
			}
			return cli.Failed(err)
		}
	}
	if err := j.keepCopy(ctx, p, s, c, log); err != nil {
		if j.dir != nil {
			j.dir.End(err, log)
		}
		return err
	}
	return Drive(ctx, p, s, j)
}

// validate returns the job that the settings and the command describe, or an error if they are
// invalid. It has no side effects.
func validate(ctx context.Context, p *cli.Program, s *settings.Settings, command []string, log logrus.FieldLogger) (Spec, error) {
	fixed, err := hostsource.Fixed(s)
	if err != nil {
		return Spec{}, err
	}
	if s.Hosts != "" && plan.HasSlots(command[0]) {
		return Spec{}, fmt.Errorf("%s: %q, which follows the hosts, would be the command: hosts are separated by commas, without blanks: -H %s,%[2]s",
			s.Origin("hosts"), command[0], s.Hosts)
	}
	size, err := hostsource.Size(s, fixed)
	if err != nil {
		return Spec{}, err
	}
	if err := errors.Join(checkRestart(s, command, size.Elastic), checkJournal(s), hostsource.CheckSlurmTools(s, p.Env)); err != nil {
		return Spec{}, err
	}
	if hostsource.AllLocal(ctx, fixed) {
		if err := errors.Join(checkCommand(s, command[0]), checkInterfaces(s, log)); err != nil {
			return Spec{}, err
		}
	}
	return Spec{Command: command, Fixed: fixed, Size: size}, nil
}

// makeOutput makes the folder of the workers' output.
func makeOutput(s *settings.Settings, log logrus.FieldLogger) error {
	if s.OutputDir == "" {
		return nil
	}
	if err := safefile.MakeDir(s.OutputDir, safefile.Mode(s.Tuning.ShareOutput)); err != nil {
		return fmt.Errorf("%s: %w", s.Origin("output-filename"), err)
	}
	if dir := unshared(s); dir != "" {
		log.Warnf("%s shares nothing in %s, which its owner alone can enter: chmod 755 it", s.Origin("share-output"), dir)
	}
	return nil
}

// keepCopy starts the copy of the job from which another node or machine can take it over: c, if it
// is not nil, or the journal in etcd.
func (j *Spec) keepCopy(ctx context.Context, p *cli.Program, s *settings.Settings, c *Claimed, log *logrus.Logger) (err error) {
	switch {
	case c != nil && (j.dir == nil || j.dir.Secrets.Dir == ""):
		return cli.Failed(errors.New("no other node could take over the job: it has no folder, or no place for its key"))
	case c != nil:
		j.copy = c
		err = c.keep(j.dir, nil)
	case s.Journal.URL != "":
		j.copy, err = beginCopy(ctx, p, s, j.dir, log)
	}
	return err
}

// unshared returns an output folder that other users cannot enter although the output is to be
// shared; empty: no such folder.
func unshared(s *settings.Settings) string {
	if !s.Tuning.ShareOutput {
		return ""
	}
	ranks, _ := filepath.Glob(filepath.Join(s.OutputDir, "rank.*")) // the pattern is valid
	for _, dir := range append([]string{s.OutputDir}, ranks...) {
		if fi, err := os.Stat(dir); err == nil && fi.IsDir() && fi.Mode().Perm()&0o055 != 0o055 {
			return dir
		}
	}
	return ""
}

// checkCommand returns an error if workers on this machine cannot run the program.
func checkCommand(s *settings.Settings, program string) error {
	if s.Dir != "" {
		if fi, err := os.Stat(s.Dir); err != nil {
			return fmt.Errorf("%s: %w", s.Origin("dir"), err)
		} else if !fi.IsDir() {
			return fmt.Errorf("%s: %s is not a folder", s.Origin("dir"), s.Dir)
		}
	}
	here := "./" + strings.TrimPrefix(program, "./")
	if s.Dir != "" {
		here = filepath.Join(s.Dir, program)
	}
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = here
	}
	_, err := exec.LookPath(program)
	if errors.Is(err, exec.ErrNotFound) && !strings.Contains(program, "/") { // launch.Local looks there too
		_, hereErr := exec.LookPath(here)
		if hereErr == nil {
			return nil
		} else if errors.Is(hereErr, fs.ErrPermission) {
			program, err = here, hereErr
		}
	}
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return fmt.Errorf("the command cannot be run: %w", proc.ExplainStart(err, program))
	}
	return nil
}

// Spec is a job to start or to resume.
type Spec struct {
	Command   []string
	Fixed     []plan.Host // nil: the sources list the hosts
	Size      job.Size
	Authority *identity.Authority
	dir       *jobdir.Dir         // nil: the job has no folder
	known     []client.KnownAgent // of the previous driver
	resumed   bool
	copy      *Claimed // nil: no copy
}

// begun records that a job agent has been started.
func (j Spec) begun(k client.KnownAgent) error {
	if err := j.dir.Agents.Begun(k); err != nil || j.copy == nil {
		return err
	}
	return j.copy.begun(k)
}

// over reports whether no other driver can take over the job.
func (j Spec) over() bool {
	if j.dir == nil {
		return true
	}
	job, err := j.dir.Inspect()
	return err == nil && job.Finished
}

// Drive runs the job's driver with its hooks, and blocks until the job is done, has failed or is
// stopped.
func Drive(ctx context.Context, p *cli.Program, s *settings.Settings, j Spec) (err error) {
	r := newRun(p, s, j)
	defer func() { r.stop(err) }()
	if err := r.start(ctx, hooks); err != nil {
		return err
	}
	drive := driver.Run
	if j.resumed {
		drive = driver.Resume
	}
	return cli.Failed(drive(ctx, r.cfg))
}
