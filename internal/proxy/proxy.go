// Package proxy takes part in a job for a program in any language. The program talks to it over the
// socket of the worker's process, in lines of JSON (docs/reference/worker-protocol.md). Until the
// program says hello, the proxy does nothing.
package proxy

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/member"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/internal/rendezvous"
	"github.com/hvdrun/hvdrun/plan"
)

// Config configures the proxy of a worker.
type Config struct {
	// Env is the worker's environment.
	Env []string
	// Program is the path of hvdrun; the library for collectives may be in the same folder. Empty:
	// unknown.
	Program string
	// Calls is that of the worker's launch.Spec: the proxy calls the driver so. Nil: it connects to
	// the driver.
	Calls func(ctx context.Context, conn net.Conn)
	// Log receives errors. Nil: logrus.StandardLogger().
	Log logrus.FieldLogger
}

// Talk is launch.Spec.Talk for the worker of a Config. It returns when it has read all lines of the
// process and has made its last report, such as that it is done.
func (cfg Config) Talk(ctx context.Context, pid int, conn net.Conn) (cleanup func()) {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	p := &proxy{cfg: cfg, process: process{pid: pid, conn: conn}, waiting: make(chan struct{}, 1), looking: looking{usage: proc.UsageOf}}
	p.ctx, p.cancel = context.WithCancel(context.WithoutCancel(ctx)) // a process that is asked to end has its grace
	err := p.listen(ctx)
	p.finish(ctx)
	if err != nil {
		cfg.Log.Warnf("proxy: worker %v: %v", p.env.Slot.SlotID, err)
	}
	return p.close
}

// proxy speaks for one worker.
type proxy struct {
	cfg Config
	process
	member *member.Member // nil: it has not said hello
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup // what hello has started
	calls  sync.WaitGroup // serves the member's; ends with it

	writing sync.Mutex
	waiting chan struct{} // of capacity 1: there are reports; closed when no more come
	last    chan struct{} // closed when the reports have been made; nil: there are none
	news    chan struct{} // of capacity 1: beat at once
	looking

	mu sync.Mutex
	state
	asked stacksAsked
	store driverStore
}

// looking is how the pulse looks at what the process uses.
type looking struct {
	usage  func(pid int) proc.Usage
	usedAt time.Time // of the last look
}

// process is the worker's, at its end of the socket.
type process struct {
	pid     int
	conn    net.Conn
	env     plan.Worker
	program string // what it says it is
}

// state is where the program is.
type state struct {
	joining   bool
	joined    func()           // ends the reports before the first join
	widen     chan []string    // the addresses of a join that answers widen; nil: none was asked for
	world     rendezvous.World // the newest that it was told; generation 0: none
	committed uint64           // the last generation whose first commit was reported
	reports   []request        // that wait for the driver, the oldest first, one of each kind
	lastWords int              // reports that hold up the news of its end
	seq       uint64           // of the newest update that it was told
	beat      request          // its newest
	trace     member.Trace     // of its way into its world
	changed   time.Time        // when that has changed
	figures   []rendezvous.Figure
}

// listen reads the program's lines until it ends, and returns what was wrong with them.
func (p *proxy) listen(ctx context.Context) error {
	in, buf := bufio.NewReaderSize(p.conn, 4<<10), []byte(nil)
	for {
		line, err := readLine(in, buf)
		var r request
		switch {
		case err == nil:
			buf = line
			if r, err = parse(line); err == nil {
				err = p.take(ctx, r)
			}
		case !errors.Is(err, errLong):
			return nil // the program has ended
		}
		if err != nil {
			p.say(errorLine{"error", err.Error(), true})
			return err
		}
	}
}

