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
	"syscall"
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

// errNoRows reports that the ranks ended well but without a row for each size.
var errNoRows = errors.New("the ranks have not reported all sizes")

// runBench measures and prints. Ranks and peers take turns, and who begins changes from round to
// round.
func runBench(ctx context.Context, p *cli.Program, s *settings.Settings, m measurement) (err error) {
	files, err := m.openFiles()
	if err != nil {
		return err
	}
	defer files.close(&err)
	folder, err := os.MkdirTemp("", "hvdrun-bench")
	if err != nil {
		return cli.Failed(err)
	}
	defer func() { err = joinRunError(err, os.RemoveAll(folder)) }()
	r := benchRun{Program: p, m: m, settings: s, log: settings.Logger(p, s), folder: folder, id: driver.NewRunID(),
		launcher: &benchLauncher{groups: map[int]bool{}}}
	guard, err := proc.StartGuard(plan.EnvRunID, r.id)
	if err != nil {
		return cli.Failed(err)
	}
	defer func() { err = joinRunError(err, guard.Close()) }()
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
				if ctx.Err() != nil && len(report.Results) > 0 { // a person has seen enough
					err = joinRunError(err, tell(p, report, files))
				}
				return err
			}
			for _, row := range rows {
				report.Results = append(report.Results, bench.Result{Row: row, Round: round + 1, Peer: name})
			}
		}
	}
	return joinRunError(nil, tell(p, report, files))
}

// tell writes the results wherever they are wanted.
func tell(p *cli.Program, report *bench.Report, files benchFiles) error {
	return errors.Join(report.WriteTable(p.Stdout), files.write(report))
}

func joinRunError(err, more error) error {
	if more == nil {
		return err
	}
	return cli.Failed(errors.Join(err, more))
}

// benchRun is what one measurement needs.
type benchRun struct {
	*cli.Program
	m        measurement
	settings *settings.Settings
	log      *logrus.Logger
	folder   string // for the peers' programs
	id       string // of the peers' processes, by which nothing of them is left behind
	launcher *benchLauncher
	hosts    []plan.Host // those that have ranks, with their ranks
	at       bench.Place
	failed   []string // peers that are not asked again
}

// findHosts finds where the ranks run: sources are asked once.
func (r *benchRun) findHosts(ctx context.Context) error {
	hosts := r.m.hosts
	if hosts == nil {
		s := *r.settings
		source, closeSource, err := hostsource.Open(&s, nil, r.log)
		if err != nil {
			return err
		}
		hosts, err = source.Discover(ctx)
		closeSource()
		switch {
		case ctx.Err() != nil:
			return cli.Failed(context.Cause(ctx))
		case err != nil:
			return cli.Failed(fmt.Errorf("%w: %w", job.ErrDiscovery, err))
		}
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

// benchHosts returns the hosts of the first np slots, with as many slots as are used, and how many
// these are. 0 stands for all slots. Hosts that are about to leave are not used.
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

// benchLauncher starts the peers' processes on this machine, and knows their groups, for a person
// who does not want to wait for their end.
type benchLauncher struct {
	mu     sync.Mutex
	groups map[int]bool
}

// Run is that of launch.Local.
func (l *benchLauncher) Run(ctx context.Context, s *launch.Spec, started func(pid int)) error {
	group := 0
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.groups, group)
	}()
	return launch.Local{}.Run(ctx, s, func(pid int) {
		l.mu.Lock()
		group = pid
		l.groups[pid] = true
		l.mu.Unlock()
		started(pid)
	})
}

// kill ends all processes at once; launch.Local sees to what they leave behind.
func (l *benchLauncher) kill() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for group := range l.groups {
		_ = syscall.Kill(-group, syscall.SIGKILL) // fails where it has just ended
	}
}

// build makes the peers' programs and returns the names of all that can be measured. Those that
// cannot are told.
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

