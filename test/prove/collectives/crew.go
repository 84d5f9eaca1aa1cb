package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hvdrun/hvdrun/internal/identity"
)

// outcome is the result of a program.
type outcome struct {
	Class      string // empty: success
	Text       string // the error, in a line
	Details    string // of a hang: each rank's activity, connections and stacks
	step       int    // step of the error
	bytes      int64  // of the tensors of completed operations of all ranks
	operations int    // number of completed operations of all ranks
	narrow     error  // why connections have default buffers although the program sets a size
}

// The classes of outcomes in addition to those of errors.
const (
	classHang  = "hang"
	classCrash = "crash"
)

// crew is the set of processes that run a program.
type crew struct {
	program  *program
	ranks    []*member
	busy     []*exec.Cmd
	news     chan news
	watchdog *watchdog
	digests  map[int]digested // by step
	outcome  outcome
	resumed  chan *member
}

type digested struct {
	rank int
	sum  uint32
}

// member is the process of a rank.
type member struct {
	rank    int
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *json.Decoder
	said    bounded // output on standard error
	gone    bool
	idle    idle
	verdict *verdict
}

// news is a message of a rank; a nil message means that the rank's process has ended.
type news struct {
	rank    int
	message *message
}

// bounded keeps the beginning of what is written to it.
type bounded struct {
	mu   sync.Mutex
	text bytes.Buffer
}

const mostSaid = 4 << 20

func (b *bounded) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text.Write(p[:min(len(p), mostSaid-b.text.Len())])
	return len(p), nil
}

func (b *bounded) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// conduct runs a program until all of its processes have ended. It returns an error if the program
// could not be run.
func conduct(ctx context.Context, p *program) (outcome, error) {
	var o outcome
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread, its network namespace and all processes end with this goroutine
		c := &crew{program: p, news: make(chan news, 64), watchdog: newWatchdog(p.ranks()), digests: map[int]digested{},
			resumed: make(chan *member, 16)}
		err = c.run(ctx)
		o = c.outcome
	}()
	<-done
	return o, err
}

func (c *crew) run(ctx context.Context) error {
	if c.program.Buffers > 0 {
		c.outcome.narrow = narrow(c.program.Buffers)
	}
	defer c.end()
	if err := c.start(); err != nil {
		return err
	}
	if err := c.introduce(); err != nil {
		return err
	}
	for _, m := range c.ranks {
		go c.listen(m)
	}
	return c.attend(ctx)
}

func (c *crew) start() error {
	authority, err := identity.NewAuthority("prove")
	if err != nil {
		return err
	}
	key := identity.NewDataKey()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for range c.program.Busy {
		cmd := exec.Command(self, "busy")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			return err
		}
		c.busy = append(c.busy, cmd)
	}
	for rank := range c.program.ranks() {
		m := &member{rank: rank, cmd: exec.Command(self, "rank")}
		m.cmd.Env = append(os.Environ(), "GOTRACEBACK=all")
		if c.program.Procs > 0 {
			m.cmd.Env = append(m.cmd.Env, fmt.Sprintf("GOMAXPROCS=%d", c.program.Procs))
		}
		m.cmd.Stderr = &m.said
		m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		credentials, err := authority.Issue(identity.Subject{Role: identity.Worker, Host: "here", Index: rank,
			Incarnation: fmt.Sprint("rank", rank)})
		if err != nil {
			return err
		}
		in, err1 := m.cmd.StdinPipe()
		out, err2 := m.cmd.StdoutPipe()
		if err := errors.Join(err1, err2, m.cmd.Start()); err != nil {
			return err
		}
		m.in, m.out = in, json.NewDecoder(out)
		c.ranks = append(c.ranks, m)
		if err := json.NewEncoder(in).Encode(duty{c.program, rank, credentials.Encode(), key.Bytes()}); err != nil {
			return fmt.Errorf("rank %d: %w: %s", rank, err, m.said.String())
		}
	}
	return nil
}

// introduce sends each rank the addresses of all.
func (c *crew) introduce() error {
	addrs := make([][]string, len(c.ranks))
	for _, m := range c.ranks {
		var first message
		if err := m.out.Decode(&first); err != nil {
			return fmt.Errorf("rank %d: %w: %s", m.rank, err, m.said.String())
		}
		addrs[m.rank] = first.Addrs
	}
	for _, m := range c.ranks {
		if err := json.NewEncoder(m.in).Encode(addrs); err != nil {
			return fmt.Errorf("rank %d: %w: %s", m.rank, err, m.said.String())
		}
	}
	return nil
}