// take does what a line asks for. An error ends the talk.
func (p *proxy) take(ctx context.Context, r request) error {
	if p.member == nil {
		if r.Do != "hello" {
			return fmt.Errorf("%q before hello", r.Do)
		}
		return p.hello(ctx, r)
	}
	switch r.Do {
	case "join":
		p.mu.Lock()
		waits := p.joining && p.widen == nil
		p.mu.Unlock()
		if waits {
			p.complain("a join before the last one was answered")
		} else {
			p.join(r)
		}
	case "report":
		p.report(r)
	case "beat":
		p.hearBeat(r)
	case "figures":
		p.hearFigures(r)
	case "stacks":
		p.hearStacks(r)
	default:
		p.complain(fmt.Sprintf("%q is nothing that this hvdrun does", r.Do))
	}
	return nil
}

// hello begins to act for the worker.
func (p *proxy) hello(ctx context.Context, r request) error {
	if r.Version != Version {
		return fmt.Errorf("version %d of the protocol; this hvdrun speaks version %d", r.Version, Version)
	}
	vars := make(map[string]string, len(p.cfg.Env))
	for _, entry := range p.cfg.Env {
		name, value, _ := strings.Cut(entry, "=")
		vars[name] = value
	}
	var started bool
	var err error
	p.env, started, err = plan.WorkerFromEnv(func(name string) (string, bool) {
		value, is := vars[name]
		return value, is
	})
	if err == nil && !started {
		err = errors.New("the process is no worker of a job")
	}
	if err != nil {
		return err
	}
	p.program = strings.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f {
			return ' '
		}
		return c
	}, r.Program)
	if p.program == "" {
		p.program = "unnamed"
	}
	own := member.Config{Worker: p.env, Widen: p.askToWiden, Stacks: p.askForStacks}
	if p.cfg.Calls != nil {
		near, far := net.Pipe()
		own.Socket = near
		p.calls.Go(func() { p.cfg.Calls(p.ctx, far) })
	}
	p.member, err = member.New(own)
	if err != nil {
		return err
	}
	p.news, p.last = make(chan struct{}, 1), make(chan struct{})
	p.changed = time.Now()
	prepare, joined := context.WithTimeout(p.ctx, prepareBound)
	p.joined = joined
	p.wg.Go(func() { p.prepare(prepare) })
	p.wg.Go(p.makeReports)
	p.wg.Go(p.pulse)
	p.wg.Go(p.passOn)
	p.wg.Go(func() { // the launcher asks the worker to end
		select {
		case <-ctx.Done():
			p.say(bareLine{"leave"})
		case <-p.ctx.Done():
		}
	})
	if err := p.openStore(); err != nil {
		return err
	}
	p.say(helloLine{
		Is: "hello", Version: Version, Run: p.env.RunID, Host: p.env.Slot.Host, Slot: p.env.Slot.Index,
		Incarnation: p.env.Incarnation, Library: beside(p.cfg.Program), Store: p.storeAddr(),
	})
	return nil
}

// complain tells the program of a line that has no effect.
func (p *proxy) complain(text string) { p.say(errorLine{"error", text, false}) }

// say writes a line. It blocks while the program does not read; an error of it is the program's
// end, which listen notices.
func (p *proxy) say(line any) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(line); err != nil {
		panic(fmt.Sprintf("proxy: %v", err)) // cannot happen: the lines are plain values
	}
	p.writing.Lock()
	defer p.writing.Unlock()
	_, _ = p.conn.Write(b.Bytes())
}

// lastGrace is how long the last reports may take of a worker that was asked to end.
const lastGrace = 2 * time.Second

// finish blocks until the reports have been made that tell how the program has ended.
func (p *proxy) finish(ctx context.Context) {
	if p.member == nil {
		return
	}
	close(p.waiting)
	p.mu.Lock()
	holds := p.lastWords > 0
	p.mu.Unlock()
	if holds {
		select {
		case <-p.last:
		case <-ctx.Done():
			late := time.NewTimer(lastGrace)
			defer late.Stop()
			select {
			case <-p.last:
			case <-late.C:
			}
		}
	}
	p.cancel()
}

