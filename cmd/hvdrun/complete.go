package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/driver/control"
	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/internal/journal"
)

// completePatience is how long a shell's completion waits for a driver.
const completePatience = time.Second

// completesJobs has a command's first argument completed to the jobs that have not ended.
func (p *program) completesJobs(cmd *cobra.Command) *cobra.Command {
	cmd.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return p.jobWords(), cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

// completesPlaces is completesJobs of a command whose last argument is HOST[:SLOT]: of the job that
// the first one names, or of the only one that runs.
func (p *program) completesPlaces(cmd *cobra.Command) *cobra.Command {
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		switch len(args) {
		case 0:
			return append(p.placeWords(cmd.Context(), ""), p.jobWords()...), cobra.ShellCompDirectiveNoFileComp
		case 1:
			return p.placeWords(cmd.Context(), args[0]), cobra.ShellCompDirectiveNoFileComp
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

// jobWords are the jobs that have not ended, each with its command.
func (p *program) jobWords() (words []string) {
	all, _, err := listJobs(p.env)
	if err != nil {
		return nil
	}
	for _, d := range all {
		if running, err := journal.Locked(d.journal()); d.about.Ended != nil || err != nil && !errors.Is(err, fs.ErrNotExist) || !running && d.keyLost() != nil {
			continue
		}
		words = append(words, cobra.CompletionWithDesc(d.about.RunID, shortCommand(d.about.Command)))
	}
	return words
}

// placeWords are the hosts of a job, and of those with several slots the slots.
func (p *program) placeWords(ctx context.Context, job string) (words []string) {
	d, err := theJob(p.env, job)
	if err != nil {
		return nil
	}
	client, err := control.Dial(d.controlPath())
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
