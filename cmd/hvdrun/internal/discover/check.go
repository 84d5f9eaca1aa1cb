package discover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/build"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/show"
	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/cluster"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/plan"
)

func checkCommand(p *cli.Program) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check [flags]",
		Short: "Check whether workers can be started on all hosts, and print a table",
		Long: `check asks the source of hosts once, as a job with the same flags would, and starts an agent on each host the way a job
would (through ssh, or on this machine; a cluster's agent is used if it runs there). It prints for each host whether that
succeeded, the difference of its clock, its version of hvdrun, its GPUs, how many of its slots have workers and of which
runs, and how many of the other hosts it reaches. If it reaches another host at several addresses, a line names them, with
the interfaces, the known speeds of their links, and the round trip: workers measure them and use the fastest (see
--network-interfaces).

For each problem a line says where it is, and what: name lookup, connection, host key, authentication, directory, copy or
command. The exit status is 1 then, and 6 if the source of hosts fails.`,
		Example: `  hvdrun check -H node1:8,node2:8
  hvdrun check --host-discovery-script ./discover.sh -i ~/.ssh/cluster`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := settings.Load(cmd.Flags(), p.Env)
			if err != nil {
				return err
			}
			return check(cmd.Context(), p, &s, asJSON)
		},
	}
	settings.AddFlags(cmd.Flags(), true)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

// checked is the result of the check of one host.
type checked struct {
	Host  string `json:"host"`
	Slots int    `json:"slots"`
	Local bool   `json:"local"`
	// Took is the time until the agent answered, in seconds.
	Took float64 `json:"took"`
	// Offset is how far the host's clock is ahead of this machine's, in seconds.
	Offset  float64 `json:"offset"`
	Version string  `json:"version"`
	GPUs    int     `json:"gpus"`
	// Used is the number of the host's slots that have workers, by run.
	Used map[string]uint32 `json:"used,omitempty"`
	// Reaches is the number of other hosts whose agents the host has reached.
	Reaches  int      `json:"reaches"`
	Problems []string `json:"problems"`
	// Routes are the routes to other hosts, for hosts to which there are several.
	Routes []route `json:"routes,omitempty"`

	ok bool // the host has an agent
	in client.Inspection
}

func (c *checked) problem(format string, args ...any) {
	c.Problems = append(c.Problems, fmt.Sprintf(format, args...))
}

func check(ctx context.Context, p *cli.Program, s *settings.Settings, asJSON bool) error {
	log := settings.Logger(p, s)
	hosts, closeSource, err := ask(ctx, s, log)
	if err != nil {
		return err
	}
	defer closeSource()
	authority, err := identity.NewAuthority(s.RunID)
	if err != nil {
		return cli.Failed(err)
	}
	cfg, err := hostsource.Agents(ctx, s, authority, hosts, log)
	if err != nil {
		return err
	}
	local, err := client.LocalHosts(ctx, hostsource.HostNames(hosts))
	if err != nil {
		return cli.Failed(err)
	}
	agents := client.New(cfg)
	all := inspectHosts(ctx, agents, hosts, local)
	_ = agents.Close()
	if ctx.Err() != nil {
		return cli.Failed(context.Cause(ctx))
	}
	if asJSON {
		err = json.NewEncoder(p.Stdout).Encode(map[string]any{"hosts": all})
	} else {
		err = printChecked(p, all)
	}
	if err != nil {
		return cli.Failed(err)
	}
	bad := 0
	for _, c := range all {
		if len(c.Problems) > 0 {
			bad++
		}
	}
	if bad > 0 {
		return cli.Failed(fmt.Errorf("%d of %d hosts have problems", bad, len(all)))
	}
	return nil
}