// about returns a line about each of the peers with these names.
func (r *benchRun) about(ctx context.Context, names []string) (lines []string) {
	versions := make(map[string]string) // by their commands: a library may have several names
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

// run runs a command of which nothing is left when it returns.
func (r *benchRun) run(ctx context.Context, command []string) (stdout *bytes.Buffer, stderr string, err error) {
	defer jobrun.WatchStop(ctx, r.Program, r.log, r.launcher.kill, benchGrace)()
	incarnation := driver.NewRunID()
	var out, errs bytes.Buffer
	err = r.launcher.Run(ctx, &launch.Spec{
		Incarnation: incarnation,
		Slot:        plan.SlotID{Host: "localhost"},
		Command:     command,
		Env:         append(slices.Clone(r.Env), plan.EnvRunID+"="+r.id, plan.EnvIncarnation+"="+incarnation),
		Stdout:      &out, Stderr: &errs,
		Grace: benchGrace,
	}, func(int) {})
	return &out, errs.String(), err
}

// measure takes one round of our ranks, or of a peer.
func (r *benchRun) measure(ctx context.Context, name string) ([]bench.Row, error) {
	if name == bench.Ours {
		rows, err := r.ours(ctx)
		if err != nil {
			return nil, cli.Failed(err)
		}
		return rows, nil
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
	rows := &rowReader{stray: r.Stderr}
	if err := r.job(ctx, []string{"sh", "-c", cli.OwnScript, "hvdrun", benchRank, string(spec)}, rows, r.Stderr); err != nil {
		return nil, err
	}
	return rows.complete(r.m.spec)
}

// job runs a job on the hosts, as hvdrun does with any, and writes its output, a line a time.
func (r *benchRun) job(ctx context.Context, command []string, stdout, stderr io.Writer) error {
	s, p := *r.settings, *r.Program
	p.Stdout, p.Stderr = stdout, stderr
	s.RunID, s.Dir, s.Env = driver.NewRunID(), "/", nil // the folder of this process may not be on the hosts
	s.Timeouts.Drain = benchGrace
	if r.m.algorithm != "" {
		s.Env = []string{algorithmVariable + "=" + r.m.algorithm}
	}
	authority, err := identity.NewAuthority(s.RunID)
	if err != nil {
		return err
	}
	if s.Given("gossip-join") { // for the agents: which hosts there are is known
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

// rowReader takes the output of our ranks, a line a time.
type rowReader struct {
	stray io.Writer // for lines that are no rows
	mu    sync.Mutex
	rows  []bench.Row
}

// Write takes one line with its prefix.
func (r *rowReader) Write(line []byte) (int, error) {
	_, text, _ := bytes.Cut(line, []byte("<stdout>:"))
	var row bench.Row
	if err := json.Unmarshal(text, &row); err != nil || row.Op == "" {
		return r.stray.Write(line)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows = append(r.rows, row)
	return len(line), nil
}

// complete returns the rows, if there is one for each size.
func (r *rowReader) complete(spec bench.Spec) ([]bench.Row, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, size := range spec.Sizes {
		if !slices.ContainsFunc(r.rows, func(row bench.Row) bool { return row.Op == spec.Op && row.Bytes == size }) {
			return nil, errNoRows
		}
	}
	return r.rows, nil
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
	switch {
	case err != nil && said == "":
		return nil, fmt.Errorf("it %w", err)
	case err != nil:
		return nil, fmt.Errorf("it %w: %s", err, firstLine(said))
	}
	return bench.ReadPeer(out, r.m.spec)
}

// output returns what a peer's program writes.
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

// unprefixed takes the output of a job, a line a time, without the ranks before the lines.
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

// firstLine returns the first one that holds a letter: mpirun draws frames.
func firstLine(text string) string {
	for line := range strings.Lines(text) {
		if strings.ContainsAny(line, "abcdefghijklmnopqrstuvwxyz") {
			return strings.TrimSpace(line)
		}
	}
	return "it has said nothing"
}

// benchFiles are where results go besides stdout. They are opened before anything is measured.
type benchFiles struct{ tsv, plot *os.File }

func (m *measurement) openFiles() (f benchFiles, err error) {
	for _, o := range []struct {
		flag, path string
		file       **os.File
	}{{"--tsv", m.tsv, &f.tsv}, {"--plot", m.plot, &f.plot}} {
		if o.path == "" {
			continue
		}
		if *o.file, err = safefile.Rewrite(o.path, safefile.Private); err != nil {
			f.close(nil)
			return f, fmt.Errorf("%s: %w", o.flag, err)
		}
	}
	return f, nil
}

func (f benchFiles) write(r *bench.Report) error {
	if f.tsv != nil {
		if err := r.WriteTSV(f.tsv); err != nil {
			return err
		}
	}
	if f.plot != nil {
		return r.WritePlot(f.plot)
	}
	return nil
}

// close closes what is open, and sets err to a failure, unless err is set already.
func (f benchFiles) close(err *error) {
	for _, file := range []*os.File{f.tsv, f.plot} {
		if file == nil {
			continue
		}
		if cerr := file.Close(); err != nil {
			*err = joinRunError(*err, cerr)
		}
	}
}
