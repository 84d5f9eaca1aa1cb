package discover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// lastLookup is how long the lookup of a list's names may continue after the watch is stopped.
const lastLookup = 2 * time.Second

// discoverWatch prints the changes and failures that a job would learn about its hosts, until ctx
// ends.
func discoverWatch(ctx context.Context, p *cli.Program, s *settings.Settings, asJSON bool) error {
	fixed, err := hostsource.Fixed(s)
	if err != nil {
		return err
	}
	source, closeSource, err := hostsource.Open(s, fixed, settings.Logger(p, s))
	if err != nil {
		return err
	}
	defer closeSource()
	silent := logrus.New() // the output has everything
	silent.SetOutput(io.Discard)
	news := make(chan func(), 1) // lists and failures come from several goroutines and are printed one after another
	watcher := &watchPrinter{out: p.Stdout, asJSON: asJSON, now: time.Now, understand: func(hosts []plan.Host) (understood, error) {
		// A list that was found before ctx ended is still printed.
		lookup, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(ctx, func() { time.AfterFunc(lastLookup, cancel) })()
		return understand(lookup, s, hosts)
	}}
	poll := discovery.Poll{Source: source, Interval: s.Timeouts.DiscoveryInterval, RemovalAfter: s.RemovalAfter, Log: silent,
		Failed: func(err error, age time.Duration) { news <- func() { watcher.failed(err, age) } }}
	ended := make(chan error, 1)
	go func() {
		ended <- poll.Run(ctx, func(hosts []plan.Host) { news <- func() { watcher.found(hosts) } })
		close(news)
	}()
	for print := range news {
		print()
	}
	err = <-ended
	if first, ok := errors.AsType[*discovery.FirstError](err); ok {
		err = fmt.Errorf("%w: %w", job.ErrDiscovery, first.Err)
	}
	return cli.Failed(err)
}

// watchPrinter prints the results of discovery, in words or as JSON, one line each.
type watchPrinter struct {
	out    io.Writer
	asJSON bool
	now    func() time.Time

	understand func([]plan.Host) (understood, error)
	last       []plan.Host
}

// change describes a change of one host, or of all hosts.
type change struct{ what, how string }

// changes returns the differences between two lists, in the order of the lists; nil if the lists
// are equal.
func changes(before, after []plan.Host) (all []change) {
	for _, h := range after {
		i := slices.IndexFunc(before, func(b plan.Host) bool { return b.Name == h.Name })
		if i < 0 {
			all = append(all, change{"added", h.String()})
			if h.Draining {
				all = append(all, change{"draining", h.Name})
			}
			continue
		}
		if was := before[i]; h.Slots != was.Slots {
			all = append(all, change{"slots", fmt.Sprintf("%v, before %d", h, was.Slots)})
		}
		switch {
		case h.Draining && !before[i].Draining:
			all = append(all, change{"draining", h.Name})
		case before[i].Draining && !h.Draining:
			all = append(all, change{"staying", h.Name + ", not draining any more"})
		}
	}
	for _, h := range before {
		if !slices.ContainsFunc(after, func(a plan.Host) bool { return a.Name == h.Name }) {
			all = append(all, change{"removed", h.Name})
		}
	}
	if was, is := common(before, after), common(after, before); !slices.Equal(was, is) {
		all = append(all, change{"order", strings.Join(is, " ") + ", before " + strings.Join(was, " ")})
	}
	return all
}

// common returns the names of the hosts that are in both lists, in the order of hosts.
func common(hosts, other []plan.Host) (names []string) {
	for _, h := range hosts {
		if slices.ContainsFunc(other, func(o plan.Host) bool { return o.Name == h.Name }) {
			names = append(names, h.Name)
		}
	}
	return names
}

func (w *watchPrinter) found(hosts []plan.Host) {
	all := changes(w.last, hosts)
	w.last = hosts
	if w.asJSON {
		list, err := w.understand(hosts)
		if err != nil {
			return // the watch is being stopped
		}
		kinds := map[string][]string{}
		for _, c := range all {
			kinds[c.what] = append(kinds[c.what], c.how)
		}
		w.object(struct {
			Time  string `json:"time"`
			Event string `json:"event"`
			understood
			Changes map[string][]string `json:"changes"`
		}{w.now().Format(cli.TimeJSON), string(job.HostsFound), list, kinds})
		return
	}
	for _, c := range all {
		w.line(c.what, c.how)
	}
	w.line("hosts", fmt.Sprintf("%d, slots: %d", len(hosts), hostsource.SlotsOf(hosts)))
}

func (w *watchPrinter) failed(err error, age time.Duration) {
	if w.asJSON {
		w.object(struct {
			Time  string  `json:"time"`
			Event string  `json:"event"`
			Error string  `json:"error"`
			Age   float64 `json:"age"`
		}{w.now().Format(cli.TimeJSON), string(job.DiscoveryFailed), err.Error(), age.Seconds()})
		return
	}
	w.line("failed", fmt.Sprintf("%v (the last list, %v old, stays)", err, age.Round(time.Millisecond)))
}

func (w *watchPrinter) line(what, how string) {
	fmt.Fprintf(w.out, "%s  %-9s %s\n", w.now().Format(cli.TimeText), what, cli.EscapeLines(how))
}

func (w *watchPrinter) object(o any) {
	_ = json.NewEncoder(w.out).Encode(o) // a failure to write to stdout ends the program elsewhere
}
