package tasks

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/tasks/scaler"
	"github.com/hvdrun/hvdrun/tasks/scaler/bridge"
)

func scalerWorkerCommand(p *cli.Program) *cobra.Command {
	var cfg bridge.RelayConfig
	cmd := &cobra.Command{
		Use:   "scaler-worker --address ADDRESS [JOB]",
		Short: "Have the workers of a job work for a cluster of Scaler 1.7.14",
		Long: `scaler-worker joins a cluster of Scaler, a task scheduler in Python, for a job: tasks that the cluster's scheduler sends
run on the job's workers. The cluster sees a worker for each processor that the job's workers offer, as many as there are.

A task names its function by a JSON text, and its arguments and its result are JSON too: docs/scaler.md has the serializer
that a client needs. Functions are those that the job's program has registered and exported, by tasks.Export. Nothing on
the way to the scheduler is encrypted: whoever is the scheduler, or between, chooses what is called and with what. It ends
with the job.

The scheduler must be Scaler 1.7.14: one of 1.8 or 1.9 ends at the first message of another version, and a later one is no
peer of it. scaler_scheduler's package tells its version (pip show scaler).

` + jobdir.WhichJob,
		Example:               "  hvdrun tasks scaler-worker --address tcp://10.0.0.5:2345",
		Args:                  cobra.MaximumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cfg.Address == "" {
				return errors.New("--address: which scheduler? It is what scaler_scheduler was started with, as tcp://host:port")
			}
			if err := scaler.CheckAddress(cfg.Address); err != nil {
				return fmt.Errorf("--address: %w", err)
			}
			if cfg.Workers < 0 {
				return fmt.Errorf("--workers: %d is less than 0", cfg.Workers)
			}
			return besideJob(cmd.Context(), p, args, func(ctx context.Context, d *jobdir.Dir) error {
				cfg.Dial, cfg.Log = d.DialTasks(), sideLog(p)
				return bridge.Relay(ctx, cfg)
			})
		},
	}
	cmd.Flags().StringVar(&cfg.Address, "address", "", "the `ADDRESS` of Scaler's scheduler, as tcp://host:port")
	cmd.Flags().IntVar(&cfg.Workers, "workers", 0, "appear as at most `N` workers; 0: one for each processor that the job's workers offer")
	return cmd
}

func scalerSchedulerCommand(p *cli.Program) *cobra.Command {
	var cfg bridge.ServeConfig
	cmd := &cobra.Command{
		Use:   "scaler-scheduler --listen ADDRESS [JOB]",
		Short: "Let workers of Scaler 1.7.14 join the workers of a job",
		Long: `scaler-scheduler listens for workers of Scaler, a task scheduler in Python, and has them join the workers of a job, as
scaler_cluster starts them: scaler_cluster tcp://127.0.0.1:2345. They run tasks that the job's programs submit as functions
of package tasks/scaler/bridge. It ends with the job, and then shuts the workers down.

Nothing in Scaler's protocol proves who a worker is. An address that other machines reach is only taken with --insecure:
whoever reaches it gets tasks with their arguments, and makes up their results.

` + jobdir.WhichJob,
		Example:               "  hvdrun tasks scaler-scheduler --listen tcp://127.0.0.1:2345",
		Args:                  cobra.MaximumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cfg.Listen == "" {
				return errors.New("--listen: where? For workers of this machine, for example at tcp://127.0.0.1:2345")
			}
			if err := bridge.CheckListen(cfg.Listen, cfg.Insecure); err != nil {
				return fmt.Errorf("--listen: %w", err)
			}
			return besideJob(cmd.Context(), p, args, func(ctx context.Context, d *jobdir.Dir) error {
				cfg.Dial, cfg.Log = d.DialTasks(), sideLog(p)
				return bridge.Serve(ctx, cfg)
			})
		},
	}
	cmd.Flags().StringVar(&cfg.Listen, "listen", "", "the `ADDRESS` for workers, as tcp://127.0.0.1:2345 or ipc:///path")
	cmd.Flags().BoolVar(&cfg.Insecure, "insecure", false, "permit an address that other machines reach")
	return cmd
}

// sideLog returns a log on standard error.
func sideLog(p *cli.Program) *logrus.Logger {
	log := logrus.New()
	log.SetOutput(p.Stderr)
	return log
}

// besideJob calls serve for the job that a person means, whose context ends with the job.
func besideJob(ctx context.Context, p *cli.Program, args []string, serve func(context.Context, *jobdir.Dir) error) error {
	d, err := jobdir.TheJob(p.Env, strings.Join(args, ""))
	if err != nil {
		return err
	}
	during, cancel := whileJob(ctx, d)
	defer cancel()
	if err := serve(during, d); err != nil {
		return cli.Failed(err)
	}
	return stopped(ctx)
}

// jobLooks is how often whileJob looks.
const jobLooks = 500 * time.Millisecond

// whileJob returns a context that ends with ctx, and when the job has ended, which takes more than
// the end of its driver. The caller must call cancel.
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

// stopped returns the signal that has ended a command.
func stopped(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != nil {
		return cli.Failed(cause)
	}
	return nil
}
