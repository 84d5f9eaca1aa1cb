// Package page serves the page that shows and controls a job in a browser, for the command hvdrun
// dashboard and for the driver of a job.
package page

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/dashboard"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/tasks"
)

const (
	// dashboardPort is the first port tried if no address is given.
	dashboardPort = 8470
	// maxPageFile bounds the file of a page, in bytes.
	maxPageFile = 1 << 20
)

// Command returns the command hvdrun dashboard.
func Command(p *cli.Program) *cobra.Command {
	var listen, cert, key string
	var url bool
	cmd := &cobra.Command{
		Use:   "dashboard [JOB] [--listen ADDR:PORT]",
		Short: "Serve a page that shows and steers a job in a browser",
		Long: `dashboard serves a page that shows a job live: hosts and slots, commits, generations and their causes, the use of time,
stragglers, events, output and tasks. It can drain, exclude, scale and stop. It prints two URLs, one to watch and steer, one
to watch only; whoever has a URL can do what it permits. Ctrl-C ends the page, not the job. For a job that has ended it
shows the history.

Only this machine can reach the page unless --listen names another address. There it uses TLS: with --tls-cert and
--tls-key, or a new certificate, whose fingerprint it prints. From elsewhere, use ssh -L 8470:localhost:8470 HOST.

With --url it prints the URLs of the page that the job's own hvdrun serves (--dashboard-listen).

` + jobdir.WhichJob,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := jobdir.TheJob(p.Env, strings.Join(args, ""))
			if err != nil {
				return err
			}
			if url {
				return printPage(p, d)
			}
			cfg := Config(d)
			cfg.Listen, cfg.Tokens = listen, dashboard.NewTokens()
			if cfg.Certificate, err = readCertificate(cert, key); err != nil {
				return err
			}
			server, err := openPage(cfg)
			if err != nil {
				return cli.Failed(err)
			}
			printURLs(p, pageFile{URL: server.URL(), Fingerprint: server.Fingerprint(), Tokens: cfg.Tokens}, d.About.RunID)
			return cli.Failed(cmp.Or(server.Serve(cmd.Context()), context.Cause(cmd.Context())))
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "", "address and port (default: port 8470 of loopback, or another if that is in use)")
	cmd.Flags().StringVar(&cert, "tls-cert", "", "file `F` of the certificate for TLS, in PEM")
	cmd.Flags().StringVar(&key, "tls-key", "", "file `F` of its private key")
	cmd.Flags().BoolVar(&url, "url", false, "print the URLs of the page that the job's hvdrun serves")
	return jobdir.CompletesJobs(p, cmd)
}

// openPage listens on the given address or, without one, on loopback.
func openPage(cfg dashboard.Config) (*dashboard.Server, error) {
	if cfg.Listen != "" {
		return dashboard.Listen(cfg)
	}
	loopback := identity.Loopback().String()
	cfg.Listen = net.JoinHostPort(loopback, fmt.Sprint(dashboardPort))
	if server, err := dashboard.Listen(cfg); err == nil {
		return server, nil
	}
	cfg.Listen = net.JoinHostPort(loopback, "0")
	return dashboard.Listen(cfg)
}

func readCertificate(cert, key string) (*tls.Certificate, error) {
	if cert == "" && key == "" {
		return nil, nil
	}
	if cert == "" || key == "" {
		return nil, errors.New("--tls-cert and --tls-key are needed together")
	}
	pair, err := safefile.KeyPair(cert, key, safefile.OwnText, safefile.SecretText)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert and --tls-key: %w", err)
	}
	return pair, nil
}

// Config returns the configuration of a page of the job, without its address and tokens.
func Config(d *jobdir.Dir) dashboard.Config {
	cfg := dashboard.Config{Job: dashboard.Job{
		Source: jobSource{d}, Command: d.About.Command, Events: d.About.Events, EventsFrom: d.About.EventsFrom,
		Recorded: func() ([]json.RawMessage, error) { return driver.InspectEvents(d.Journal()) },
		Tasks:    func(ctx context.Context) (json.RawMessage, error) { return tasksText(ctx, d) }, Output: d.About.Output,
	}}
	if host, err := os.Hostname(); err == nil {
		cfg.Names = []string{host}
	}
	return cfg
}

// tasksText returns the status of the job's scheduler of tasks; nil if the job has none.
func tasksText(ctx context.Context, d *jobdir.Dir) (json.RawMessage, error) {
	if _, err := os.Lstat(d.TasksPath()); err != nil {
		return nil, err
	}
	s, err := jobdir.AskTasks(ctx, d, func(ctx context.Context, pool *tasks.Pool) (tasks.Status, error) { return pool.Status(ctx) })
	if err != nil {
		return nil, err
	}
	return json.Marshal(s)
}