// inspectHosts queries all hosts at the same time, and then makes each host connect to the others.
func inspectHosts(ctx context.Context, agents *client.Agents, hosts []plan.Host, local []bool) []*checked {
	all := make([]*checked, len(hosts))
	var asking sync.WaitGroup
	for i, h := range hosts {
		all[i] = &checked{Host: h.Name, Slots: h.Slots, Local: local[i], Problems: []string{}}
		asking.Go(func() { all[i].inspect(ctx, agents) })
	}
	asking.Wait()
	for i, c := range all {
		if c.ok {
			asking.Go(func() { c.reach(ctx, agents, all, i) })
		}
	}
	asking.Wait()
	return all
}

func (c *checked) inspect(ctx context.Context, agents *client.Agents) {
	begin := time.Now()
	in, err := agents.Inspect(ctx, c.Host)
	if err != nil {
		var failed *client.HostError
		if errors.As(err, &failed) {
			c.problem("%s failed: %v", failed.Stage, failed.Err)
		} else {
			c.problem("%v", err)
		}
		return
	}
	c.ok, c.in = true, in
	c.Took, c.Offset, c.Version, c.GPUs = time.Since(begin).Seconds(), in.Offset.Seconds(), in.Version, in.GPUs
	c.Used = in.Used
	if in.Offset.Abs() > cluster.ClocksApart {
		c.problem("its clock is %s that of this machine", cluster.ClockWords(in.Offset))
	}
	if in.Version != build.Version() {
		c.problem("its hvdrun is %s, and this one %s", in.Version, build.Version())
	}
	if in.GPUError != "" {
		c.problem("its GPUs are not known: %s", in.GPUError)
	}
}

// reach makes host i of all connect to the other hosts that have an agent, and records the result.
func (c *checked) reach(ctx context.Context, agents *client.Agents, all []*checked, i int) {
	var others []client.Inspection
	for j, o := range all {
		if j != i && o.ok {
			others = append(others, o.in)
		}
	}
	if len(others) == 0 {
		return
	}
	failures, routes, err := agents.Reachable(ctx, c.Host, others)
	if err != nil {
		c.problem("%v", err)
		return
	}
	for j, o := range others {
		c.Routes = append(c.Routes, routesTo(o.Host, routes[j])...)
	}
	for j, why := range failures {
		if why == "" {
			c.Reaches++
			continue
		}
		c.problem("it does not reach %s: %s", others[j].Host, why)
	}
}

func printChecked(p *cli.Program, all []*checked) error {
	w := tabwriter.NewWriter(p.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "HOST\tSLOTS\tLOCAL\tAGENT\tCLOCK\tVERSION\tGPUS\tUSED\tRUN\tREACHES")
	for _, c := range all {
		local := map[bool]string{true: "yes", false: "no"}[c.Local]
		if !c.ok {
			fmt.Fprintf(w, "%s\t%d\t%s\tnone\t-\t-\t-\t-\t-\t-\n", cli.EscapeCell(c.Host), c.Slots, local)
			continue
		}
		name, _, _ := strings.Cut(c.Version, " ")
		gpus := strconv.Itoa(c.GPUs)
		if c.in.GPUError != "" {
			gpus = "?"
		}
		used, runs := show.Used(c.Used)
		fmt.Fprintf(w, "%s\t%d\t%s\t%.2fs\t%+.1fms\t%s\t%s\t%s\t%s\t%d of %d\n",
			cli.EscapeCell(c.Host), c.Slots, local, c.Took, 1000*c.Offset, cli.EscapeCell(name), gpus, used, runs, c.Reaches, len(all)-1)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, c := range all {
		for _, line := range c.routeLines() {
			if _, err := fmt.Fprintf(p.Stdout, "host %s: %s\n", c.Host, cli.Escape(line)); err != nil {
				return err
			}
		}
		for _, text := range c.Problems {
			if _, err := fmt.Fprintf(p.Stdout, "host %s: %s\n", cli.EscapeCell(c.Host), cli.EscapeLines(text)); err != nil {
				return err
			}
		}
	}
	return nil
}
