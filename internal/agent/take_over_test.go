package agent

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/internal/agent/client"
	"github.com/hvdrun/hvdrun/internal/identity"
	"github.com/hvdrun/hvdrun/launch"
	"github.com/hvdrun/hvdrun/test/sandbox"
)

// sever cuts the cable permanently: for the agent, the peer is dead.
func (c *cable) sever() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cut()
}

// unattached waits until the agent has noticed that the driver is gone.
func (h *host) unattached(t *testing.T) {
	t.Helper()
	for limit := sandbox.Limit(); ; <-time.After(time.Millisecond) {
		h.mu.Lock()
		gone := true
		for _, s := range h.sessions {
			gone = gone && s.link == nil
		}
		h.mu.Unlock()
		if gone {
			return
		}
		if time.Now().After(limit) {
			t.Fatal("the agent does not notice that the stream is broken")
		}
	}
}

// mortal returns a driver, a function that disconnects it from the agent as if it had died, and a
// function that returns an heir that takes over from it.
func mortal(t *testing.T, h *host, run string) (driver *client.Agents, die func(), heir func(adopted ...string) *client.Agents) {
	c := newCable(t, h.addr)
	driver = keepingAgents(t, driverOf(t, run), c.addr, client.Config{Lease: 5 * time.Second, Orphan: time.Hour, Keep: true})
	return driver, func() { c.sever(); h.unattached(t) }, func(adopted ...string) *client.Agents {
		l := keepingAgents(t, driverOf(t, run), h.addr, client.Config{Lease: longLease, Keep: true})
		l.Adopt(adopted, 1, time.Now())
		return l
	}
}

