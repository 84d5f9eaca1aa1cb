package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/bench"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/build"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/discover"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobrun"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/operate"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/page"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/tasks"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/top"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/torchrun"
	"github.com/hvdrun/hvdrun/internal/logline"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
)

// usage is the first line of the help.
const usage = "hvdrun [flags] [--] command [args…]"

// run executes the command line and returns the exit status. It handles the process's signals until
// it returns.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer, env []string) int {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	hurry, enough, release := watchSignals(ctx, cancel)
	defer release()
	out, errs := &cli.Stream{W: stdout, Cancel: cancel}, &cli.Stream{W: stderr, Cancel: cancel}
	if samePlace(stdout, stderr) {
		errs = out // so that launch.Output knows that both have one destination
	}
	passed := make(chan os.Signal, 4)
	signal.Notify(passed, syscall.SIGUSR1, syscall.SIGUSR2)
	defer signal.Stop(passed)
	p := &cli.Program{Signals: passed, Stdin: stdin, Stdout: out, Stderr: errs, Env: env, Hurry: hurry, Hurried: new(atomic.Bool)}
	p.Log = &cli.Queue{To: cli.Lossy(errs), Most: cli.MaxLog}
	p.Stop = func(now bool) {
		cancel(job.StopCommand{})
		if now {
			cli.Again(hurry)
		}
	}
	done := make(chan error, 1)
	go func() { done <- execute(ctx, p, args) }()
	var err error
	select {
	case err = <-done:
	case <-enough: // it is blocked, perhaps in a write
		err = cli.Failed(context.Cause(ctx))
	}
	if isCancelled(err) && ctx.Err() != nil {
		err = cli.Failed(context.Cause(ctx))
	}
	if err == nil {
		err = out.Err()
	}
	if err != nil && !errors.Is(err, cli.StopSignal{Signal: syscall.SIGPIPE}) {
		said := proc.ExplainListen(safefile.Explain(proc.ExplainDescriptors(err))).Error()
		text := cli.Escape(said)
		if _, of := errors.AsType[cli.RunError](err); of { // other errors are about the command line and have several lines
			text = cli.EscapeLines(strings.TrimPrefix(said, "driver: "))
		}
		before := ""
		if cli.ReadByJournal(env, errs) {
			before = logline.Priority(logrus.ErrorLevel)
		}
		fmt.Fprintln(p.Log, before+"hvdrun:", strings.ReplaceAll(text, "\n", "\n"+before))
	}
	_ = p.Log.Flush(p.FlushPatience()) // a failure cannot be reported
	return cli.Status(err)
}

// isCancelled reports whether an error only says that a context has ended, and not why: many
// libraries do not return the cause.
func isCancelled(err error) bool {
	_, why := errors.AsType[cli.StopSignal](err)
	return !why && (errors.Is(err, context.Canceled) || status.Code(err) == codes.Canceled)
}

// watchSignals ends the context at the first signal that asks to stop, and sends to hurry at the
// second; enough is closed at a further signal if the second has not been received from hurry.
// SIGHUP stays ignored if it was ignored, as under nohup. SIGPIPE is caught so that a write to a
// closed stdout returns an error, which stops the workers, instead of killing this process.
func watchSignals(ctx context.Context, cancel context.CancelCauseFunc) (hurry chan struct{}, enough <-chan struct{}, release func()) {
	stops := []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT}
	if !signal.Ignored(syscall.SIGHUP) {
		stops = append(stops, syscall.SIGHUP)
	}
	caught, pipes := make(chan os.Signal, 4), make(chan os.Signal, 1)
	signal.Notify(caught, stops...)
	signal.Notify(pipes, syscall.SIGPIPE)
	hurry, ignored, done := make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	var watching sync.WaitGroup
	ignore := sync.OnceFunc(func() { close(ignored) })
	watching.Go(func() {
		for {
			select {
			case s := <-caught:
				if ctx.Err() == nil {
					cancel(cli.StopSignal{Signal: s.(syscall.Signal)})
				} else if !cli.Again(hurry) {
					ignore()
				}
			case <-done:
				return
			}
		}
	})
	return hurry, ignored, func() {
		signal.Stop(caught)
		signal.Stop(pipes)
		close(done)
		watching.Wait()
	}
}

// samePlace reports whether both writers are the same terminal or file.
func samePlace(a, b io.Writer) bool {
	f, ok1 := a.(*os.File)
	g, ok2 := b.(*os.File)
	if !ok1 || !ok2 {
		return false
	}
	fi, err1 := f.Stat()
	gi, err2 := g.Stat()
	return err1 == nil && err2 == nil && os.SameFile(fi, gi)
}

