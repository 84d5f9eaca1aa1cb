package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/jobrun"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/driver"
	"github.com/hvdrun/hvdrun/internal/bench"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/safefile"
	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/plan"
)

// benchGrace is how long ranks and peers may take to end when they are asked to.
const benchGrace = 5 * time.Second

// errNoRows reports that the ranks succeeded but did not print a row for each size.
var errNoRows = errors.New("the ranks have not reported all sizes")

// runBench measures and prints the results. hvdrun's ranks and the peers are measured in turn, and
// each round begins with another of them.
func runBench(ctx context.Context, p *cli.Program, s *settings.Settings, m measurement) (err error) {
	tsv := io.Discard // opened before the measurement
	if m.tsv != "" {
		var file *os.File
		if file, err = safefile.Rewrite(m.tsv, safefile.Private); err != nil {
			return fmt.Errorf("--tsv: %w", err)
		}
		defer func() { err = errors.Join(err, cli.Failed(file.Close())) }()
		tsv = file
	}
	folder, err := os.MkdirTemp("", "hvdrun-bench")
	if err != nil {
		return cli.Failed(err)
	}
	defer func() { err = errors.Join(err, cli.Failed(os.RemoveAll(folder))) }()
	r := benchRun{Program: p, m: m, settings: s, log: settings.Logger(p, s), folder: folder, id: driver.NewRunID()}
	guard, err := proc.StartGuard(plan.EnvRunID, r.id)
	if err != nil {
		return cli.Failed(err)
	}
	defer func() { err = errors.Join(err, cli.Failed(guard.Close())) }()
	if err := r.findHosts(ctx); err != nil {
		return err
	}
	names := r.build(ctx)
	report := &bench.Report{Op: m.spec.Op, Ranks: r.at.Ranks, Hosts: len(r.hosts), Rounds: m.rounds, About: r.about(ctx, names)}
	if ctx.Err() != nil {
		return cli.Failed(context.Cause(ctx))
	}
	for round := range m.rounds {
		for i := range names {
			name := names[(i+round)%len(names)]
			if slices.Contains(r.failed, name) {
				continue
			}
			fmt.Fprintf(p.Stderr, "round %d of %d: %s\n", round+1, m.rounds, name)
			rows, err := r.measure(ctx, name)
			if err != nil {
				if ctx.Err() != nil && len(report.Results) > 0 { // the user stopped the measurement early
					err = errors.Join(err, cli.Failed(tell(p, report, tsv)))
				}
				return err
			}
			for _, row := range rows {
				report.Results = append(report.Results, bench.Result{Row: row, Round: round + 1, Peer: name})
			}
		}
	}
	return cli.Failed(tell(p, report, tsv))
}

// tell writes the results to stdout and to the file of --tsv.
func tell(p *cli.Program, report *bench.Report, tsv io.Writer) error {
	return errors.Join(report.WriteTable(p.Stdout), report.WriteTSV(tsv))
}

// benchRun is one measurement in progress.
type benchRun struct {
	*cli.Program
	m        measurement
	settings *settings.Settings
	log      *logrus.Logger
	folder   string      // for the peers' programs
	id       string      // identifies the peers' processes, so that all of them are killed
	hosts    []plan.Host // the hosts used, with their number of ranks as slots
	at       bench.Place
	failed   []string // peers that failed and are not measured again
}

// findHosts sets the hosts of the ranks. It calls each source once.
func (r *benchRun) findHosts(ctx context.Context) error {
	hosts := r.m.hosts
	if hosts == nil {
		s := *r.settings
		found, closeSource, err := hostsource.Ask(ctx, &s, nil, r.log)
		if err != nil {
			return err
		}
		closeSource()
		hosts = found
	}
	var ranks int
	if r.hosts, ranks = benchHosts(hosts, r.m.np); ranks < max(r.m.np, 1) {
		return cli.Failed(fmt.Errorf("%w: %d are needed, and the hosts have %d", job.ErrNotEnoughSlots, max(r.m.np, 1), ranks))
	}
	if err := r.m.checkParts(ranks); err != nil {
		return err
	}
	r.at = bench.Place{Ranks: ranks}
	if hostsource.AllLocal(ctx, hosts) {
		return r.m.checkMemory(ranks)
	}
	r.at.Hosts, r.at.Shell, r.at.Interfaces = r.hosts, hostsource.Shell(r.settings.SSH).Words(), r.settings.Tuning.NetworkInterfaces
	return nil
}