// jobSource gives a page or a terminal access to a job.
type jobSource struct{ d *jobdir.Dir }

// Status returns the job's status, also if the job has no driver.
func (s jobSource) Status(ctx context.Context) (job.Status, error) { return s.d.Status(ctx) }

// Command asks the driver to carry out a command. Without a driver the command is refused.
func (s jobSource) Command(ctx context.Context, c job.Command) (done string, err error) {
	done, err = s.d.Command(ctx, c)
	if none, is := errors.AsType[*jobdir.NoDriverError](err); is {
		err = &job.RefusedError{Reason: none.Error()}
	}
	return done, err
}

// pageFile is the content of the file in a job's folder that names its page.
type pageFile struct {
	URL         string `json:"url"`
	Addr        string `json:"addr"`
	Fingerprint string `json:"fingerprint,omitempty"`
	dashboard.Tokens
}

// readPage returns where the job's driver, or the previous one, serves its page.
func readPage(d *jobdir.Dir) (f pageFile, err error) {
	text, err := safefile.SecretText(d.PagePath(), maxPageFile)
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	if err == nil && !f.Tokens.Valid() {
		err = fmt.Errorf("%s: its tokens are too short", d.PagePath())
	}
	return f, err
}

// printPage prints the URLs of the page that the job's driver serves.
func printPage(p *cli.Program, d *jobdir.Dir) error {
	f, err := readPage(d)
	if errors.Is(err, fs.ErrNotExist) {
		return cli.Failed(fmt.Errorf("the hvdrun of job %s serves no page: it was started without --dashboard-listen; hvdrun dashboard %[1]s serves one",
			d.About.RunID))

	}
	if err != nil {
		return cli.Failed(err)
	}
	if running, err := journal.Locked(d.Journal()); err != nil {
		return cli.Failed(err)
	} else if !running {
		return cli.Failed(fmt.Errorf("the page of job %s has ended with its hvdrun, and another program may have its port; hvdrun resume serves another",
			d.About.RunID))
	}
	printURLs(p, f, d.About.RunID)
	return nil
}

func printURLs(p *cli.Program, f pageFile, job string) {
	fmt.Fprintf(p.Stdout, "job %s\nto watch and steer: %s\nto watch only:      %s\n", cli.EscapeCell(job), dashboard.WithToken(f.URL, f.Write),
		dashboard.WithToken(f.URL, f.Read))
	if f.Fingerprint != "" {
		fmt.Fprintf(p.Stdout, "the browser does not know the certificate; its SHA-256 is %s\n", f.Fingerprint)
	}
}

// Serve serves the page of a job that this process drives, if the settings request it. The function
// that it returns stops the page after it has shown how the job ended.
func Serve(s *settings.Settings, d *jobdir.Dir, resumed bool, log *logrus.Logger) (stop func(), err error) {
	stop = func() {}
	if s.Dashboard == "" {
		return stop, nil
	}
	if d == nil {
		log.Warn("there is no page: the job has no folder")
		return stop, nil
	}
	server, err := openJobPage(s, d)
	if err != nil && !resumed {
		return nil, fmt.Errorf("%s: %w", s.Origin("dashboard-listen"), err)
	}
	if err != nil {
		log.WithError(err).Warn("there is no page")
		return stop, nil
	}
	log.Infof("the page is at %s; hvdrun dashboard %s --url prints the URLs", server.URL(), d.About.RunID)
	end := cli.Background(func(ctx context.Context) {
		if err := server.Serve(ctx); err != nil {
			log.WithError(err).Warn("the page has ended")
		}
	})
	return func() {
		end()
		_ = os.Remove(d.PagePath()) // the file may be gone with the folder
	}, nil
}

// openJobPage opens the page, at the port of the previous driver if it is free. The tokens are new,
// since another program may have listened at the port meanwhile.
func openJobPage(s *settings.Settings, d *jobdir.Dir) (*dashboard.Server, error) {
	cfg := Config(d)
	cfg.Listen, cfg.Tokens = s.Dashboard, dashboard.NewTokens()
	before, err := readPage(d)
	var server *dashboard.Server
	if err == nil {
		again := cfg
		again.Listen = before.Addr
		server, _ = dashboard.Listen(again) // the port may be taken
	}
	if err := os.Remove(d.PagePath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err // the old file would name invalid tokens
	}
	if server == nil {
		if server, err = dashboard.Listen(cfg); err != nil {
			return nil, err
		}
	}
	text, err := json.Marshal(pageFile{URL: server.URL(), Addr: server.Addr().String(), Fingerprint: server.Fingerprint(), Tokens: cfg.Tokens})
	if err == nil {
		err = safefile.Replace(d.PagePath(), append(text, '\n'), safefile.Private)
	}
	if err != nil {
		return nil, errors.Join(err, server.Close())
	}
	return server, nil
}
