package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/hvdrun/hvdrun/audit"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/internal/agent/enroll"
	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
)

const (
	// firstTokenLife is how long the token of a new cluster is valid.
	firstTokenLife = time.Hour
	// defaultEnrollAddr is the address on which agents are enrolled.
	defaultEnrollAddr = ":7945"
	// rotateLook is the pause between two checks whether all hosts have the keys.
	rotateLook = 100 * time.Millisecond
	// rotateTell is the pause between two lines that name the hosts waited for.
	rotateTell = 10 * time.Second
)

func clusterCommand(p *cli.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Keep the keys of a cluster of agents",
		Long: `cluster manages the keys of a cluster of agents (hvdrun agent --enroll) in a folder. Whoever can read the folder can run
commands on all hosts: keep it with the people who start jobs. Agents have only a certificate, by which drivers recognize
them, and the gossip key.`,
		Example: `  hvdrun cluster init ~/cluster
  hvdrun cluster serve ~/cluster
  hvdrun agent --enroll head:7945 --token-file token \
      --state-dir /var/lib/hvdrun --join node1:7946    # on each host
  hvdrun -np 8 --gossip-join node1:7946 --cluster ~/cluster ./train`,
	}
	cmd.AddCommand(clusterInitCommand(p), clusterTokenCommand(p), clusterServeCommand(p), clusterRotateCommand(p),
		clusterHostsCommand(p), clusterRemoveCommand(p))
	return cmd
}

// durationFlag is a flag with a duration in the syntax of hvdrun's other flags.
type durationFlag struct{ d *time.Duration }

func (f durationFlag) Set(text string) (err error) {
	*f.d, err = settings.ParseDuration(text)
	return err
}

func (f durationFlag) String() string { return f.d.String() }

func (f durationFlag) Type() string { return "D" }

func addDuration(fs *pflag.FlagSet, name string, standard time.Duration, usage string) *time.Duration {
	d := standard
	fs.Var(durationFlag{&d}, name, usage)
	return &d
}

// runE returns a cobra.Command.RunE of a command whose errors are never about its usage.
func runE(run func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		return cli.Failed(run(cmd.Context(), args))
	}
}

func clusterInitCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "init DIR",
		Short: "Make the folder of a new cluster",
		Long: `init makes the folder of a new cluster, of mode 0700: an authority, which signs certificates, a gossip key, and
DIR/token, with which any number of hosts may join within an hour; hvdrun cluster token makes others.`,
		Args: cobra.ExactArgs(1),
		RunE: runE(func(_ context.Context, args []string) error {
			now := time.Now()
			dir, err := cluster.Init(args[0], cluster.Grant{Expires: now.Add(firstTokenLife), Reusable: true}, now)
			if err == nil {
				err = dir.Record(audit.Record{What: "init", Dir: args[0], Outcome: audit.Done})
			}
			if err != nil {
				return err
			}
			fmt.Fprintf(p.Stdout, "%s is the folder of a new cluster; hosts may join with %s for %v\n",
				args[0], filepath.Join(args[0], cluster.TokenFile), firstTokenLife)
			return nil
		}),
	}
}

func clusterTokenCommand(p *cli.Program) *cobra.Command {
	var grant cluster.Grant
	cmd := &cobra.Command{
		Use:   "token DIR [FILE] [flags]",
		Short: "Make a token with which a host may join",
		Long: `token makes a token with which one host, or with --reusable any number of them, may join the cluster until it expires. It
is written to FILE, a new file of mode 0600, or printed. It is a secret: whoever has it can be a host of the cluster, but
cannot start jobs. The cluster keeps only its public key.`,
		Args: cobra.RangeArgs(1, 2),
	}
	cmd.Flags().StringVar(&grant.Hosts, "host", "", "`PATTERN` of the host's name: node7, node*, node[0-9] (default: any name)")
	cmd.Flags().BoolVar(&grant.Reusable, "reusable", false, "any number of hosts may join with it")
	life := addDuration(cmd.Flags(), "life", firstTokenLife, "time until it expires")
	cmd.RunE = runE(func(_ context.Context, args []string) error {
		dir, err := cluster.Open(args[0])
		if err != nil {
			return err
		}
		now := time.Now()
		grant.Expires = now.Add(*life)
		token, err := dir.NewToken(grant, now)
		err = errors.Join(err, dir.Record(audit.Record{What: "token", How: grantText(grant), Outcome: audit.Of(err)}))
		switch {
		case err != nil:
		case len(args) == 2:
			err = token.WriteFile(args[1])
		default:
			_, err = fmt.Fprintln(p.Stdout, token.Encode())
		}
		return err
	})
	return cmd
}

