package jobrun

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/torchrun/prestart"
	"github.com/hvdrun/hvdrun/torchrun/restart"
)

// restartWorker is the subcommand that is each worker of a job with --restart-workers.
const restartWorker = "restart-worker"

// restarted is the argument of restart-worker, as JSON.
type restarted struct {
	Command  []string      `json:"command"`
	Grace    time.Duration `json:"grace"`
	Prestart string        `json:"prestart,omitempty"`
}

// checkRestart returns an error if the settings contradict each other or the command.
func checkRestart(s *settings.Settings, command []string, elastic bool) error {
	switch {
	case s.Restart.Prestart != "" && !s.Restart.Workers:
		return fmt.Errorf("%s is given without --restart-workers", s.Origin("prestart"))
	case s.Restart.Workers && !elastic:
		return fmt.Errorf("%s is given, and the job is not elastic: give --min-np too", s.Origin("restart-workers"))
	case s.Restart.Prestart != "":
		if _, err := prestart.Parse(command); err != nil {
			return fmt.Errorf("%s: %w", s.Origin("prestart"), err)
		}
	}
	return nil
}

// workerCommand returns what a worker runs: the command or, with --restart-workers, the program
// that starts the command again in each world.
func workerCommand(s *settings.Settings, command []string) []string {
	if !s.Restart.Workers {
		return command
	}
	drain := s.Timeouts.WithDefaults().Drain
	told, err := json.Marshal(restarted{
		// A part of the grace that the driver gives the worker, so that the program ends before the
		// worker.
		Command: command, Grace: drain * 4 / 5, Prestart: s.Restart.Prestart,
	})
	if err != nil {
		panic(err) // cannot happen: strings and numbers
	}
	return []string{"sh", "-c", cli.OwnScript, "hvdrun", restartWorker, string(told)}
}

func restartWorkerCommand(p *cli.Program) *cobra.Command {
	return &cobra.Command{
		Use:                restartWorker,
		Hidden:             true,
		DisableFlagParsing: true,
		Args:               cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var told restarted
			if err := json.Unmarshal([]byte(args[0]), &told); err != nil {
				return err
			}
			log := settings.LoggerAt(p, logrus.InfoLevel)
			logrus.SetOutput(cli.Lossy(p.Stderr))
			logrus.SetFormatter(cli.TextFormat(nil, nil))
			defer cli.Inherit(log, cli.DriverReaps)()
			ctx, cancel := p.Impatience(cmd.Context())
			defer cancel()
			err := restart.Run(ctx, restart.Config{
				Command: told.Command, Env: p.Env, Grace: told.Grace, Prestart: told.Prestart,
				Stdout: cli.Lossy(p.Stdout), Stderr: cli.Lossy(p.Stderr), Log: log,
			})
			var exit *launch.ExitError
			switch {
			case err == nil, errors.Is(err, elastic.ErrRemoved), errors.Is(err, elastic.ErrFinished):
				return nil
			case errors.As(err, &exit):
				return cli.ExitWith(err, exit.Code)
			}
			return cli.Failed(err)
		},
	}
}
