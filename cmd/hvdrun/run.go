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
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/logline"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// Exit statuses of the contract that are not the driver's.
const (
	statusUsage = 2
	statusShell = 128 // plus the signal
)

// usage is the first line of the help.
const usage = "hvdrun [flags] [--] command [args…]"

// program is one run of hvdrun: its streams, and what signals ask of it.
type program struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	env            []string
	args           []string        // as normalize has them
	log            *queue          // what is logged, on its way to stderr; nil: it goes there at once
	hurried        *atomic.Bool    // a person has asked again to stop
	hurry          <-chan struct{} // receives when a person asks again to stop
	stop           func(now bool)  // does what a signal does, and where now is set what another does
}

// runError is an error of the work itself; all others are of the command line.
type runError struct{ error }

func (e runError) Unwrap() error { return e.error }

// stopSignal is why what runs was stopped.
type stopSignal = job.StopSignal

// run does what the arguments ask for and returns the exit status. It takes over the process's
// signals meanwhile.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer, env []string) int {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	hurry, enough, release := watchSignals(ctx, cancel)
	defer release()
	out, errs := &stream{w: stdout, cancel: cancel}, &stream{w: stderr, cancel: cancel}
	if samePlace(stdout, stderr) {
		errs = out // so that launch.Output knows that their lines meet
	}
	p := &program{stdin: stdin, stdout: out, stderr: errs, env: env, hurry: hurry, hurried: new(atomic.Bool)}
	p.log = &queue{to: errs, most: maxLog}
	p.stop = func(now bool) {
		cancel(stopSignal{Signal: syscall.SIGTERM})
		if now {
			again(hurry)
		}
	}
	done := make(chan error, 1)
	go func() { done <- p.execute(ctx, args) }()
	var err error
	select {
	case err = <-done:
	case <-enough: // it hangs, in a write perhaps
		err = workFailed(context.Cause(ctx))
	}
	if err != nil && !errors.Is(err, stopSignal{Signal: syscall.SIGPIPE}) {
		text := escape(err.Error())
		if _, of := errors.AsType[runError](err); of { // others are of the command line, with lines of their own
			text = escapeLines(strings.TrimPrefix(err.Error(), "driver: "))
		}
		before := ""
		if readByJournal(env, errs) {
			before = logline.Priority(logrus.ErrorLevel)
		}
		fmt.Fprintln(p.log, before+"hvdrun:", strings.ReplaceAll(text, "\n", "\n"+before))
	}
	_ = p.log.flush(p.flushPatience()) // it cannot be reported
	return status(err)
}

// flushPatience is how long the end of the program waits for a writer that takes nothing.
func (p *program) flushPatience() time.Duration {
	if p.hurried.Load() {
		return hurriedFlush
	}
	return flushPatience
}

// status maps an error to the exit status of the contract.
func status(err error) int {
	var stopped stopSignal
	var failed runError
	var exit programExit
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.code
	case errors.As(err, &stopped) && !errors.Is(err, job.ErrCheckpoint):
		return statusShell + int(stopped.Signal)
	case errors.As(err, &failed):
		return job.ExitStatus(failed.error)
	}
	return statusUsage
}

// watchSignals ends the context with the first signal that asks to stop, and passes on that there
// was another; enough is closed when there is yet another and that was not handled. SIGHUP stays
// ignored where it was, as under nohup. SIGPIPE is caught so that a closed stdout becomes an error
// of a write, which stops the workers, rather than this process's sudden end.
func watchSignals(ctx context.Context, cancel context.CancelCauseFunc) (hurry chan struct{}, enough <-chan struct{}, release func()) {
	stops := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
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
					cancel(stopSignal{Signal: s.(syscall.Signal)})
				} else if !again(hurry) {
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

// again passes on, without delay, that a person is impatient, and returns false where nobody has
// heeded it the last time.
func again(hurry chan<- struct{}) bool {
	select {
	case hurry <- struct{}{}:
		return true
	default:
		return false
	}
}

// samePlace returns whether both writers are one terminal or file.
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

// stream is stdout or stderr: several goroutines may write, and when its reader has gone the job is
// stopped as if by the signal that says so, and what is written later is lost.
type stream struct {
	mu     sync.Mutex
	w      io.Writer
	cancel context.CancelCauseFunc
}

// whenClosed has f called when the reader has gone, in place of what stops the job.
func (s *stream) whenClosed(f context.CancelCauseFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel = f
}

// Write passes b on at once.
func (s *stream) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := s.w.Write(b)
	if errors.Is(err, syscall.EPIPE) {
		s.cancel(stopSignal{Signal: syscall.SIGPIPE})
		return len(b), nil
	}
	return n, err
}