// grantText describes what a token permits.
func grantText(g cluster.Grant) string {
	text := "for one host"
	if g.Reusable {
		text = "for any number of hosts"
	}
	if g.Hosts != "" {
		text += " named " + g.Hosts
	}
	return text + " until " + g.Expires.UTC().Format(time.RFC3339)
}

func clusterServeCommand(p *cli.Program) *cobra.Command {
	var listen string
	cmd := &cobra.Command{
		Use:   "serve DIR [flags]",
		Short: "Sign and renew the certificates of agents, and give them the gossip keys",
		Long: `serve signs the certificates of hosts that have a token, renews them, and gives agents the gossip keys, until it is
stopped. Agents warn when they have not reached it for half of the life of their certificates.`,
		Args: cobra.ExactArgs(1),
	}
	fs := cmd.Flags()
	fs.StringVar(&listen, "listen", defaultEnrollAddr, "`ADDR:PORT` where agents are served")
	life := addDuration(fs, "agent-life", enroll.DefaultAgentLife, "how long an agent's certificate is valid; it is renewed from a third of that on")
	pause := addDuration(fs, "pause", enroll.DefaultPause, "pause between two requests of an agent")
	for _, name := range []string{"log-level", "log-format"} {
		settings.AddFlag(fs, settings.SettingNamed(name))
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		s, err := settings.Load(cmd.Flags(), p.Env)
		if err != nil {
			return err
		}
		dir, err := cluster.Open(args[0])
		if err != nil {
			return cli.Failed(err)
		}
		ln, err := identity.Enrollment.Listen(listen)
		if err != nil {
			return fmt.Errorf("--listen: %w", err)
		}
		log := settings.Logger(p, &s)
		log.Infof("cluster: agents are served at %v", ln.Addr())
		if err := dir.Record(audit.Record{What: "serve", How: "at " + ln.Addr().String(), Outcome: audit.Done}); err != nil {
			return cli.Failed(errors.Join(err, ln.Close()))
		}
		return cli.Failed(enroll.Server{Dir: dir, AgentLife: *life, Pause: *pause, Log: log}.Serve(cmd.Context(), ln))
	}
	return cmd
}

func clusterRotateCommand(p *cli.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rotate DIR [flags]",
		Short: "Replace the gossip key while jobs run",
		Long: `rotate replaces the gossip key: all agents get a new key in addition to the old one, then encrypt with it, then drop the
old one. Each step waits for all hosts with valid certificates, so hvdrun cluster serve must run, and for the drivers that
use this folder. If rotate is stopped, the next call continues. A host that is gone for good delays it until its certificate
expires, or until hvdrun cluster remove.`,
		Args: cobra.ExactArgs(1),
	}
	hold := addDuration(cmd.Flags(), "hold", cluster.DefaultHold, "least time of a step, in which drivers take the keys")
	limit := addDuration(cmd.Flags(), "timeout", 10*time.Minute, "longest wait for hosts")
	cmd.RunE = runE(func(ctx context.Context, args []string) error {
		dir, err := cluster.Open(args[0])
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, *limit)
		defer cancel()
		err = rotate(ctx, p, dir, *hold)
		return errors.Join(err, dir.Record(audit.Record{What: "rotate", Outcome: audit.Of(err)}))
	})
	return cmd
}

// rotate continues a rotation of the keys, or starts one, and blocks until it is done.
func rotate(ctx context.Context, p *cli.Program, dir *cluster.Dir, hold time.Duration) error {
	err := dir.Update(func(s *cluster.State) error {
		if !s.BeginRotation(time.Now()) {
			fmt.Fprintln(p.Stdout, "continuing the last rotation")
		}
		fmt.Fprintf(p.Stdout, "each of three steps takes at least %v (--hold), and lasts until all hosts have asked for their keys again\n", hold)
		fmt.Fprintln(p.Stdout, stepText(s.Ring.Phase))
		return nil
	})
	look := time.NewTicker(rotateLook)
	defer look.Stop()
	told := time.Now()
	for err == nil {
		advanced, phase, waiting, failed := rotationStep(dir, hold)
		if failed != nil {
			return failed
		}
		switch {
		case advanced && phase == cluster.Stable:
			fmt.Fprintln(p.Stdout, "the gossip key is replaced")
			return nil
		case advanced:
			fmt.Fprintln(p.Stdout, stepText(phase))
		case time.Since(told) > rotateTell && len(waiting) > 0:
			told = time.Now()
			fmt.Fprintf(p.Stdout, "%s: waiting for %s to take the keys: %s\n", stepText(phase), show.Plural(len(waiting), "host"), cli.EscapeCell(someOf(waiting)))
		}
		select {
		case <-ctx.Done():
			if len(waiting) == 0 {
				return context.Cause(ctx)
			}
			return fmt.Errorf("%s: these hosts have not taken the keys: %s; `hvdrun cluster remove` takes out one that is gone, "+
				"and `hvdrun cluster rotate` goes on", phase, someOf(waiting))
		case <-look.C:
		}
	}
	return err
}

