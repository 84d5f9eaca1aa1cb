package jobdir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/internal/journal"
	"github.com/hvdrun/hvdrun/job"
)

// completePatience is how long a shell's completion waits for a driver.
const completePatience = time.Second

// CompletesJobs makes the shell's completion of a command's first argument offer the jobs that have
// not ended. It returns cmd.
func CompletesJobs(p *cli.Program, cmd *cobra.Command) *cobra.Command {
	cmd.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return jobWords(p), cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

// CompletesPlaces is like CompletesJobs, for a command whose last argument is HOST[:SLOT]: it also
// offers the hosts and slots of the job that the first argument names, or of the only running job.
func CompletesPlaces(p *cli.Program, cmd *cobra.Command) *cobra.Command {
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		switch len(args) {
		case 0:
			return append(placeWords(cmd.Context(), p, ""), jobWords(p)...), cobra.ShellCompDirectiveNoFileComp
		case 1:
			return placeWords(cmd.Context(), p, args[0]), cobra.ShellCompDirectiveNoFileComp
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

// jobWords returns the jobs that have not ended, each with its command.
func jobWords(p *cli.Program) (words []string) {
	all, _, err := List(p.Env)
	if err != nil {
		return nil
	}
	for _, d := range all {
		if running, err := journal.Locked(d.Journal()); d.About.Ended != nil || err != nil && !errors.Is(err, fs.ErrNotExist) || !running && d.KeyLost() != nil {
			continue
		}
		words = append(words, cobra.CompletionWithDesc(d.About.RunID, show.ShortCommand(d.About.Command)))
	}
	return words
}

// placeWords returns the hosts of a job and, for hosts with several slots, the slots.
func placeWords(ctx context.Context, p *cli.Program, job string) (words []string) {
	d, err := TheJob(p.Env, job)
	if err != nil {
		return nil
	}
	client, err := control.Dial(d.ControlPath())
	if err != nil {
		return nil
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, completePatience)
	defer cancel()
	s, err := client.Status(ctx)
	if err != nil {
		return nil
	}
	return placesOf(s)
}

func placesOf(s job.Status) (words []string) {
	for _, h := range s.Hosts {
		host := h.Host
		if strings.Contains(host, ":") { // IPv6
			host = "[" + host + "]"
		}
		words = append(words, host)
		for _, slot := range h.Slots {
			if len(h.Slots) > 1 {
				words = append(words, cobra.CompletionWithDesc(fmt.Sprintf("%s:%d", host, slot.Slot), string(slot.State)))
			}
		}
	}
	return words
}