// execute reads the arguments and does the work. Errors that are no runError are of the arguments.
func (p *program) execute(ctx context.Context, args []string) error {
	root := p.command()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	subcommands := []string{cobra.ShellCompRequestCmd, cobra.ShellCompNoDescRequestCmd}
	var shown []string
	for _, c := range root.Commands() {
		subcommands = append(subcommands, c.Name())
		if !c.Hidden {
			shown = append(shown, c.Name())
		}
	}
	args, err := normalize(asTasksServe(args), subcommands, func(word string) string {
		if p.isProgram(word) {
			return ""
		}
		return nearestOf(word, shown)
	})
	if err != nil {
		return err
	}
	p.args = args
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}

// isProgram returns whether a word names a program of this machine, or what may be one elsewhere.
func (p *program) isProgram(word string) bool {
	if strings.Contains(word, "/") {
		return true
	}
	if _, err := os.Stat(word); err == nil {
		return true
	}
	path, _ := lookup(p.env, "PATH")
	return slices.ContainsFunc(filepath.SplitList(path), func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, word))
		return err == nil
	})
}

func (p *program) command() *cobra.Command {
	root := &cobra.Command{
		Use:   usage,
		Short: "Run a data-parallel training program on all slots of some hosts, and keep it going while hosts come and go",
		Long: `hvdrun starts a command once for every slot of some hosts, connects the workers, and keeps the training going
while hosts come and go.

The first word that is no flag begins the command, which gets all words after it untouched. A program without a slash is
looked for in PATH, and where that lacks it in the working directory. Flags may also be written with one dash (-np 8), as
environment variables (HVD_MIN_NP=2 for --min-np), or as keys of the YAML file that --config-file names, where they stand
at the top or in the sections below; a flag goes before a variable, a variable before the file. The file may also say
what to run: command, env and dir in the section job. Durations D are 30s, 500ms,
or a number of seconds. --num-proc, --min-num-proc and --max-num-proc are other names of -np, --min-np and --max-np.`,
		Example: `  hvdrun -np 4 ./train
  hvdrun -np 2 --min-np 1 --max-np 8 --host-discovery-script ./discover.sh ./train -epochs 10`,
		Args:                  cobra.ArbitraryArgs,
		DisableFlagsInUseLine: true,
		SilenceErrors:         true,
		SilenceUsage:          true,
		Version:               version(),
		RunE: func(cmd *cobra.Command, command []string) error {
			s, err := load(cmd.Flags(), p.env)
			if err != nil {
				return err
			}
			if len(command) == 0 {
				command = s.command
			}
			if len(command) == 0 {
				return errors.New("no command to run\nusage: " + usage)
			}
			return p.runJob(cmd.Context(), &s, command, nil)
		},
	}
	root.SetIn(p.stdin)
	root.SetOut(p.stdout)
	root.SetErr(p.stderr)
	groupFlags(root)
	root.SetVersionTemplate("hvdrun {{.Version}}\n")
	root.Flags().SetInterspersed(false)
	addFlags(root.Flags(), false)
	for name, choices := range map[string][]string{
		"failure-policy": {"slot", "host"},
		"log-format":     {"text", "json"},
		"log-level":      {"trace", "debug", "info", "warning", "error", "fatal"},
	} {
		if err := root.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(choices, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err) // the flag is not in the table
		}
	}
	root.AddCommand(p.discoverCommand(), p.agentCommand(), p.clusterCommand(), p.checkCommand(), p.completesJobs(p.resumeCommand()),
		p.configCommand(func(s *settings) error { return s.possible() }), p.benchCommand(), p.benchRankCommand(), p.restartWorkerCommand(),
		p.torchrunCommand(), p.torchrunDriverCommand(), p.versionCommand(), p.submitCommand(),
		p.completesJobs(p.tasksCommand()), p.completesJobs(p.dashboardCommand()), p.completesJobs(p.topCommand()))
	root.AddCommand(p.controlCommands()...)
	return root
}

// logger returns the log that the settings ask for.
func (p *program) logger(s *settings) *logrus.Logger {
	log := logrus.New()
	log.SetOutput(p.stderr)
	if p.log != nil {
		log.SetOutput(p.log)
		p.log.onDropped(func(n int) []byte {
			text, _ := log.Formatter.Format(&logrus.Entry{
				Logger: log, Time: time.Now(), Level: logrus.WarnLevel,
				Message: fmt.Sprintf("%d lines of the log dropped: nobody read them", n),
			})
			return text
		})
	}
	log.SetLevel(s.logLevel)
	if s.logJSON {
		log.SetFormatter(&logrus.JSONFormatter{TimestampFormat: timeJSON})
		if s.runID != "" {
			log.AddHook(jobField(s.runID))
		}
	} else {
		log.SetFormatter(textFormat(p.env, p.stderr))
	}
	safefile.TellLacks(func(text string) { log.Warn(text) })
	for _, text := range s.mistyped {
		log.Warn(text)
	}
	s.mistyped = nil
	return log
}

// exitWith returns the failure of a program, which becomes this one's exit status.
func exitWith(err error, code int) error { return programExit{err, code} }

// workFailed returns an error of the work itself.
func workFailed(err error) error { return runError{err} }