// benchHosts returns the hosts of the first np slots, each with the number of slots used, and the
// total. An np of 0 means all slots. Draining hosts are not used.
func benchHosts(hosts []plan.Host, np int) (used []plan.Host, ranks int) {
	for _, h := range hosts {
		if np > 0 {
			h.Slots = min(h.Slots, np-ranks)
		}
		if h.Slots > 0 && !h.Draining {
			used, ranks = append(used, h), ranks+h.Slots
		}
	}
	return used, ranks
}

// build builds the peers' programs and returns the names of all libraries that can be measured. It
// reports those that cannot.
func (r *benchRun) build(ctx context.Context) []string {
	names := []string{bench.Ours}
	for _, peer := range r.m.peers {
		err := r.compile(ctx, peer)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			fmt.Fprintf(r.Stderr, "%s is not measured: %v\n", peer.Name, err)
			continue
		}
		names = append(names, peer.Name)
	}
	return names
}

// about returns one line about each of the named peers.
func (r *benchRun) about(ctx context.Context, names []string) (lines []string) {
	versions := make(map[string]string) // by command: several names may share one library
	for _, peer := range r.m.peers {
		if !slices.Contains(names, peer.Name) {
			continue
		}
		command := peer.Version()
		key := strings.Join(command, " ")
		version, asked := versions[key]
		if !asked {
			if out, _, err := r.run(ctx, command); err == nil {
				version, _, _ = strings.Cut(out.String(), "\n")
			}
			versions[key] = version
		}
		lines = append(lines, peer.About(version))
	}
	return lines
}

func (r *benchRun) compile(ctx context.Context, peer bench.Peer) error {
	command, err := peer.Prepare(r.folder, r.m.spec.Op)
	if err != nil {
		return err
	}
	for _, h := range r.at.Hosts {
		probe := peer.Probe(r.at, h.Name)
		if probe == nil {
			continue
		}
		var exit *launch.ExitError
		_, said, err := r.run(ctx, probe)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.As(err, &exit):
			return peer.Unusable(h.Name, exit.Code, said)
		case err != nil:
			return err
		}
	}
	if _, said, err := r.run(ctx, command); err != nil {
		return peer.Uncompiled(said)
	}
	return nil
}

// run runs a command and returns its output. When it returns, all processes that the command
// started have ended.
func (r *benchRun) run(ctx context.Context, command []string) (stdout *bytes.Buffer, stderr string, err error) {
	hurry := make(chan struct{})
	defer jobrun.WatchStop(ctx, r.Program, r.log, sync.OnceFunc(func() { close(hurry) }), fmt.Sprintf("%v at most", benchGrace))()
	incarnation := driver.NewRunID()
	var out, errs bytes.Buffer
	err = launch.Local{}.Run(ctx, &launch.Spec{
		Incarnation: incarnation,
		Slot:        plan.SlotID{Host: "localhost"},
		Command:     command,
		Env:         append(slices.Clone(r.Env), plan.EnvRunID+"="+r.id, plan.EnvIncarnation+"="+incarnation),
		Stdout:      &out, Stderr: &errs,
		Grace: benchGrace, Hurry: hurry,
	}, func(int) {})
	return &out, errs.String(), err
}

// measure measures one round of hvdrun's ranks or of a peer.
func (r *benchRun) measure(ctx context.Context, name string) ([]bench.Row, error) {
	if name == bench.Ours {
		rows, err := r.ours(ctx)
		return rows, cli.Failed(err)
	}
	i := slices.IndexFunc(r.m.peers, func(p bench.Peer) bool { return p.Name == name })
	rows, err := r.peer(ctx, r.m.peers[i])
	if ctx.Err() != nil {
		return nil, cli.Failed(context.Cause(ctx))
	}
	if err != nil {
		r.failed = append(r.failed, name)
		fmt.Fprintf(r.Stderr, "%s is not measured any more: %v\n", name, err)
	}
	return rows, nil
}