// listen forwards the messages of a rank.
func (c *crew) listen(m *member) {
	for {
		said := new(message)
		if err := m.out.Decode(said); err != nil {
			c.news <- news{m.rank, nil}
			return
		}
		c.news <- news{m.rank, said}
	}
}

// attend handles the ranks' messages until all processes have ended or hang.
func (c *crew) attend(ctx context.Context) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for left := len(c.ranks); left > 0; {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case n := <-c.news:
			if n.message == nil {
				left--
			}
			c.hear(c.ranks[n.rank], n.message)
		case m := <-c.resumed:
			c.resume(m)
		case <-ticker.C:
			c.watchdog.tick()
		}
		if c.watchdog.hangs() {
			c.hang()
			return nil
		}
	}
	c.judge()
	return nil
}

// hear handles a message of a rank; nil: it has ended.
func (c *crew) hear(m *member, said *message) {
	switch {
	case said == nil:
		m.gone = true
		c.watchdog.ended(m.rank)
		err := m.cmd.Wait()
		if err != nil || m.verdict == nil {
			c.wrong(classCrash, m.idle.Step, fmt.Sprintf("rank %d ended (%v): %s", m.rank, err, tail(m.said.String())))
			c.dismiss() // ranks that wait for it notice its closed connections
		}
		return
	case said.Stop > 0:
		c.stop(m, said.Stop)
	case said.Ended != nil:
		c.outcome.operations += c.program.Steps[said.Ended.Step].Times
		c.outcome.bytes += said.Ended.Bytes
		c.compare(m.rank, said.Ended)
	case said.Idle != nil:
		m.idle = *said.Idle
	case said.Verdict != nil:
		m.verdict = said.Verdict
		for _, other := range c.ranks {
			if other.verdict == nil && !other.gone {
				c.watchdog.heard(m.rank, said.Idle)
				return
			}
		}
		c.dismiss()
	}
	c.watchdog.heard(m.rank, said.Idle)
}

// dismiss lets all ranks exit.
func (c *crew) dismiss() {
	for _, m := range c.ranks {
		m.in.Close()
	}
}

// stop suspends a process for a while.
func (c *crew) stop(m *member, milliseconds int) {
	if m.gone || m.cmd.Process.Signal(syscall.SIGSTOP) != nil {
		return
	}
	c.watchdog.stop()
	time.AfterFunc(time.Duration(milliseconds)*time.Millisecond, func() { c.resumed <- m })
}

func (c *crew) resume(m *member) {
	m.cmd.Process.Signal(syscall.SIGCONT) // fails only if it has ended
	c.watchdog.resume()
}

// compare checks that a step's result has the same bits on all ranks of its group.
func (c *crew) compare(rank int, e *ended) {
	if e.Digest == 0 {
		return
	}
	first, known := c.digests[e.Step]
	if !known {
		c.digests[e.Step] = digested{rank, e.Digest}
	} else if first.sum != e.Digest {
		c.wrong(classWrong, e.Step, fmt.Sprintf("step %d (%s): ranks %d and %d have other bits", e.Step, &c.program.Steps[e.Step], first.rank, rank))
	}
}

// wrong records the first error.
func (c *crew) wrong(class string, step int, text string) {
	if c.outcome.Class == "" {
		c.outcome.Class, c.outcome.step, c.outcome.Text = class, step, text
	}
}

