package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/driver/audit"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/journal"
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
			s, err := askTasks(cmd.Context(), d, func(ctx context.Context, pool *tasks.Pool) (tasks.Status, error) { return pool.Status(ctx) })
			if err != nil {
				return workFailed(err)
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
	cmd.AddCommand(p.tasksRunCommand(), p.tasksServeCommand(), p.tasksExplainCommand(), p.gatewayCommand(), p.scalerWorkerCommand(), p.scalerSchedulerCommand())
	return cmd
}

func (d *jobDir) tasksPath() string { return filepath.Join(d.path, scheduler.SocketName) }

// askTasks asks the scheduler of a job.
func askTasks[T any](ctx context.Context, d *jobDir, ask func(context.Context, *tasks.Pool) (T, error)) (answer T, err error) {
	ctx, cancel := context.WithTimeout(ctx, tasksPatience)
	defer cancel()
	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{Dial: d.dialTasks(), Patience: time.Millisecond}) // a person can ask again
	if err != nil {
		return answer, err
	}
	defer func() { err = errors.Join(err, pool.Close()) }()
	return ask(ctx, pool)
}

func (p *program) tasksExplainCommand() *cobra.Command {
	var job string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain [--job JOB] [--json] NUMBER | FUNCTION",
		Short: "Say why a task of a job waits, or where it runs",
		Long: `explain says of tasks where they stand, and why: those with a number, of which each client may have one, or those of a
function that are not over, at most 20.

` + whichJob,
		Example:               "  hvdrun tasks explain 17\n  hvdrun tasks explain trial/v1",
		Args:                  cobra.ExactArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := theJob(p.env, job)
			if err != nil {
				return err
			}
			all, err := askTasks(cmd.Context(), d, func(ctx context.Context, pool *tasks.Pool) ([]tasks.Explanation, error) {
				return pool.Explain(ctx, args[0])
			})
			switch {
			case err != nil:
				return workFailed(err)
			case asJSON:
				return json.NewEncoder(p.stdout).Encode(all)
			case len(all) == 0:
				return workFailed(fmt.Errorf("there is no task %s: it is over and its client has the result, or it is the name of a function without tasks", args[0]))
			}
			return printExplanations(p.stdout, all)
		},
	}
	cmd.Flags().StringVar(&job, "job", "", "ask `JOB`")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON list")
	return cmd
}

// printExplanations prints a line for each task.
func printExplanations(out io.Writer, all []tasks.Explanation) error {
	for _, e := range all {
		text := fmt.Sprintf("task %d of %s, %s (%s), is %s: %s", e.N, e.By, e.Function, e.Demand, e.State, e.Why)
		if e.Tries > 0 {
			text += fmt.Sprintf("; it has been run again %d times", e.Tries)
		}
		if e.Deaths > 0 {
			text += fmt.Sprintf("; %d workers were lost while they ran it", e.Deaths)
		}
		if _, err := fmt.Fprintln(out, text); err != nil {
			return err
		}
	}
	return nil
}

// printTasks prints tables of functions and workers.
func printTasks(out io.Writer, s tasks.Status) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "%d running, %d ready, %d waiting for others, %d run again so far\n", s.Running, s.Ready, s.Waiting-s.Suspended, s.Retried)
	if s.Suspended > 0 {
		fmt.Fprintf(w, "%d of the journal, for which workers are waited that may have them\n", s.Suspended)
	}
	if s.Journal != "" {
		fmt.Fprintf(w, "the journal cannot be written: %s\n", s.Journal)
	}
	if m := s.Memory; m != nil && m.Used > 0 {
		fmt.Fprintf(w, "%s of %s of memory (--tasks-memory) are taken\n", mebibytes(m.Used), mebibytes(m.Most))
		if len(m.Clients) > 0 {
			fmt.Fprint(w, "\nCLIENT\tTASKS\tTAKES\tNOT READ\n")
		}
		for _, c := range m.Clients {
			name := c.Name
			if c.Gone {
				name += " (gone)"
			}
			if c.Paused {
				name += " (reads no results: its tasks wait)"
			}
			fmt.Fprintf(w, "%s\t%d\t%s\t%s\n", name, c.Tasks, mebibytes(c.Bytes), mebibytes(c.Unread))
		}
	}
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
		switch {
		case k.Leaving:
			name += " (leaves)"
		case k.Trains:
			name += " (trains)"
		}
		running := strconv.Itoa(k.Running)
		if k.Waits > 0 {
			running += fmt.Sprintf(" (%d wait for others)", k.Waits)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%d\n", name, k.Host, k.Offers, running, k.Ahead, k.Done)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, line := range s.Lasting() {
		if _, err := fmt.Fprintf(out, "\n%s\n", line); err != nil {
			return err
		}
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

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

func (p *program) tasksRunCommand() *cobra.Command {
	var job, invitation string
	cmd := &cobra.Command{
		Use:   "run [--job JOB | --invitation FILE] PROGRAM [ARGUMENT…]",
		Short: "Run a program that submits tasks to a job",
		Long: `run starts a program in the place of this one, whose tasks.Connect reaches the scheduler of a job. Its functions must be
registered in the job's workers too. A job of another machine is reached by an invitation, which hvdrun tasks gateway has
written there.

` + whichJob,
		Example:               "  hvdrun tasks run --job 3f2a ./sweep -trials 200",
		Args:                  cobra.MinimumNArgs(1),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			to := invitation
			if job != "" && to != "" {
				return errors.New("--job and --invitation exclude each other")
			}
			if to != "" {
				if _, _, err := identity.ReadInvitation(to); err != nil {
					return workFailed(err)
				}
			} else {
				d, err := theJob(p.env, job)
				if err != nil {
					return err
				}
				to = d.tasksPath()
			}
			path, err := exec.LookPath(args[0])
			if err != nil {
				return workFailed(fmt.Errorf("the program cannot be run: %w", err))
			}
			env := append(os.Environ(), plan.EnvTasks+"="+to)
			return workFailed(fmt.Errorf("%s: %w", path, syscall.Exec(path, args, env)))
		},
	}
	cmd.Flags().StringVar(&job, "job", "", "submit to `JOB`")
	cmd.Flags().StringVar(&invitation, "invitation", "", "submit to the job of another machine whose invitation `FILE` has")
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// asTasksServe returns the arguments of the job that hvdrun tasks serve means.
func asTasksServe(args []string) []string {
	if len(args) > 2 && args[0] == "tasks" && args[1] == "serve" && args[2] != "-h" && args[2] != "--help" {
		return append([]string{"--tasks-only"}, args[2:]...)
	}
	return args
}

func (p *program) tasksServeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "serve [flags] [--] command [args…]",
		Short: "Run a job whose workers run tasks and do not train",
		Long: `serve is hvdrun --tasks-only, and takes the same flags: it starts the command once for every slot of some hosts, keeps as
many workers running while hosts come and go, and schedules the tasks that programs submit to them.`,
		Example:               "  hvdrun tasks serve -np 4 --min-np 1 -H node1:2,node2:2 ./sweep",
		DisableFlagsInUseLine: true,
		RunE: func(*cobra.Command, []string) error {
			return errors.New("no command to run\nusage: hvdrun tasks serve [flags] [--] command [args…]")
		},
	}
}

