package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/driver/launch"
	"github.com/hvdrun/hvdrun/elastic"
	"github.com/hvdrun/hvdrun/torchrun/prestart"
	"github.com/hvdrun/hvdrun/torchrun/restart"
)

// restartWorker is the subcommand that is each worker of a job with --restart-workers.
const restartWorker = "restart-worker"

// restartSettings say how programs run that know nothing of hvdrun.
type restartSettings struct {
	workers  bool
	prestart string
}

// restarted is what a worker of such a job is told.
type restarted struct {
	Command  []string      `json:"command"`
	Grace    time.Duration `json:"grace"`
	Prestart string        `json:"prestart,omitempty"`
}

// checkRestart checks the settings against each other and against the command.
func (s *settings) checkRestart(command []string, elastic bool) error {
	switch {
	case s.restart.prestart != "" && !s.restart.workers:
		return fmt.Errorf("%s is given without --restart-workers", s.origin("prestart"))
	case s.restart.workers && !elastic:
		return fmt.Errorf("%s is given, and the job is not elastic: give --min-np too", s.origin("restart-workers"))
	case s.restart.prestart != "":
		if _, err := prestart.Parse(command); err != nil {
			return fmt.Errorf("%s: %w", s.origin("prestart"), err)
		}
	}
	return nil
}

// workerCommand is what a worker runs: the command, or what starts it anew in each world.
func (s *settings) workerCommand(command []string) []string {
	if !s.restart.workers {
		return command
	}
	drain := s.timeouts.WithDefaults().Drain
	told, err := json.Marshal(restarted{
		// Part of what the driver gives the worker: the end of its program comes before its own.
		Command: command, Grace: drain * 4 / 5, Prestart: s.restart.prestart,
	})
	if err != nil {
		panic(err) // strings and a number
	}
	return []string{"sh", "-c", ownScript, "hvdrun", restartWorker, string(told)}
}

func (p *program) restartWorkerCommand() *cobra.Command {
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
			log := p.logger(&settings{outputSettings: outputSettings{logLevel: logrus.InfoLevel}})
			logrus.SetOutput(p.stderr)
			logrus.SetFormatter(textFormat(nil, nil))
			defer inherit(log, driverReaps)()
			ctx, cancel := p.impatience(cmd.Context())
			defer cancel()
			err := restart.Run(ctx, restart.Config{
				Command: told.Command, Env: p.env, Grace: told.Grace, Prestart: told.Prestart,
				Stdout: p.stdout, Stderr: p.stderr, Log: log,
			})
			var exit *launch.ExitError
			switch {
			case err == nil, errors.Is(err, elastic.ErrRemoved), errors.Is(err, elastic.ErrFinished):
				return nil
			case errors.As(err, &exit):
				return exitWith(err, exit.Code)
			}
			return workFailed(err)
		},
	}
}

// impatience returns a context that ends with any signal but the first SIGTERM, which asks a worker
// to leave its job in good order: package elastic handles it.
func (p *program) impatience(asked context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(asked))
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-asked.Done():
		case <-ctx.Done():
			return
		}
		if errors.Is(context.Cause(asked), stopSignal{Signal: syscall.SIGTERM}) {
			select {
			case <-p.hurry:
			case <-ctx.Done():
				return
			}
		}
		cancel()
	})
	return ctx, func() {
		cancel()
		watching.Wait()
	}
}

// programExit is the failure of a program whose exit status becomes that of its worker.
type programExit struct {
	error
	code int
}
