// Package agents starts the workers of a job through an agent on each of its hosts, which may be
// other machines. hvdrun starts the workers of its jobs in this way: it passes the Launcher that
// New returns to driver.Run. If the driver dies, the agents keep its workers for the driver that
// resumes the job.
package agents

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/launch"
)

// Config sets how agents are started, and how long they and the driver wait for each other.
type Config struct {
	// RunID and Authority are those of the driver's Config. Both are needed.
	RunID     string
	Authority driver.Authority
	// Hvdrun is the path of the program hvdrun on this machine, which runs as the agent and is
	// copied to hosts that lack it. Empty: hvdrun in PATH.
	Hvdrun string
	// SSH is the command that reaches other machines, with its first arguments. Empty: ssh. SSHPort
	// and SSHIdentityFile are its -p and -i; 0 and empty: ssh's defaults.
	SSH             []string
	SSHPort         int
	SSHIdentityFile string

	// Record is the path of a file that records the started agents, without secrets, in a folder
	// that only this user may enter. New creates the file if it does not exist; otherwise New takes
	// over the agents in it, as Resume requires. Empty: no file is written, and workers end with
	// their driver.
	Record string
	// Orphan is how long agents keep the workers of a driver that has died. 0: 10 s.
	Orphan time.Duration
	// Ahead is called, from any goroutine, if an agent knows later records of the job than the
	// journal that Resume was given contains: the journal is an outdated copy. Ahead must end the
	// process, because the driver would decide from outdated facts. Nil: the error is only logged.
	Ahead func(error)
	// Log takes messages about the agents. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Launcher is a launch.Launcher, and also a launch.Teller, a launch.Widener, a launch.Prober and a
// launch.Keeper. It serves one driver.
type Launcher struct {
	starter
	record client.KnownFile // its Journal is nil if there is no file
}

// starter has the methods of a Launcher, which are those of client.Agents.
type starter interface {
	launch.Widener
	launch.Teller
	launch.Prober
	launch.Keeper
	// Kill kills all workers now. It does not block.
	Kill()
	io.Closer
}

// New returns the launcher of a driver. It starts nothing yet. The caller must call Close when the
// driver has returned.
func New(cfg Config) (*Launcher, error) {
	if cfg.RunID == "" || cfg.Authority == nil {
		return nil, errors.New("agents: the run id and the authority of the job are needed")
	}
	authority, err := identity.AuthorityOf(cfg.Authority)
	if err != nil {
		return nil, fmt.Errorf("agents: %w", err)
	}
	if cfg.Hvdrun == "" {
		if cfg.Hvdrun, err = exec.LookPath("hvdrun"); err != nil {
			return nil, fmt.Errorf("agents: Config.Hvdrun is empty, and %w", err)
		}
	}
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	l := &Launcher{}
	c := client.Config{
		Authority: authority,
		Starter: client.Hosts{
			Local:  client.Exec{Hvdrun: cfg.Hvdrun},
			Remote: &client.SSH{Command: cfg.SSH, Port: cfg.SSHPort, IdentityFile: cfg.SSHIdentityFile, Program: cfg.Hvdrun},
		},
		Hello: client.Hello{LogLevel: logrus.InfoLevel.String()},
		Ahead: cfg.Ahead,
		Log:   cfg.Log,
	}
	if cfg.Record != "" {
		if c.Known, err = l.open(cfg.Record, cfg.RunID); err != nil {
			return nil, fmt.Errorf("agents: %w", err)
		}
		c.Keep, c.Begun, c.Orphan = true, l.record.Begun, cfg.Orphan
	}
	l.starter = client.New(c)
	return l, nil
}

func (l *Launcher) open(path, runID string) (known []client.KnownAgent, err error) {
	l.record, known, err = client.OpenKnown(path)
	if errors.Is(err, os.ErrNotExist) {
		l.record, err = client.CreateKnown(path, runID)
	}
	return known, err
}

// Close ends the remaining processes of the driver and waits for them, for at most a few seconds.
// All calls of Run must have returned.
func (l *Launcher) Close() error {
	err := l.starter.Close()
	if l.record.Journal != nil {
		err = errors.Join(err, l.record.Close())
	}
	return err
}
