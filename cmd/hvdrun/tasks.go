package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/internal/audit"
	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/tasks"
	"github.com/hvdrun/hvdrun/tasks/scheduler"
)

// tasksPatience is how long the scheduler may take to answer.
const tasksPatience = 10 * time.Second

func (p *program) tasksCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "tasks [JOB] [--json]",
		Short: "Show the tasks of a job: how many wait and run, why they wait, and its workers",
		Long: `tasks asks the scheduler of a job, which is in its hvdrun, for the tasks that programs of the job have submitted (package
tasks), by function, and for the workers that run them. For functions with tasks that do not run, it says why.

` + whichJob,
		Args:                  cobra.MaximumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := theJob(p.env, strings.Join(args, ""))
			if err != nil {
				return err
			}
			s, err := d.tasksStatus(cmd.Context())
			if err != nil {
				return runError{err}
			}
			if asJSON {
				enc := json.NewEncoder(p.stdout)
				enc.SetIndent("", "  ")
				return enc.Encode(s)
			}
			return printTasks(p.stdout, s)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.AddCommand(p.tasksRunCommand())
	return cmd
}

func (d *jobDir) tasksPath() string { return filepath.Join(d.path, scheduler.SocketName) }

// tasksStatus asks the scheduler of a job.
func (d *jobDir) tasksStatus(ctx context.Context) (s tasks.Status, err error) {
	ctx, cancel := context.WithTimeout(ctx, tasksPatience)
	defer cancel()
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{
		Dial: func(ctx context.Context) (net.Conn, error) { return wire.DialLocal(ctx, d.tasksPath()) },
	})
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, pool.Close()) }()
	return pool.Status(ctx)
}

// printTasks prints tables of functions and workers.
func printTasks(out io.Writer, s tasks.Status) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "%d running, %d ready, %d waiting for others, %d run again so far\n", s.Running, s.Ready, s.Waiting, s.Retried)
	if len(s.Functions) > 0 {
		fmt.Fprint(w, "\nFUNCTION\tNEEDS\tRUNNING\tREADY\tTAKES\n")
	}
	for _, f := range s.Functions {
		takes := "-"
		if f.PaceUS > 0 {
			takes = (time.Duration(f.PaceUS) * time.Microsecond).String()
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\n", f.Function, f.Demand, f.Running, f.Ready, takes)
	}
	if len(s.Workers) > 0 {
		fmt.Fprint(w, "\nWORKER\tHOST\tOFFERS\tRUNNING\tAHEAD\tDONE\n")
	}
	for _, k := range s.Workers {
		name := k.Name
		if k.Leaving {
			name += " (leaves)"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%d\n", name, k.Host, k.Offers, k.Running, k.Ahead, k.Done)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, f := range s.Functions {
		if f.Why != "" {
			if _, err := fmt.Fprintf(out, "\n%s: %d tasks do not run: %s\n", f.Function, f.Ready, f.Why); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *program) tasksRunCommand() *cobra.Command {
	var job string
	cmd := &cobra.Command{
		Use:   "run [--job JOB] PROGRAM [ARGUMENT…]",
		Short: "Run a program that submits tasks to a job",
		Long: `run starts a program in the place of this one, whose tasks.Connect reaches the scheduler of a job. Its functions must be
registered in the job's workers too.

` + whichJob,
		Example:               "  hvdrun tasks run --job 3f2a ./sweep -trials 200",
		Args:                  cobra.MinimumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := theJob(p.env, job)
			if err != nil {
				return err
			}
			path, err := exec.LookPath(args[0])
			if err != nil {
				return runError{fmt.Errorf("the program cannot be run: %w", err)}
			}
			env := append(os.Environ(), plan.EnvTasks+"="+d.tasksPath())
			return runError{fmt.Errorf("%s: %w", path, syscall.Exec(path, args, env))}
		},
	}
	cmd.Flags().StringVar(&job, "job", "", "submit to `JOB`")
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// serveTasks makes the job's scheduler of tasks. Clients of this machine reach it by a socket in
// the job's folder, if it has one. The function it returns ends it.
func (s *settings) serveTasks(d *jobDir, log *logrus.Logger) (*scheduler.Scheduler, func()) {
	side := scheduler.New(scheduler.Config{Run: s.runID, Log: log})
	if d == nil {
		return side, side.Close
	}
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		refused := func(from net.Addr, why error) {
			s.record(audit.Record{What: "connect", Outcome: audit.Refused(why), Who: audit.Who{From: from.String()}})
		}
		if err := side.ServeLocal(ctx, d.tasksPath(), refused); err != nil {
			log.WithError(err).Warn("programs that the job has not started cannot submit tasks")
		}
	})
	return side, func() {
		cancel()
		serving.Wait()
		side.Close()
	}
}