// judge determines the result from the verdicts of all ranks. It reports the error that is not a
// consequence of another one.
func (c *crew) judge() {
	steps := c.program.Steps
	last := len(steps) - 1
	aborts := c.program.aborts()
	ends := last >= 0 && steps[last].Wrong != nil && steps[last].Wrong.Rank >= 0
	for _, consequence := range []bool{false, true} {
		for _, m := range c.ranks {
			v := m.verdict
			if v == nil || v.Class == "" || (v.Class == classAborted) != consequence || consequence && aborts {
				continue
			}
			if ends && v.Step == last && (v.Class == classMismatch || c.mayDiffer(m.rank, last, v.Class)) {
				continue
			}
			what := "connecting"
			if v.Step >= 0 {
				what = steps[v.Step].String()
			}
			c.wrong(v.Class, v.Step, fmt.Sprintf("rank %d, step %d (%s): %s", m.rank, v.Step, what, v.Error))
		}
	}
	if !ends {
		return
	}
	for _, rank := range c.program.members(steps[last].Group) {
		if v := c.ranks[rank].verdict; v != nil && v.Class == "" {
			c.wrong(classAccepted, last, fmt.Sprintf("rank %d, step %d (%s): it was not refused", rank, last, &steps[last]))
		}
	}
}

// mayDiffer reports whether a rank may end the last step, whose calls do not match, with a
// different error. It may if its own call is invalid in itself, or if it is outside the group.
func (c *crew) mayDiffer(rank, last int, class string) bool {
	s := &c.program.Steps[last]
	for i, member := range c.program.members(s.Group) {
		if member == rank {
			return i == s.Wrong.Rank && class == classOther
		}
	}
	return class == classAborted
}

// hang records what every rank does, and kills them all.
func (c *crew) hang() {
	c.outcome.Class, c.outcome.Text = classHang, "all ranks wait: "+c.where()
	var b strings.Builder
	for _, m := range c.ranks {
		if m.gone {
			fmt.Fprintf(&b, "rank %d has ended\n", m.rank)
			continue
		}
		fmt.Fprintf(&b, "rank %d (process %d), %s\n", m.rank, m.cmd.Process.Pid, c.doing(m))
		for _, p := range m.idle.Progress {
			c.outcome.step = max(c.outcome.step, m.idle.Step)
			fmt.Fprintf(&b, "    lane %x: operation %d, %s, waiting: %v\n", p.Lane, p.Operation, p.What, p.Waiting)
		}
	}
	b.WriteString(c.queues())
	for _, m := range c.ranks {
		if !m.gone {
			m.cmd.Process.Signal(syscall.SIGCONT)
			m.cmd.Process.Signal(syscall.SIGQUIT) // prints all stacks
		}
	}
	c.reap(maxEndsSlack)
	for _, m := range c.ranks {
		fmt.Fprintf(&b, "rank %d:\n%s", m.rank, stacks(m.said.String()))
	}
	c.outcome.Details = b.String()
}

// where lists the steps in which ranks are.
func (c *crew) where() string {
	at := map[string][]string{}
	for _, m := range c.ranks {
		what := c.doing(m)
		at[what] = append(at[what], fmt.Sprint(m.rank))
	}
	var words []string
	for _, what := range slices.Sorted(maps.Keys(at)) {
		words = append(words, fmt.Sprintf("%s (%s)", strings.Join(at[what], ", "), what))
	}
	return strings.Join(words, "; ")
}

func (c *crew) doing(m *member) string {
	switch at := m.idle.Step; {
	case m.gone:
		return "ended"
	case m.verdict != nil:
		return "done"
	case at < 0 || at >= len(c.program.Steps):
		return "connecting"
	default:
		return fmt.Sprintf("step %d: %s", at, &c.program.Steps[at])
	}
}

// reap waits for the end of all ranks, for this number of ticks at most.
func (c *crew) reap(ticks int) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for ; ticks > 0; ticks-- {
		left := false
		for _, m := range c.ranks {
			left = left || !m.gone
		}
		if !left {
			return
		}
		select {
		case n := <-c.news:
			if n.message == nil {
				c.ranks[n.rank].gone = true
				c.ranks[n.rank].cmd.Wait()
			}
			ticks++
		case <-c.resumed:
		case <-ticker.C:
		}
	}
}

// end kills the remaining processes and waits for them.
func (c *crew) end() {
	for _, cmd := range c.busy {
		cmd.Process.Kill()
		cmd.Wait()
	}
	for _, m := range c.ranks {
		if !m.gone {
			m.cmd.Process.Kill()
		}
	}
	for _, m := range c.ranks {
		if !m.gone {
			m.cmd.Wait()
		}
	}
}

// tail returns the end of a text.
func tail(text string) string {
	const most = 2000
	if len(text) > most {
		text = "…" + text[len(text)-most:]
	}
	return strings.TrimSpace(text)
}