// stepText returns the name of a phase of a rotation, with its number and the number of phases.
func stepText(phase cluster.Phase) string {
	n := 1 + slices.Index([]cluster.Phase{cluster.Adding, cluster.Switching, cluster.Removing}, phase)
	return fmt.Sprintf("step %d of 3, %s", n, phase)
}

// rotationStep continues the rotation if it can continue, and otherwise writes nothing. It returns
// the phase, and the hosts waited for.
func rotationStep(dir *cluster.Dir, hold time.Duration) (advanced bool, phase cluster.Phase, waiting []string, err error) {
	step := func(s *cluster.State) error {
		advanced, waiting = s.AdvanceRotation(time.Now(), hold)
		phase = s.Ring.Phase
		return nil
	}
	seen, err := dir.View()
	if err != nil {
		return false, cluster.Stable, nil, err
	}
	trial := *seen
	if _ = step(&trial); advanced {
		err = dir.Update(step)
	}
	return advanced, phase, waiting, err
}

// someOf lists names, or the first few if there are many.
func someOf(names []string) string {
	const most = 8
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], " "), len(names)-most)
	}
	return strings.Join(names, " ")
}

func clusterHostsCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "hosts DIR",
		Short: "List the hosts that have a certificate",
		Long: `hosts lists the hosts that have a certificate. While hvdrun cluster serve runs, each running agent asks it twice a minute:
LAST SEEN is the last time that it has, USED the number of its slots that had workers then, RUN their runs, and CLOCK
how far its clock was ahead of the clock of the machine with hvdrun cluster serve.`,
		Args: cobra.ExactArgs(1),
		RunE: runE(func(_ context.Context, args []string) error {
			dir, err := cluster.Open(args[0])
			if err != nil {
				return err
			}
			state, err := dir.View()
			if err != nil {
				return err
			}
			seen, err := dir.Seen()
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(p.Stdout, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "HOST\tCERTIFICATE UNTIL\tLAST SEEN\tUSED\tRUN\tCLOCK\tGOSSIP KEYS")
			for _, name := range slices.Sorted(maps.Keys(state.Hosts)) {
				h := state.Hosts[name]
				keys := "current"
				switch {
				case h.Removed:
					keys = "removed"
				case h.Ring != state.Ring.Version:
					keys = "old"
				}
				last, used, runs, clock := "never", "-", "-", "-"
				if s, ok := seen[name]; ok {
					last = s.At.UTC().Format(time.RFC3339)
					used, runs = show.Used(s.Used)
					if s.Ahead != nil {
						clock = fmt.Sprintf("%+.1fs", s.Ahead.Seconds())
					}
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", cli.EscapeCell(name), h.Expires.UTC().Format(time.RFC3339), last, used, runs, clock, keys)
			}
			return w.Flush()
		}),
	}
}

func clusterRemoveCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "remove DIR HOST…",
		Short: "Stop renewing the certificates of hosts",
		Long: `remove stops renewing the certificates of hosts: when they expire, the hosts are no longer in the cluster. They do not get
the next gossip key, so after hvdrun cluster rotate no driver finds them. To let a host return,
start its agent with a new token.`,
		Args: cobra.MinimumNArgs(2),
		RunE: runE(func(_ context.Context, args []string) error {
			dir, err := cluster.Open(args[0])
			if err != nil {
				return err
			}
			err = dir.Update(func(s *cluster.State) error {
				var all []error
				for _, host := range args[1:] {
					all = append(all, s.Remove(host))
				}
				return errors.Join(all...)
			})
			for _, host := range args[1:] {
				err = errors.Join(err, dir.Record(audit.Record{What: "remove", Host: host, Outcome: audit.Of(err)}))
			}
			return err
		}),
	}
}
