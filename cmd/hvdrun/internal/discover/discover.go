// Package discover implements the commands that list the hosts that the sources find, test a
// source, and check whether hosts can be used.
package discover

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/plan"
)

// Commands returns hvdrun discover and hvdrun check.
func Commands(p *cli.Program) []*cobra.Command {
	return []*cobra.Command{discoverCommand(p), checkCommand(p)}
}

func discoverCommand(p *cli.Program) *cobra.Command {
	var asJSON, watch, verify bool
	cmd := &cobra.Command{
		Use:   "discover [flags]",
		Short: "Print the hosts that the sources find, or test a source",
		Long: `discover asks the source of hosts once, as a job with the same flags would, and prints the hosts in the order in which
they get ranks. For hosts with an agent it also shows how many slots have workers (USED), and of which runs (RUN). It exits
with 6 if the source fails.

With --watch it continues until it is stopped, and prints each change and each failure as a job would learn of it. With
--verify it tests the requirements of a source, prints a line for each, and exits with 1 if one is not met; the hosts should
not change meanwhile. discovery/README.md lists the requirements.`,
		Example: `  hvdrun discover --host-discovery-script ./discover.sh
  hvdrun discover --discovery-plugin ./racks --discovery-config room=2 --watch
  hvdrun discover --discovery-plugin ./racks --discovery-config room=2 --verify`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := settings.Load(cmd.Flags(), p.Env)
			if err != nil {
				return err
			}
			switch {
			case watch:
				return discoverWatch(cmd.Context(), p, &s, asJSON)
			case verify:
				return discoverVerify(cmd.Context(), p, &s)
			}
			return discover(cmd.Context(), p, &s, asJSON)
		},
	}
	settings.AddFlags(cmd.Flags(), true)
	cmd.Flags().BoolVar(&watch, "watch", false, "continue, and print changes")
	cmd.Flags().BoolVar(&verify, "verify", false, "test whether the source keeps what every source promises")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, with --watch one a line")
	cmd.MarkFlagsMutuallyExclusive("watch", "verify")
	cmd.MarkFlagsMutuallyExclusive("json", "verify")
	return cmd
}

// understood is what discover prints with --json.
type understood struct {
	Hosts []understoodHost `json:"hosts"`
	Slots int              `json:"slots"`
}

type understoodHost struct {
	Host  string `json:"host"`
	Slots int    `json:"slots"`
	Local bool   `json:"local"`
	// Agent: the host's agent starts the workers there, also if the host is this machine. Omitted
	// if false.
	Agent bool `json:"agent,omitempty"`
	// Draining is omitted if false.
	Draining bool `json:"draining,omitempty"`
	// Used is the number of the host's slots that have workers, by run, as reported by its agent;
	// nil: unknown.
	Used map[string]uint32 `json:"used,omitempty"`
}

// understand returns what is known about the hosts. It resolves their names. If ctx ends meanwhile,
// it returns the cause of ctx.
func understand(ctx context.Context, s *settings.Settings, hosts []plan.Host) (understood, error) {
	local, err := client.LocalHosts(ctx, hostsource.HostNames(hosts))
	if err != nil {
		return understood{}, err
	}
	found := understood{Hosts: []understoodHost{}}
	for i, h := range hosts {
		agent := false
		if s.Cluster.Source != nil {
			_, agent = hostsource.FindAgent(s, h.Name)
		}
		found.Hosts = append(found.Hosts, understoodHost{Host: h.Name, Slots: h.Slots, Local: local[i], Agent: agent, Draining: h.Draining})
		found.Slots += h.Slots
	}
	return found, nil
}

// usedPatience bounds the wait for the agents to report which of their slots are used.
const usedPatience = 3 * time.Second

// askUsed queries the agents of all hosts at the same time and sets Used in hosts. It blocks for at
// most usedPatience.
func askUsed(ctx context.Context, s *settings.Settings, hosts []understoodHost, log logrus.FieldLogger) {
	ctx, cancel := context.WithTimeout(ctx, usedPatience)
	defer cancel()
	var asking sync.WaitGroup
	for i := range hosts {
		h := &hosts[i]
		addr, ok := "", h.Agent
		if ok {
			addr, ok = hostsource.FindAgent(s, h.Host)
		}
		if !ok {
			continue
		}
		asking.Go(func() {
			used, err := client.Used(ctx, s.Cluster.Credentials, h.Host, addr)
			if err != nil {
				log.Warnf("the used slots of host %s are not known: %v", h.Host, err)
				return
			}
			if h.Used = used; used == nil {
				h.Used = map[string]uint32{}
			}
		})
	}
	asking.Wait()
}

// ask asks the source of hosts once. The source stays open until the caller calls closeSource.
func ask(ctx context.Context, s *settings.Settings, log logrus.FieldLogger) (hosts []plan.Host, closeSource func(), err error) {
	fixed, err := hostsource.Fixed(s)
	if err != nil {
		return nil, nil, err
	}
	s.RunID = driver.NewRunID() // for the calls to agents
	return hostsource.Ask(ctx, s, fixed, log)
}

func discover(ctx context.Context, p *cli.Program, s *settings.Settings, asJSON bool) error {
	log := settings.Logger(p, s)
	hosts, closeSource, err := ask(ctx, s, log)
	if err != nil {
		return err
	}
	defer closeSource()
	found, err := understand(ctx, s, hosts)
	if err != nil {
		return cli.Failed(err)
	}
	askUsed(ctx, s, found.Hosts, log)
	return cli.Failed(printHosts(p, found, asJSON))
}

func printHosts(p *cli.Program, found understood, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(p.Stdout).Encode(found)
	}
	agents := slices.ContainsFunc(found.Hosts, func(h understoodHost) bool { return h.Agent })
	w := tabwriter.NewWriter(p.Stdout, 0, 0, 2, ' ', 0)
	header := "HOST\tSLOTS\tLOCAL"
	if agents { // other sources do not report the use of slots
		header += "\tUSED\tRUN"
	}
	fmt.Fprintln(w, header)
	for _, h := range found.Hosts {
		local := map[bool]string{true: "yes", false: "no"}[h.Local]
		if h.Agent {
			local = "agent"
		}
		switch {
		case agents && h.Used == nil:
			local += "\t-\t-"
		case agents:
			used, runs := show.Used(h.Used)
			local += "\t" + used + "\t" + runs
		}
		if h.Draining {
			local += "\tdraining"
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", cli.EscapeCell(h.Host), h.Slots, local)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(p.Stdout, "hosts: %d, slots: %d\n", len(found.Hosts), found.Slots)
	return err
}