// close ends what hello has started.
func (p *proxy) close() {
	p.cancel()
	p.wg.Wait()
	if p.store.door != nil {
		p.store.door.Close()
	}
	if p.member != nil {
		_ = p.member.Close() // of no interest: the worker has ended
	}
	p.calls.Wait()
}

// Until the first join the driver is told that the worker gets ready, as elastic.Init does.
const (
	prepareReports = time.Second
	prepareBound   = 10 * time.Minute
)

func (p *proxy) prepare(ctx context.Context) {
	tick := time.NewTicker(prepareReports)
	defer tick.Stop()
	for {
		_ = p.member.Report(ctx, rendezvous.Fetching, 0, 0) // a failure shows with the join
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// join asks for a world.
func (p *proxy) join(r request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.widen != nil {
		p.widen <- r.Addresses // of capacity 1
		p.widen = nil
		return
	}
	p.joined()
	p.joining = true
	p.setBeat(request{beat: beat{Phase: "joining"}, Commits: r.Commits})
	j := rendezvous.Joining{
		After: p.world.Generation, Commits: r.Commits, HoldsState: r.HoldsState, DataAddrs: r.Addresses, Cause: r.Cause,
		Trained: r.Trained, Lost: r.Lost, Handle: []byte(r.Handle), Program: p.program,
	}
	p.wg.Go(func() { p.answer(p.member.Join(p.ctx, j)) })
}

// askToWiden has the program open its data listener on other addresses, and join again with them.
func (p *proxy) askToWiden() ([]string, error) {
	addresses := make(chan []string, 1)
	p.mu.Lock()
	p.widen = addresses
	p.mu.Unlock()
	p.say(bareLine{"widen"})
	select {
	case a := <-addresses:
		return a, nil
	case <-p.ctx.Done():
		return nil, context.Cause(p.ctx)
	}
}

// answer tells the program how its join has ended.
func (p *proxy) answer(w rendezvous.World, err error) {
	p.mu.Lock()
	p.joining, p.widen = false, nil
	if err == nil {
		p.world = w
		p.seq = max(p.seq, w.Seq)
		p.setBeat(request{beat: beat{Phase: "outside"}})
	}
	p.mu.Unlock()
	switch {
	case errors.Is(err, rendezvous.ErrRemoved):
		p.say(dismissedLine{"dismissed", "removed", errors.Is(err, rendezvous.ErrLast)})
	case errors.Is(err, rendezvous.ErrFinished):
		p.say(dismissedLine{"dismissed", "finished", false})
	case p.ctx.Err() != nil:
	case err != nil:
		p.say(errorLine{"error", err.Error(), true})
	default:
		if err := p.follow(w.Store); err != nil {
			p.say(errorLine{"error", err.Error(), true})
			return
		}
		p.say(p.worldLine(w))
		if loss, _ := p.member.Loss(); loss.Generation == w.Generation {
			p.say(lostLine{"lost", loss.Generation, append([]int{}, loss.Ranks...)}) // it may have come before the world
		}
	}
}

func (p *proxy) worldLine(w rendezvous.World) worldLine {
	own := w.Slots[w.Rank]
	line := worldLine{
		Is: "world", Generation: w.Generation, Rank: w.Rank, Size: w.Size(), LocalRank: own.LocalRank, LocalSize: own.LocalSize,
		CrossRank: own.CrossRank, CrossSize: own.CrossSize, Root: w.SyncRoot, Seq: w.Seq,
		Handles: make([]string, w.Size()), Members: make([]memberLine, w.Size()), DataKey: hex.EncodeToString(w.Key.Bytes()),
	}
	if w.Store != 0 {
		line.Store = p.storeAddr()
	}
	addresses, handles := w.DataAddrs(), w.Handles()
	for r, s := range w.Slots {
		line.Members[r] = memberLine{s.Host, s.Index, append([]string{}, addresses[r]...)}
		if len(handles) > 0 {
			line.Handles[r] = string(handles[r])
		}
	}
	return line
}

// passOn passes on what the driver notifies the worker of.
func (p *proxy) passOn() {
	var lost toldLoss
	for {
		loss, more := p.member.Loss()
		u := p.member.Latest()
		p.mu.Lock()
		news := u.Seq > p.seq
		p.seq = max(p.seq, u.Seq)
		p.mu.Unlock()
		if now := (toldLoss{loss.Generation, len(loss.Ranks)}); now != lost {
			lost = now
			p.say(lostLine{"lost", loss.Generation, append([]int{}, loss.Ranks...)})
		}
		if news {
			line := updatedLine{"updated", u.Seq, []string{}, u.Generation}
			if u.Change&plan.Added != 0 {
				line.Change = append(line.Change, "added")
			}
			if u.Change&plan.Removed != 0 {
				line.Change = append(line.Change, "removed")
			}
			p.say(line)
		}
		select {
		case <-more:
		case <-p.ctx.Done():
			return
		}
	}
}

// toldLoss is which loss was told.
type toldLoss struct {
	generation uint64
	ranks      int
}

// reportWords are the words for reports.
var reportWords = map[string]rendezvous.Report{
	"committed": rendezvous.Committed, "done": rendezvous.Done, "leaving": rendezvous.Leaving, "draining": rendezvous.Draining,
	"writing": rendezvous.Writing, "written": rendezvous.Written, "not_written": rendezvous.NotWritten,
}

// isLastWord: the driver must know of the report before it learns that the process has ended.
func isLastWord(what string) bool {
	if what == "failed" {
		return true
	}
	switch reportWords[what] {
	case rendezvous.Done, rendezvous.Leaving, rendezvous.Written, rendezvous.NotWritten:
		return true
	}
	return false
}

// report has the report made after those before it. It does not wait for the driver: of each kind
// the newest alone waits.
func (p *proxy) report(r request) {
	if _, is := reportWords[r.What]; !is && r.What != "backend" && r.What != "failed" {
		p.complain(fmt.Sprintf("%q is no report", r.What))
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r.ID = p.world.Generation
	if isLastWord(r.What) {
		p.lastWords++
	}
	if r.What == "committed" {
		told := p.committed == r.ID
		p.committed = r.ID
		p.trace.Enter(rendezvous.Saving, time.Now())
		p.beat.Commits = r.Commits
		if told {
			return // beats tell the following ones
		}
	}
	p.reports = append(slices.DeleteFunc(p.reports, func(old request) bool { return old.What == r.What }), r)
	select {
	case p.waiting <- struct{}{}:
	default: // those that wait are about to be made
	}
}

// nextReport returns the oldest report that waits.
func (p *proxy) nextReport() (r request, is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.reports) == 0 {
		return r, false
	}
	r, p.reports = p.reports[0], p.reports[1:]
	return r, true
}

// makeReports makes the reports, one after the other.
func (p *proxy) makeReports() {
	defer close(p.last)
	for more := true; more; {
		_, more = <-p.waiting
		for r, is := p.nextReport(); is; r, is = p.nextReport() {
			p.makeReport(r)
		}
	}
}

func (p *proxy) makeReport(r request) {
	var err error
	switch r.What {
	case "failed":
		text := r.Error
		if r.Where != "" {
			text = fmt.Sprintf("%s (%s)", text, r.Where)
		}
		err = p.member.ReportFailure(p.ctx, cmp.Or(rendezvous.CleanError(text), "an error without a text"))
	case "backend":
		err = p.member.ReportBackend(p.ctx, r.ID, r.Backend)
	default:
		err = p.member.Report(p.ctx, reportWords[r.What], r.ID, r.Commits)
	}
	if err != nil && p.ctx.Err() == nil {
		p.say(errorLine{"error", err.Error(), false})
	}
}
