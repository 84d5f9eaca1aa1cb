package discover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/hostsource"
	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/settings"
	"github.com/hvdrun/hvdrun/discovery"
	"github.com/hvdrun/hvdrun/discovery/conformance"
	"github.com/hvdrun/hvdrun/discovery/plugin"
	"github.com/hvdrun/hvdrun/plan"
)

// discoverVerify tests each source in the settings.
func discoverVerify(ctx context.Context, p *cli.Program, s *settings.Settings) error {
	fixed, err := hostsource.Fixed(s)
	if err != nil {
		return err
	}
	open := func(name string, log logrus.FieldLogger) (discovery.Discoverer, func(), error) {
		return hostsource.OpenKind(s, name, log)
	}
	names := s.Dynamic()
	if fixed != nil {
		names = []string{"hosts"}
		open = func(string, logrus.FieldLogger) (discovery.Discoverer, func(), error) {
			return discovery.Fixed(fixed), func() {}, nil
		}
	}
	broken := 0
	for _, name := range names {
		if len(names) > 1 {
			fmt.Fprintf(p.Stdout, "%s:\n", s.Origin(name))
		}
		n, err := verifySource(p, ctx, s, name, open)
		if err != nil {
			return err
		}
		broken += n
	}
	if broken > 0 {
		return cli.Failed(fmt.Errorf("%d checks failed, which the lines above name: mend the source", broken))
	}
	return nil
}

// verifySource tests the source of the setting name, which open makes. It returns the number of
// broken promises.
func verifySource(p *cli.Program,
	ctx context.Context, s *settings.Settings, name string, open func(string, logrus.FieldLogger) (discovery.Discoverer, func(), error),
) (broken int, err error) {
	stray := &strayLines{}
	s.Stray, s.PluginEndTimeout = stray.add, endTimeout
	source, closeSource, err := open(name, settings.Logger(p, s))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", s.Origin(name), err)
	}
	closeSource = sync.OnceFunc(closeSource)
	defer closeSource() // if the check that closes it is skipped
	v := &verifier{ctx: ctx, out: p.Stdout, source: source}
	v.first()
	for _, promised := range conformance.All() {
		v.check(promised.Name, func() error { return v.steady(promised.Check) })
	}
	if plug, ok := source.(*plugin.Plugin); ok {
		v.check("is there again, with the same list, after kill -9", func() error { return killed(plug, v.want) })
	}
	v.check("ends when its context ends, and leaves nothing running", func() error { return closed(source, closeSource) })
	if _, ok := source.(*plugin.Plugin); ok {
		v.check("prints nothing to stdout but the handshake", stray.err)
	}
	if ctx.Err() != nil {
		return 0, cli.Failed(context.Cause(ctx))
	}
	return v.broken, nil
}

// verifier tests one source and prints what it finds.
type verifier struct {
	ctx    context.Context
	out    io.Writer
	source discovery.Discoverer
	want   []plan.Host
	mute   bool // the first discovery failed: all other checks would fail in the same way
	broken int
}

// first finds the list of hosts that later checks expect.
func (v *verifier) first() {
	began := time.Now()
	var err error
	v.check("is asked for the first time", func() error {
		if v.want, err = v.source.Discover(v.ctx); err != nil {
			return err
		}
		return plan.CheckHosts(v.want)
	})
	if v.mute = v.broken > 0; !v.mute && v.ctx.Err() == nil {
		fmt.Fprintf(v.out, "        hosts: %d, slots: %d, in %v\n", len(v.want), hostsource.SlotsOf(v.want), time.Since(began).Round(time.Millisecond))
	}
}

// check runs f and prints whether the source keeps the named promise. When ctx ends, check returns
// at once and does not wait for f.
func (v *verifier) check(name string, f func() error) {
	if v.mute || v.ctx.Err() != nil {
		return
	}
	verdict := make(chan error, 1)
	go func() { verdict <- f() }()
	select {
	case err := <-verdict:
		if v.ctx.Err() != nil {
			return // the end of ctx may have caused the failure
		}
		if err != nil {
			v.broken++
			fmt.Fprintf(v.out, "FAILED  %s: %s\n", name, cli.EscapeLines(err.Error()))
			return
		}
		fmt.Fprintf(v.out, "OK      %s\n", name)
	case <-v.ctx.Done():
	}
}

// steady runs check, and repeats it if check failed because the hosts changed meanwhile. The hosts
// count as changed if two further discoveries return the same new list.
func (v *verifier) steady(check func(discovery.Discoverer, []plan.Host) error) error {
	for {
		err := check(v.source, v.want)
		if err == nil {
			return nil
		}
		now, e1 := v.source.Discover(v.ctx)
		again, e2 := v.source.Discover(v.ctx)
		if e1 != nil || e2 != nil || slices.Equal(now, v.want) || !slices.Equal(now, again) || !plainlyOther(now, v.want) {
			return err
		}
		v.want = now
	}
}

// plainlyOther reports whether now contains a host that before lacks. A list in another order, or
// with hosts missing, may be the fault that the check looks for.
func plainlyOther(now, before []plan.Host) bool {
	isPart := func(a, b []plan.Host) bool {
		return !slices.ContainsFunc(a, func(h plan.Host) bool { return !slices.Contains(b, h) })
	}
	return !isPart(now, before)
}

// killed kills the plugin's process and checks that the plugin then returns the same hosts.
func killed(p *plugin.Plugin, want []plan.Host) error {
	pid := p.PID()
	if pid == 0 {
		return errors.New("it is not running")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return fmt.Errorf("killing it: %w", err)
	}
	var err error
	for range 5 { // the first call may still reach the killed process, and the restart has a backoff
		var got []plan.Host
		if got, err = p.Discover(context.Background()); err == nil {
			if !slices.Equal(got, want) {
				return fmt.Errorf("found %v, want %v", got, want)
			}
			return nil
		}
	}
	return err
}

// endTimeout is long enough for a plugin that has to do with a busy machine.
const endTimeout = 10 * time.Second

// closed closes the source and returns an error if it had to be killed, or if its processes still
// exist.
func closed(source discovery.Discoverer, closeSource func()) error {
	pid := 0
	var err error
	if p, ok := source.(*plugin.Plugin); ok {
		pid = p.PID()
		err = p.Close()
	}
	closeSource()
	if err == nil && pid != 0 && !errors.Is(syscall.Kill(-pid, 0), syscall.ESRCH) {
		err = fmt.Errorf("its process group %d is still there", pid)
	}
	return err
}

// strayLines are lines that a plugin printed to its stdout although only the handshake is allowed
// there.
type strayLines struct {
	mu    sync.Mutex
	first string
	lines int
}

func (s *strayLines) add(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lines++; s.lines == 1 {
		s.first = line
	}
}

func (s *strayLines) err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lines == 0 {
		return nil
	}
	return fmt.Errorf("%d lines, the first of them %q; what it has to say belongs on stderr", s.lines, s.first)
}