// execute parses the arguments and runs the command. An error that is not a cli.RunError is about
// the arguments.
func execute(ctx context.Context, p *cli.Program, args []string) error {
	root := command(p)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	subcommands := []string{cobra.ShellCompRequestCmd, cobra.ShellCompNoDescRequestCmd}
	for _, c := range root.Commands() {
		if !c.IsAdditionalHelpTopicCommand() {
			subcommands = append(subcommands, c.Name())
		}
	}
	if len(args) > 0 && args[0] == "run" && !isProgram(p, "run") {
		args = args[1:] // as in docker and podman
	}
	args, err := settings.Normalize(tasks.AsTasksServe(args), subcommands, func(word string) string {
		if isProgram(p, word) {
			return ""
		}
		return settings.NearestOf(word, namesOf(root))
	})
	if err != nil {
		return err
	}
	if err := unknownCommand(root, args); err != nil {
		return err
	}
	p.Args = args
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}

// isProgram reports whether a word names a program on this machine, or may name one on another
// machine.
func isProgram(p *cli.Program, word string) bool {
	if strings.Contains(word, "/") {
		return true
	}
	if _, err := os.Stat(word); err == nil {
		return true
	}
	path, _ := cli.Lookup(p.Env, "PATH")
	return slices.ContainsFunc(filepath.SplitList(path), func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, word))
		return err == nil
	})
}

// groups are the groups of commands in the help; commands not listed here are in the last group.
var groups = []settings.Group{
	{Title: "Watch and steer a job", Commands: []string{
		"jobs", "status", "top", "dashboard", "logs", "wait", "replay", "stacks", "drain", "exclude", "readmit", "scale", "stop", "resume",
	}},
	{Title: "Run other programs", Commands: []string{"torchrun", "tasks", "submit"}},
	{Title: "Hosts", Commands: []string{"agent", "cluster", "check", "discover"}},
	{Title: "More"},
}

func command(p *cli.Program) *cobra.Command {
	var version bool
	root := &cobra.Command{
		Use:   usage,
		Short: "Run a data-parallel training program on all slots of some hosts, and keep it going while hosts come and go",
		Long: `hvdrun starts a command once for every slot of some hosts, connects the workers, and keeps the training going
while hosts come and go.`,
		Annotations: map[string]string{settings.Notes: `The first word that is not a flag begins the command, which gets all words after it unchanged. hvdrun looks for a program
without a slash in PATH, then in the working directory. The word run may come before everything. Flags may also be written with one dash (-np 8), as
environment variables (HVD_MIN_NP=2 for --min-np), or as keys of the YAML file that --config-file names, at the top level
or in the section of the flag; flags win over variables, variables over the file. The file may also say
what to run: command, env and dir in the section job. Durations D are 30s, 500ms,
or a number of seconds. --num-proc, --min-num-proc and --max-num-proc are other names of -np, --min-np and --max-np.`},
		Example: `  hvdrun -np 4 --min-np 2 ./train                      # two may die
  hvdrun -np 16 --min-np 8 -H node1:8,node2:8 ./train  # by ssh
  hvdrun -np 2 --host-discovery-script ./hosts.sh ./train -epochs 10
  hvdrun -d -np 4 ./train                              # in the background
  hvdrun torchrun --nproc-per-node 4 train.py          # a PyTorch program`,
		Args:          cobra.ArbitraryArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, command []string) error {
			if version {
				_, err := fmt.Fprintln(p.Stdout, "hvdrun", build.Version())
				return err
			}
			s, err := settings.Load(cmd.Flags(), p.Env)
			if err != nil {
				return err
			}
			if len(command) == 0 {
				command = s.Command
			}
			if len(command) == 0 {
				return errors.New("no command to run\nusage: " + usage + "\n`hvdrun --help` has examples and names the other commands; `hvdrun help flags` lists the flags")
			}
			return jobrun.Run(cmd.Context(), p, &s, command, nil)
		},
	}
	root.SetIn(p.Stdin)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	settings.ShapeHelp(root)
	root.Flags().SetInterspersed(false)
	settings.AddFlags(root.Flags(), false)
	root.InitDefaultHelpFlag()
	root.Flags().BoolVarP(&version, "version", "v", false, "version for hvdrun")
	for name, choices := range map[string][]string{
		"failure-policy": {"slot", "host"},
		"log-format":     {"text", "json"},
		"log-level":      {"trace", "debug", "info", "warning", "error", "fatal"},
	} {
		if err := root.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(choices, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err) // the flag is not in the table
		}
	}
	// The value is the name of a plugin or a file.
	if err := root.RegisterFlagCompletionFunc("discovery-plugin", cobra.FixedCompletions(hostsource.OwnPlugins, cobra.ShellCompDirectiveDefault)); err != nil {
		panic(err)
	}
	root.AddCommand(build.Command(p), settings.ConfigCommand(p, hostsource.Possible), page.Command(p), page.ReplayCommand(p), tasks.Command(p), top.Command(p))
	for _, of := range []func(*cli.Program) []*cobra.Command{
		agent.Commands, bench.Commands, discover.Commands, jobrun.Commands, operate.Commands, torchrun.Commands,
	} {
		root.AddCommand(of(p)...)
	}
	settings.GroupCommands(root, groups)
	explainUse(root)
	return root
}
