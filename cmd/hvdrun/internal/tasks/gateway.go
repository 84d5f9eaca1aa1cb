package tasks

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/line"
)

const (
	// gatewayHandshake bounds the duration of a TLS handshake.
	gatewayHandshake = 20 * time.Second
	// gatewayRenew is the age at which the gateway's own certificate, which is valid for a day, is
	// renewed.
	gatewayRenew = 6 * time.Hour
	// mostClients bounds the number of connections that the gateway carries. A client has two.
	mostClients = 1000
)

func gatewayCommand(p *cli.Program) *cobra.Command {
	var listen, invitation string
	var valid time.Duration
	cmd := &cobra.Command{
		Use:   "gateway --listen ADDRESS --invitation FILE [--valid TIME] [JOB]",
		Short: "Let programs of other machines submit tasks to a job",
		Long: `gateway listens for programs of other machines and carries their connections to the scheduler of a job's tasks, which is in
its hvdrun, on this machine. It writes an invitation into a file, for its owner alone: the addresses, and a certificate and
key that the job's authority has signed. Whoever has it may submit tasks, cancel their own and join as a worker of tasks, as
long as it is valid; others cannot connect (mutual TLS). Copy it to the other machine and run there hvdrun tasks run
--invitation FILE program, or set ` + "HVD_TASKS=FILE" + `. The gateway ends with the job, and outlives
an hvdrun that is resumed on this machine.

` + jobdir.WhichJob,
		Example: `  hvdrun tasks gateway --listen 10.0.0.1:7947 --invitation invitation
  hvdrun tasks run --invitation invitation ./sweep -trials 200`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			host, _, err := net.SplitHostPort(listen)
			switch {
			case listen == "":
				return errors.New("--listen is missing: the address by which other machines reach this one, for example 10.0.0.1:7947")
			case err != nil:
				return fmt.Errorf("--listen: %w", err)
			case host == "" || net.ParseIP(host).IsUnspecified():
				return errors.New("--listen: name the address by which other machines reach this one: it goes into the invitation")
			case invitation == "":
				return errors.New("--invitation is missing: the file to write")
			case valid <= 0:
				return fmt.Errorf("--valid %v: it must be positive", valid)
			}
			d, err := jobdir.TheJob(p.Env, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return cli.Failed(cmp.Or(serveGateway(cmd.Context(), p, d, listen, invitation, valid), context.Cause(cmd.Context())))
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "", "the `ADDRESS` by which other machines reach this one, host:port; port 0: any")
	cmd.Flags().StringVar(&invitation, "invitation", "", "write the invitation to `FILE`")
	cmd.Flags().DurationVar(&valid, "valid", 24*time.Hour, "`TIME` for which the invitation is valid")
	return cmd
}

// serveGateway implements hvdrun tasks gateway. It blocks until ctx or the job ends.
func serveGateway(ctx context.Context, p *cli.Program, d *jobdir.Dir, listen, path string, valid time.Duration) error {
	secrets, err := d.FindSecrets(p.Env)
	if err != nil {
		return fmt.Errorf("the job cannot write an invitation: %w", err)
	}
	authority, err := identity.DecodeAuthority(secrets.Authority)
	if err != nil {
		return err
	}
	client, err := authority.IssueFor(identity.Subject{Role: identity.Client}, time.Now(), valid)
	if err != nil {
		return err
	}
	ln, err := identity.TaskGateway.Listen(listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	g := &gateway{ln: ln, authority: authority, to: d.DialTasks(), log: settings.LoggerAt(p, logrus.InfoLevel)}
	inviting := identity.Invitation{Addresses: []string{ln.Addr().String()}, Credentials: client.Encode()}
	if err := identity.WriteInvitation(path, inviting); err != nil {
		return errors.Join(err, ln.Close())
	}
	g.log.Infof("programs of other machines reach the job's tasks at %v, with the invitation in %s", ln.Addr(), path)
	ctx, cancel := whileJob(ctx, d)
	defer cancel()
	g.serve(ctx)
	return nil
}

// gateway forwards connections of clients that have proven that they are invited to the scheduler.
type gateway struct {
	ln        *identity.Listener
	authority *identity.Authority
	to        func(context.Context) (net.Conn, error) // connects to the scheduler
	log       logrus.FieldLogger

	mu     sync.Mutex
	own    *tls.Config
	issued time.Time
	n      int // connections being carried
}

// tls returns the gateway's configuration of a handshake, and renews its certificate if it is older
// than gatewayRenew.
func (g *gateway) tls(now time.Time) (*tls.Config, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.own != nil && now.Sub(g.issued) < gatewayRenew {
		return g.own, nil
	}
	creds, err := g.authority.Issue(identity.Subject{Role: identity.Driver})
	if err != nil {
		return nil, err
	}
	g.own, g.issued = creds.ServerTLS(identity.Client), now
	g.own.NextProtos = []string{line.TasksProtocol}
	return g.own, nil
}

// serve accepts and carries connections until ctx ends. It then closes the listener and blocks
// until all connections have ended.
func (g *gateway) serve(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { g.ln.Close() })
	defer stop()
	g.ln.OnRefused(func(from net.Addr, why error) { g.ln.WarnRefused(g.log, "tasks gateway", from, why) })
	g.ln.Serve(g.log, "clients of tasks", func(conn *identity.Conn) { g.carry(ctx, conn) })
}

// carry forwards a connection to the scheduler, once its peer has proven that it is invited. It
// blocks until either side closes the connection, or until ctx ends.
func (g *gateway) carry(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	cfg, err := g.tls(time.Now())
	if err != nil {
		g.log.WithError(err).Error("no certificate")
		return
	}
	far := tls.Server(conn, cfg)
	limited, cancel := context.WithTimeout(ctx, gatewayHandshake)
	defer cancel()
	if err := far.HandshakeContext(limited); err != nil {
		g.ln.Refused(conn, err)
		return
	}
	if far.ConnectionState().NegotiatedProtocol != line.TasksProtocol || !g.ln.Proven(conn) || !g.enter() {
		return
	}
	defer g.leave()
	near, err := g.to(limited)
	if err != nil { // the job may be resumed soon: the client retries
		g.log.Debugf("the scheduler is out of reach: %v", err)
		return
	}
	defer near.Close()
	stop := context.AfterFunc(ctx, func() {
		conn.Close()
		near.Close()
	})
	defer stop()
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(far, near) // its end ends the connection
		conn.Close()
	})
	_, _ = io.Copy(near, far)
	near.Close()
	back.Wait()
}

// enter counts a connection. It returns false if there are too many.
func (g *gateway) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n == mostClients {
		g.log.Warnf("a connection is closed: there are %d", mostClients)
		return false
	}
	g.n++
	return true
}

func (g *gateway) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
}

// jobLooks is the interval at which whileJob checks the job.
const jobLooks = 500 * time.Millisecond

// whileJob returns a context that ends with ctx or when the job has ended; the end of the driver
// alone does not end it. The caller must call cancel.
func whileJob(ctx context.Context, d *jobdir.Dir) (_ context.Context, cancel func()) {
	ctx, end := context.WithCancel(ctx)
	var looking sync.WaitGroup
	looking.Go(func() {
		defer end()
		every := time.NewTicker(jobLooks)
		defer every.Stop()
		for {
			select {
			case <-every.C:
			case <-ctx.Done():
				return
			}
			now, err := jobdir.Read(d.Path)
			if errors.Is(err, fs.ErrNotExist) || err == nil && now.About.Ended != nil {
				return
			}
		}
	})
	return ctx, func() {
		end()
		looking.Wait()
	}
}