// ours runs a job whose workers are ranks of the measurement.
func (r *benchRun) ours(ctx context.Context) ([]bench.Row, error) {
	spec, err := json.Marshal(r.m.spec)
	if err != nil {
		return nil, err
	}
	var out unprefixed
	err = r.job(ctx, []string{"sh", "-c", cli.OwnScript, "hvdrun", benchRank, string(spec)}, &out, r.Stderr)
	var rows []bench.Row
	for line := range bytes.Lines(out.text.Bytes()) {
		var row bench.Row
		if json.Unmarshal(line, &row) == nil && row.Op != "" {
			rows = append(rows, row)
		} else {
			_, _ = r.Stderr.Write(line) // a program of a host's shell has printed it
		}
	}
	if err != nil {
		return nil, err
	}
	for _, size := range r.m.spec.Sizes {
		if !slices.ContainsFunc(rows, func(row bench.Row) bool { return row.Op == r.m.spec.Op && row.Bytes == size }) {
			return nil, errNoRows
		}
	}
	return rows, nil
}

// job runs a job on the hosts, as hvdrun runs any job, and writes its output line by line.
func (r *benchRun) job(ctx context.Context, command []string, stdout, stderr io.Writer) error {
	s, p := *r.settings, *r.Program
	p.Stdout, p.Stderr = stdout, stderr
	s.RunID, s.Dir, s.Env = driver.NewRunID(), "/", nil // this process's folder may not exist on the hosts
	s.Timeouts.Drain = benchGrace
	if s.LogLevel == logrus.InfoLevel && !s.Given("log-level") {
		s.LogLevel = logrus.WarnLevel // what an ordinary job reports would appear between the rounds
	}
	if r.m.algorithm != "" {
		s.Env = []string{algorithmVariable + "=" + r.m.algorithm}
	}
	authority, err := identity.NewAuthority(s.RunID)
	if err != nil {
		return err
	}
	if s.Given("gossip-join") { // the settings are for the agents; the hosts are known
		source, closeSource, err := hostsource.OpenGossip(&s, r.log)
		if err != nil {
			return err
		}
		defer closeSource()
		if _, err := source.Discover(ctx); err != nil {
			return err
		}
	}
	return jobrun.Drive(ctx, &p, &s, jobrun.Spec{Command: command, Fixed: r.hosts, Size: job.Size{NP: r.at.Ranks}, Authority: authority})
}

// peer runs a peer's program to its end.
func (r *benchRun) peer(ctx context.Context, peer bench.Peer) ([]bench.Row, error) {
	limit := r.m.spec.Patience()
	late := fmt.Errorf("it has not ended in %v", limit)
	if len(r.at.Hosts) > 0 && len(r.at.Interfaces) == 0 {
		late = fmt.Errorf("%w; if its hosts have several networks, name one that they share with --network-interfaces", late)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, late)
	defer cancel()
	out, said, err := r.output(ctx, peer)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if exit, is := errors.AsType[*launch.ExitError](err); is && said != "" {
		exit.Said = firstLine(said) // mpirun begins with the reason
	}
	if err != nil {
		return nil, fmt.Errorf("it %w", err)
	}
	return bench.ReadPeer(out, r.m.spec)
}

// output runs a peer's program and returns its output.
func (r *benchRun) output(ctx context.Context, peer bench.Peer) (stdout *bytes.Buffer, stderr string, err error) {
	command, err := peer.Command(r.folder, r.at, r.m.spec)
	if err != nil {
		return nil, "", err
	}
	if !peer.InJob(r.at) {
		return r.run(ctx, command)
	}
	var out, errs unprefixed
	if err := r.job(ctx, command, &out, &errs); err != nil {
		return nil, errs.text.String(), fmt.Errorf("has failed as a job: %w", err)
	}
	return &out.text, "", nil
}

// unprefixed is a writer of a job's output, line by line, that removes the prefixes with the ranks.
type unprefixed struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write takes one line with its prefix, if it has one.
func (u *unprefixed) Write(line []byte) (int, error) {
	text := line
	for _, prefix := range []string{"<stdout>:", "<stderr>:"} {
		if _, after, found := bytes.Cut(line, []byte(prefix)); found {
			text = after
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.text.Write(text)
	return len(line), nil
}

// firstLine returns the first line that contains a letter: mpirun draws frames around messages.
func firstLine(text string) string {
	for line := range strings.Lines(text) {
		if strings.ContainsAny(line, "abcdefghijklmnopqrstuvwxyz") {
			return strings.TrimSpace(line)
		}
	}
	return "it has said nothing"
}