// TestTakeOver: a driver that takes over from a dead one has the same workers: it gets those that
// are alive, and the ends of workers that have ended since, or whose ends the dead driver had not
// recorded.
func TestTakeOver(t *testing.T) {
	h := newHost(t, 8)
	driver, die, heir := mortal(t, h, "over")
	living, pipe := script(t, 0, `exec 9>"$1"; trap 'echo obeyed; exit 7' TERM; echo ready; while :; do sleep 0.01; done`)
	living.Grace = time.Hour
	start(t, driver, living).awaitOutput("ready")
	later, held := script(t, 1, `exec 9>"$1"; echo ready; while ! [ -e "$1.end" ]; do sleep 0.01; done; echo after; exit 5`)
	start(t, driver, later).awaitOutput("ready")
	unsettled, _ := script(t, 2, `echo early; exit 3`)
	settled, _ := script(t, 3, `exit 4`)
	for _, s := range []*launch.Spec{unsettled, settled} {
		var exit *launch.ExitError
		if err := driver.Run(t.Context(), s, nil); !errors.As(err, &exit) {
			t.Fatalf("Run returned %v", err)
		}
	}
	driver.Settle(settled.Incarnation)
	die()
	if err := os.WriteFile(later.Command[len(later.Command)-1]+".end", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	gone(t, held)

	l := heir(living.Incarnation, later.Incarnation, unsettled.Incarnation, "stranger")
	resumed := func(s launch.Spec) *running {
		s.Command, s.Env, s.Resumed = nil, nil, true
		return start(t, l, &s)
	}
	var exit *launch.ExitError
	for _, c := range []struct {
		spec *launch.Spec
		code int
		says string
	}{{later, 5, "after\n"}, {unsettled, 3, ""}} {
		r := resumed(*c.spec)
		if err := r.wait(); !errors.As(err, &exit) || exit.Code != c.code || !strings.HasSuffix(r.stdout.String(), c.says) {
			t.Errorf("%s ended with %v, and said %q", c.spec.Incarnation, err, r.stdout)
		}
	}
	stranger := *living
	stranger.Incarnation = "stranger"
	wantLost(t, resumed(stranger).wait(), "does not know the worker")

	r := resumed(*living)
	r.cancel()
	if err := r.wait(); !errors.As(err, &exit) || exit.Code != 7 || !strings.HasSuffix(r.stdout.String(), "obeyed\n") {
		t.Errorf("the one that lives ended with %v, and said %q", err, r.stdout)
	}
	gone(t, pipe)
	for _, s := range []*launch.Spec{living, later, unsettled} {
		l.Settle(s.Incarnation)
	}
	next, _ := script(t, 4, "exit 9")
	if err := l.Run(t.Context(), next, nil); !errors.As(err, &exit) || exit.Code != 9 {
		t.Errorf("a new worker: %v", err)
	}
}

// TestTakeOverOfUnknownWorkers: a worker that is unknown to the driver that takes over counts as
// lost: the agent kills it, and the slot is free. If the agent knows of records that the driver's
// journal lacks, the worker stays.
func TestTakeOverOfUnknownWorkers(t *testing.T) {
	h := newHost(t, 2)
	driver, die, heir := mortal(t, h, "unknown")
	s, pipe := script(t, 0, `exec 9>"$1"; echo ready; while :; do sleep 0.01; done`)
	start(t, driver, s).awaitOutput("ready")
	at := time.Now().Add(time.Hour)
	driver.Noted(at)
	h.noted(t, at)
	die()

	behind := heir()
	other, _ := script(t, 1, `exit 9`)
	var exit *launch.ExitError
	if err := behind.Run(t.Context(), other, nil); !errors.As(err, &exit) || exit.Code != 9 { // the driver is attached then
		t.Errorf("Run returned %v", err)
	}
	next, _ := script(t, 0, `exit 8`)
	if err := behind.Run(t.Context(), next, nil); err == nil || !strings.Contains(err.Error(), "is taken by") {
		t.Errorf("beside a worker that stays, another in its slot: %v", err)
	}
	l := keepingAgents(t, driverOf(t, "unknown"), h.addr, client.Config{Lease: longLease, Keep: true})
	l.Adopt(nil, 2, at)
	again, _ := script(t, 1, `exit 7`)
	if err := l.Run(t.Context(), again, nil); !errors.As(err, &exit) || exit.Code != 7 {
		t.Errorf("Run returned %v", err)
	}
	gone(t, pipe)
}

// TestReplacedDriverReturns: a driver that was unreachable returns after another has taken over.
// The agent refuses it, whether it resumes the session or begins another, and the workers stay.
func TestReplacedDriverReturns(t *testing.T) {
	h := newHost(t, 2)
	c := newCable(t, h.addr)
	driver := keepingAgents(t, driverOf(t, "replaced"), c.addr, client.Config{Lease: longLease, Orphan: time.Hour, Keep: true})
	s, pipe := script(t, 0, `exec 9>"$1"; trap 'echo obeyed; exit 7' TERM; echo ready; while :; do sleep 0.01; done`)
	s.Grace = time.Hour
	before := start(t, driver, s)
	before.awaitOutput("ready")
	c.setSilent(true)

	l := keepingAgents(t, driverOf(t, "replaced"), h.addr, client.Config{Lease: longLease, Keep: true})
	l.Adopt([]string{s.Incarnation}, 1, time.Now())
	mine := *s
	mine.Command, mine.Env, mine.Resumed = nil, nil, true
	r := start(t, l, &mine)
	other, _ := script(t, 1, `exit 9`)
	var exit *launch.ExitError
	if err := l.Run(t.Context(), other, nil); !errors.As(err, &exit) || exit.Code != 9 {
		t.Fatalf("the new driver's worker: %v", err)
	}

	c.setSilent(false)
	wantLost(t, before.wait(), "another driver has taken over the run")
	late, _ := script(t, 1, `exit 10`)
	err := driver.Run(t.Context(), late, nil)
	if err == nil || errors.As(err, &exit) || !strings.Contains(err.Error(), "another driver has taken over the run") {
		t.Errorf("a worker of the driver before: %v", err)
	}

	r.cancel()
	if err := r.wait(); !errors.As(err, &exit) || exit.Code != 7 || !strings.HasSuffix(r.stdout.String(), "obeyed\n") {
		t.Errorf("the worker ended with %v, and said %q", err, r.stdout)
	}
	gone(t, pipe)
}

// TestEndRunAfterTakeOver: a command that ends a run without a driver has no number among its
// drivers, and is accepted nevertheless, even after a driver had taken over.
func TestEndRunAfterTakeOver(t *testing.T) {
	var authority *identity.Authority
	var c *cable
	l, in := jobAgents(t, func(cfg *client.Config, in *inside) {
		authority, cfg.Lease, cfg.Orphan = cfg.Authority, longLease, time.Hour
		in.behind = func(addr string) string {
			c = newCable(t, addr)
			return c.addr
		}
	})
	l.Adopt(nil, 1, time.Now())
	s, pipe := script(t, 0, sleeper)
	start(t, l, s).awaitOutput("ready")
	c.sever()
	n, err := client.EndRun(t.Context(), authority, client.KnownAgent{Host: "a", Addr: c.to}, true)
	if n != 1 || err != nil {
		t.Errorf("%d workers were ended, %v; want 1", n, err)
	}
	gone(t, pipe)
	if err := in.over(); err != nil {
		t.Error(err)
	}
}

// TestOutputWithoutDriver: without a driver, a worker that prints more than can be in flight is not
// blocked; the next driver gets all of its output.
func TestOutputWithoutDriver(t *testing.T) {
	h := newHost(t, 1)
	driver, die, heir := mortal(t, h, "silent")
	const lines = 400_000 // some 3 MB
	s, held := script(t, 0, fmt.Sprintf(`exec 9>"$1"; echo ready; while ! [ -e "$1.go" ]; do sleep 0.01; done; seq %d`, lines))
	start(t, driver, s).awaitOutput("ready")
	die()
	if err := os.WriteFile(s.Command[len(s.Command)-1]+".go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	gone(t, held) // although nobody reads its output
	l := heir(s.Incarnation)
	s.Resumed = true
	r := start(t, l, s)
	if err := r.wait(); err != nil {
		t.Fatal(err)
	}
	n := 0
	for sc := bufio.NewScanner(strings.NewReader(strings.TrimPrefix(r.stdout.String(), "ready\n"))); sc.Scan(); {
		if n++; sc.Text() != fmt.Sprint(n) {
			t.Fatalf("line %d is %q", n, sc.Text())
		}
	}
	if n != lines {
		t.Errorf("%d lines of %d", n, lines)
	}
}

// TestTooMuchOutputWithoutDriver: of output beyond the bound the oldest part is dropped, and a line
// says how much.
func TestTooMuchOutputWithoutDriver(t *testing.T) {
	h := newHost(t, 1)
	h.spoolSize = 1 // but a segment is always there
	driver, die, heir := mortal(t, h, "much")
	const size = 3 * segmentSize
	s, held := script(t, 0, fmt.Sprintf(`exec 9>"$1"; echo ready; while ! [ -e "$1.go" ]; do sleep 0.01; done; yes 1234567 | head -c %d`, size))
	start(t, driver, s).awaitOutput("ready")
	die()
	if err := os.WriteFile(s.Command[len(s.Command)-1]+".go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	gone(t, held)
	l := heir(s.Incarnation)
	s.Resumed = true
	var out, errs bytes.Buffer
	s.Stdout, s.Stderr = &out, &errs
	ctx, cancel := context.WithDeadline(t.Context(), sandbox.Limit())
	defer cancel()
	if err := l.Run(ctx, s, nil); err != nil {
		t.Fatal(err)
	}
	missing := 0
	if _, err := fmt.Sscanf(strings.TrimSpace(errs.String()), "hvdrun: %d bytes of the output", &missing); err != nil || missing < segmentSize {
		t.Errorf("stderr is %q", errs.String())
	}
	if got := len(strings.TrimPrefix(out.String(), "ready\n")); got+missing != size {
		t.Errorf("%d bytes and %d that are missing make %d, want %d", got, missing, got+missing, size)
	}
}

func TestSpool(t *testing.T) {
	dir := t.TempDir()
	s := spool{dir: dir, most: 2 * segmentSize}
	if err := errors.Join(s.put(1, []byte("one")), s.put(2, []byte("two"))); err != nil || s.empty() {
		t.Fatal(err)
	}
	for i, want := range []string{"one", "two", ""} {
		stream, text, missing, err := s.take()
		if string(text) != want || err != nil || missing != 0 || want != "" && int(stream) != i+1 {
			t.Errorf("%d: %q, %d missing, %v", stream, text, missing, err)
		}
	}
	if !s.empty() || s.held != 0 {
		t.Errorf("%d bytes are held", s.held)
	}
	piece := bytes.Repeat([]byte("x"), 100_000)
	for range 200 {
		if err := s.put(1, piece); err != nil {
			t.Fatal(err)
		}
	}
	if s.held > s.most+segmentSize {
		t.Errorf("%d bytes are held, the most are %d", s.held, s.most)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
		t.Errorf("files are left: %v, %v", names, err)
	}
	total := int64(0)
	for !s.empty() {
		_, text, missing, err := s.take()
		if err != nil {
			t.Fatal(err)
		}
		total += int64(len(text)) + missing
	}
	if total != 200*int64(len(piece)) {
		t.Errorf("%d bytes of %d", total, 200*len(piece))
	}
	s.dir = dir + "/nowhere"
	if err := s.put(1, piece); !errors.Is(err, syscall.ENOENT) || s.empty() {
		t.Errorf("no folder: %v", err)
	}
	if _, _, missing, _ := s.take(); missing != int64(len(piece)) || !s.empty() {
		t.Errorf("%d bytes are missing", missing)
	}
}

// TestSpoolMissesInOrder: what could not be stored is missing at its place: after what was stored
// before, and before what was stored later.
func TestSpoolMissesInOrder(t *testing.T) {
	s := spool{dir: t.TempDir(), most: segmentSize}
	if err := s.put(1, []byte("early")); err != nil {
		t.Fatal(err)
	}
	first := s.segments[0]
	writable := first.file
	defer writable.Close()
	var err error
	if first.file, err = os.Open(fmt.Sprintf("/proc/self/fd/%d", writable.Fd())); err != nil { // as if its disk were full
		t.Fatal(err)
	}
	if err := s.put(1, []byte("lost")); err == nil {
		t.Fatal("the text was kept")
	}
	dir := s.dir
	s.dir += "/nowhere"
	if err := s.put(1, []byte("too")); err == nil {
		t.Fatal("the text was kept")
	}
	s.dir = dir
	if err := s.put(1, []byte("late")); err != nil {
		t.Fatal(err)
	}
	var told []string
	for !s.empty() {
		_, text, missing, err := s.take()
		if err != nil {
			t.Fatal(err)
		}
		told = append(told, fmt.Sprintf("%s%d", text, missing))
	}
	if want := []string{"early0", "7", "late0"}; !slices.Equal(told, want) || s.held != 0 {
		t.Errorf("told %q, and %d bytes are held; want %q", told, s.held, want)
	}
}

// TestTakeOverAfterBrokenStream: an end that is not recorded also survives a broken stream.
func TestTakeOverAfterBrokenStream(t *testing.T) {
	h := newHost(t, 2)
	c := newCable(t, h.addr)
	driver := keepingAgents(t, driverOf(t, "broken"), c.addr, client.Config{Lease: 5 * time.Second, Orphan: time.Hour, Keep: true})
	s, _ := script(t, 0, "exit 3")
	var exit *launch.ExitError
	if err := driver.Run(t.Context(), s, nil); !errors.As(err, &exit) {
		t.Fatalf("Run returned %v", err)
	}
	c.cut()
	other, _ := script(t, 1, "exit 4") // over the next stream
	if err := driver.Run(t.Context(), other, nil); !errors.As(err, &exit) || exit.Code != 4 {
		t.Fatalf("Run returned %v", err)
	}
	c.sever()
	h.unattached(t)
	l := agents(t, driverOf(t, "broken"), h.addr, longLease)
	l.Adopt([]string{s.Incarnation, other.Incarnation}, 1, time.Now())
	for code, spec := range map[int]*launch.Spec{3: s, 4: other} {
		spec.Resumed = true
		if err := start(t, l, spec).wait(); !errors.As(err, &exit) || exit.Code != code {
			t.Errorf("%s ended with %v", spec.Incarnation, err)
		}
	}
}

// TestTakeOverBeforeHostsAreFound: a driver that takes over before discovery has found the hosts
// waits for them. A host that is not found for the time of a lease is lost with its workers.
func TestTakeOverBeforeHostsAreFound(t *testing.T) {
	h := newHost(t, 1)
	driver, die, _ := mortal(t, h, "early")
	s, pipe := script(t, 0, `exec 9>"$1"; trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done`)
	s.Grace = time.Hour
	start(t, driver, s).awaitOutput("ready")
	die()

	asked, found := make(chan bool), make(chan struct{})
	finds := func(host string) (string, bool) {
		select {
		case <-found:
			return h.addr, host == "a"
		case asked <- true:
		default:
		}
		return "", false
	}
	l := client.New(client.Config{
		Credentials: driverOf(t, "early"), Log: quiet(), Find: finds, Lease: longLease, Keep: true})
	t.Cleanup(func() { l.Close() })
	l.Adopt([]string{s.Incarnation}, 1, time.Now())
	s.Command, s.Env, s.Resumed = nil, nil, true
	r := start(t, l, s)
	for range 2 {
		<-asked
	}
	close(found)
	r.cancel()
	var exit *launch.ExitError
	if err := r.wait(); !errors.As(err, &exit) || exit.Code != 7 {
		t.Errorf("the worker ended with %v", err)
	}
	gone(t, pipe)

	hasty := client.New(client.Config{
		Credentials: driverOf(t, "early"), Log: quiet(), Find: finds, Lease: 100 * time.Millisecond, Keep: true})
	t.Cleanup(func() { hasty.Close() })
	hasty.Adopt([]string{"other"}, 1, time.Now())
	s.Incarnation, s.Slot.Host = "other", "nowhere.invalid"
	if err := start(t, hasty, s).wait(); !errors.As(err, &exit) || !exit.Lost || err.Error() != "was lost: its agent: host nowhere.invalid has no agent" {
		t.Errorf("the worker of an unknown host ended with %v", err)
	}
}

// TestTakeOverWithAnOldJournal: if a driver's journal ends before records that the previous driver
// announced to the agent, the driver learns it before it starts anything; if it ends there or
// later, it does not.
func TestTakeOverWithAnOldJournal(t *testing.T) {
	for _, c := range []struct {
		name string
		ends time.Duration // of the journal, after what the agent knows
		want bool
	}{{"older", -1, true}, {"same", 0, false}, {"newer", time.Second, false}} {
		t.Run(c.name, func(t *testing.T) {
			h := newHost(t, 2)
			cable := newCable(t, h.addr)
			driver := keepingAgents(t, driverOf(t, "old"), cable.addr, client.Config{Lease: longLease, Orphan: time.Hour, Keep: true})
			s, pipe := script(t, 0, `exec 9>"$1"; echo ready; while :; do sleep 0.01; done`)
			start(t, driver, s).awaitOutput("ready")
			at := time.Unix(1000, 5)
			driver.Noted(time.Unix(999, 0))
			driver.Noted(at)
			h.noted(t, at)
			cable.sever()
			h.unattached(t)

			ahead := make(chan error, 8)
			l := keepingAgents(t, driverOf(t, "old"), h.addr, client.Config{
				Lease: longLease, Keep: true, Ahead: func(err error) { ahead <- err },
			})
			l.Adopt([]string{s.Incarnation}, 1, at.Add(c.ends))
			other, _ := script(t, 1, `exit 9`)
			var exit *launch.ExitError
			if err := l.Run(t.Context(), other, nil); !errors.As(err, &exit) || exit.Code != 9 { // the driver is attached then
				t.Errorf("Run returned %v", err)
			}
			select {
			case err := <-ahead:
				if !c.want || !strings.Contains(err.Error(), "knows that it had records up to "+at.Format(time.StampMilli)) {
					t.Errorf("told of %v", err)
				}
			default:
				if c.want {
					t.Error("nothing is told of a journal that ends earlier")
				}
			}
			again := *s
			again.Command, again.Env, again.Resumed = nil, nil, true
			r := start(t, l, &again)
			r.cancel()
			_ = r.wait() // it is killed
			gone(t, pipe)
		})
	}
}

// noted waits until the agent knows of a record of this time.
func (h *host) noted(t *testing.T, at time.Time) {
	t.Helper()
	for limit := sandbox.Limit(); ; <-time.After(time.Millisecond) {
		h.mu.Lock()
		knows := false
		for _, s := range h.sessions {
			knows = knows || s.noted == at.UnixNano()
		}
		h.mu.Unlock()
		if knows {
			return
		}
		if time.Now().After(limit) {
			t.Fatal("the agent is not told of the record")
		}
	}
}
