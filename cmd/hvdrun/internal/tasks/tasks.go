// Package tasks implements the commands that run, show and explain tasks.
package tasks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobdir"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/tasks"
)

// Command returns the command hvdrun tasks.
func Command(p *cli.Program) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "tasks [JOB] [--json]",
		Short: "Show the tasks of a job: how many wait and run, why they wait, and its workers",
		Long: `tasks shows the tasks that programs of a job have submitted (package tasks), by function, and the workers that run them.
For functions with tasks that do not run, it shows why.

` + jobdir.WhichJob,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := jobdir.TheJob(p.Env, strings.Join(args, ""))
			if err != nil {
				return err
			}
			s, err := jobdir.AskTasks(cmd.Context(), d, func(ctx context.Context, pool *tasks.Pool) (tasks.Status, error) { return pool.Status(ctx) })
			if err != nil {
				return cli.Failed(err)
			}
			if asJSON {
				return cli.WriteJSON(p.Stdout, s)
			}
			return show.PrintTasks(p.Stdout, s)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.AddCommand(tasksRunCommand(p), tasksServeCommand(p), tasksExplainCommand(p), gatewayCommand(p))
	return jobdir.CompletesJobs(p, cmd)
}

func tasksExplainCommand(p *cli.Program) *cobra.Command {
	var job string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain [--job JOB] [--json] NUMBER | FUNCTION",
		Short: "Show why a task of a job waits, or where it runs",
		Long: `explain shows where tasks are, and why they wait: the tasks with NUMBER, of which each client has at most one, or at most 20
unfinished tasks of FUNCTION.

` + jobdir.WhichJob,
		Example: "  hvdrun tasks explain 17\n  hvdrun tasks explain trial/v1",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := jobdir.TheJob(p.Env, job)
			if err != nil {
				return err
			}
			all, err := jobdir.AskTasks(cmd.Context(), d, func(ctx context.Context, pool *tasks.Pool) ([]tasks.Explanation, error) {
				return pool.Explain(ctx, args[0])
			})
			switch {
			case err != nil:
				return cli.Failed(err)
			case asJSON:
				return json.NewEncoder(p.Stdout).Encode(all)
			case len(all) == 0:
				return cli.Failed(fmt.Errorf("there is no task %s: it is over and its client has the result, or it is the name of a function without tasks", args[0]))
			}
			return printExplanations(p.Stdout, all)
		},
	}
	cmd.Flags().StringVar(&job, "job", "", "ask `JOB`")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON list")
	return cmd
}

// printExplanations prints one line for each task.
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

func tasksRunCommand(p *cli.Program) *cobra.Command {
	var job, invitation string
	cmd := &cobra.Command{
		Use:   "run [--job JOB | --invitation FILE] PROGRAM [ARGUMENT…]",
		Short: "Run a program that submits tasks to a job",
		Long: `run replaces itself by a program whose tasks.Connect reaches the scheduler of a job. The job's workers must register its
functions too. A job on another machine is reached by an invitation, which hvdrun tasks gateway writes there.

` + jobdir.WhichJob,
		Example: "  hvdrun tasks run --job 3f2a ./sweep -trials 200",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			to := invitation
			if job != "" && to != "" {
				return errors.New("--job and --invitation exclude each other")
			}
			if to != "" {
				if _, _, err := identity.ReadInvitation(to); err != nil {
					return cli.Failed(err)
				}
			} else {
				d, err := jobdir.TheJob(p.Env, job)
				if err != nil {
					return err
				}
				to = d.TasksPath()
			}
			path, err := exec.LookPath(args[0])
			if err != nil {
				return cli.Failed(fmt.Errorf("the program cannot be run: %w", err))
			}
			env := append(os.Environ(), plan.EnvTasks+"="+to)
			return cli.Failed(fmt.Errorf("%s: %w", path, syscall.Exec(path, args, env)))
		},
	}
	cmd.Flags().StringVar(&job, "job", "", "submit to `JOB`")
	cmd.Flags().StringVar(&invitation, "invitation", "", "submit to the job on another machine whose invitation is in `FILE`")
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// AsTasksServe returns the arguments of the job that hvdrun tasks serve stands for, or args
// unchanged for other commands.
func AsTasksServe(args []string) []string {
	if len(args) > 2 && args[0] == "tasks" && args[1] == "serve" && args[2] != "-h" && args[2] != "--help" {
		return append([]string{"--tasks-only"}, args[2:]...)
	}
	return args
}

func tasksServeCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "serve [flags] [--] command [args…]",
		Short: "Run a job whose workers run tasks and do not train",
		Long: `serve is the same as hvdrun --tasks-only, with the same flags: it starts the command once for every slot of some hosts,
keeps as many workers running while hosts come and go, and schedules the tasks that programs submit to them.`,
		Example: "  hvdrun tasks serve -np 4 --min-np 1 -H node1:2,node2:2 ./sweep",
		RunE: func(*cobra.Command, []string) error {
			return errors.New("no command to run\nusage: hvdrun tasks serve [flags] [--] command [args…]")
		},
	}
}