// tasksJournal is where the job's tasks are written down.
func (d *jobDir) tasksJournal() string { return filepath.Join(d.path, "tasks.journal") }

// forgetTasks removes the journal of tasks of a job that is over.
func (d *jobDir) forgetTasks() error {
	for _, path := range []string{d.tasksJournal(), d.tasksJournal() + ".damaged"} {
		if err := journal.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// openTasks makes the job's scheduler of tasks, which goes on with what is written down. copied:
// the job's journal has a copy, from which another machine may go on with it.
func (s *settings) openTasks(
	d *jobDir, authority *identity.Authority, copied bool, events chan<- job.TaskEvent, to *tracks, log *logrus.Logger,
) (*scheduler.Scheduler, error) {
	creds, err := authority.Issue(identity.Subject{Role: identity.Driver})
	if err != nil {
		return nil, err
	}
	cfg := scheduler.Config{Run: s.runID, Credentials: creds, Repeated: copied, Memory: s.tasksMemory, Grace: s.tasksGrace, Log: log, Event: func(e scheduler.Event) {
		select {
		case events <- taskEvent(e):
		default: // the driver is busy, and these are not worth waiting for
		}
	}}
	if to != nil {
		cfg.Ran = to.task
	}
	if d == nil || d.secrets.dir == "" {
		return scheduler.New(cfg), nil
	}
	cfg.Journal = d.tasksJournal()
	side, err := scheduler.Open(cfg)
	if err == nil || errors.Is(err, journal.ErrLocked) {
		return side, err
	}
	log.WithError(err).Errorf("the tasks of the job are lost; %s.damaged has what can be read of them", cfg.Journal)
	if err := os.Rename(cfg.Journal, cfg.Journal+".damaged"); err != nil {
		return nil, err
	}
	return scheduler.New(cfg), nil
}

// serveTasks makes the job's scheduler of tasks. Clients of this machine reach it by a socket in
// the job's folder, if it has one. The function it returns ends it.
func (s *settings) serveTasks(
	d *jobDir, authority *identity.Authority, copied bool, events chan<- job.TaskEvent, to *tracks, log *logrus.Logger,
) (*scheduler.Scheduler, func(), error) {
	side, err := s.openTasks(d, authority, copied, events, to, log)
	if err != nil {
		return nil, nil, err
	}
	if d == nil {
		return side, side.Close, nil
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
	}, nil
}

// taskEvent returns an event of the scheduler as the job has it.
func taskEvent(e scheduler.Event) job.TaskEvent {
	names := map[scheduler.EventKind]job.EventName{
		scheduler.WorkerJoined: job.TaskWorkerJoined, scheduler.WorkerLeft: job.TaskWorkerLeft, scheduler.TaskFailed: job.TaskFailed,
		scheduler.WorkerStuck: job.TaskWorkerStuck,
	}
	return job.TaskEvent{
		Name: names[e.What], Worker: e.Worker, Host: e.Host, Offers: e.Offers, Lost: e.Lost,
		Function: e.Function, Client: e.Client, N: e.N, Reason: e.Failure, Text: e.Text, Dropped: e.Dropped,
		Incarnation: e.Incarnation,
	}
}
