package elastic

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/retry"
)

// A worker that trains with Steps has the others' state before it enters its first world, however
// much of the state each step changes. It takes one commit from a member, which holds that commit
// meanwhile, and calls train. Its Steps compute nothing: they apply the averages of the member's
// steps. Once the worker is at most one step behind, it joins, and continues to apply steps until
// the join is answered, which happens soon for a newcomer, and for a spare when a member has died.
// The settlement in the new world handles the last step (steps_settle.go), and train is called
// again.

// arrival says in which state catchUp has left a worker.
type arrival uint8

const (
	apart        arrival = iota // in no world: it fetches a commit and joins
	inside                      // in its first world: it still has to synchronise
	synchronised                // in its first world and synchronised
)

const (
	mostTakes  = 5          // commits taken in a row without a step applied in between
	busyTakes  = 3          // takes counted for the pause of a worker that waits for its turn
	samples    = 8          // chunks that a follower compares in each step
	sampleStep = 0x9e3779b1 // spreads them over all chunks
)

// takeBackoff is the pause before the next commit is taken.
var takeBackoff = retry.Backoff{First: 20 * time.Millisecond, Most: refetchMost}

var (
	errOutside = errors.New("elastic: this worker is in no world yet, so that only Step and Commit can be called")
	errUnlike  = errors.New("elastic: the state cannot be reached by applying the steps of others")
	errThread  = errors.New("elastic: the following steps are no longer available")
)

// catchUp is the entry of a worker into its first world by applying the steps of others.
type catchUp struct {
	runner *runner
	from   supplier
	ctx    context.Context
	cancel context.CancelFunc
	before *membership // of the trial assignment

	follower *transfer.Follower // nil: none
	applied  int                // number of steps applied since the commit was taken
	broken   bool               // following ended because no further steps came
	spoiled  bool               // a step could not be applied: the state is invalid
	reported time.Time

	answered chan struct{} // closed when the join is answered; nil: not joined yet
	joining  sync.WaitGroup
	err      error // result of joining; valid after joining.Wait

	inside bool // the worker has entered the world, and the Step in progress synchronises
	synced bool
	failed error // result of synchronising
}

// catchingUp reports whether train is running in no world.
func (s *State) catchingUp() bool { return s.catchUp != nil && !s.catchUp.inside }

// catchUp enters the first world as described above, if the state can be reached in that way and
// train calls only Step and Commit.
func (r *runner) catchUp() (arrival, error) {
	s, w := r.state, r.worker
	from, ok := w.meeting.(supplier)
	if !ok || !s.replayable() {
		return apart, nil
	}
	c := &catchUp{runner: r, from: from, before: w.member.Load()}
	c.ctx, c.cancel = context.WithCancel(r.ctx)
	c.begin()
	defer c.end()
	takes, fruitless := 0, 0 // takes in a row without a step applied; those of them that did not wait for their turn
	for fruitless < mostTakes || c.answered != nil {
		takes, fruitless = takes+1, fruitless+1
		if err := c.take(); err != nil {
			w.log.Debugf("elastic: not following another worker: %v", err)
			if errors.Is(err, errNobody) && c.answered == nil || errors.Is(err, transfer.ErrOther) {
				break
			}
			if errors.Is(err, transfer.ErrBusy) { // its turn will come
				c.report()
				takes, fruitless = min(takes, busyTakes), 0
			}
		} else {
			c.train()
			if c.synced || !c.broken {
				break
			}
			if c.applied > 0 {
				takes, fruitless = 1, 0
			}
		}
		if !c.pause(takeBackoff.After(takes)) {
			break
		}
	}
	if !c.synced { // from now on commits of others are written to the live memory
		s.steps.restless()
		if s.saved.Last() == nil || s.saved.InPlace() {
			if err := s.saveReplayedAs(false); err != nil {
				return apart, err
			}
		}
	}
	switch {
	case c.synced:
		return synchronised, c.failed
	case c.answered == nil:
		s.commits = 0
		return apart, r.ctx.Err()
	}
	stop := r.refetch()
	<-c.answered
	stop()
	c.joining.Wait()
	w.fake.Survive()
	s.commits = 0
	return inside, c.err
}

// begin puts the worker into the state in which it is in no world and runs train.
func (c *catchUp) begin() {
	w := c.runner.worker
	c.runner.state.catchUp = c
	none := collective.Local(1)[0]
	none.Abort(errOutside)
	w.first.none.Store(none)
	if p := *c.before; p.slot.Rank == 0 && p.world.Size() > 1 { // rank 0 is another worker, which logs and writes for all
		p.slot.Rank = p.world.Size() - 1
		w.member.Store(&p)
	}
	w.doing.enter(line.Fetches)
}

// end cancels joining and following, and waits for their end.
func (c *catchUp) end() {
	w := c.runner.worker
	c.cancel()
	c.joining.Wait()
	c.leave()
	w.first.none.Store(nil)
	c.runner.state.catchUp = nil
	if c.answered == nil {
		w.member.Store(c.before)
	}
}

// leave stops following and returns the memory for averages.
func (c *catchUp) leave() {
	if c.follower != nil {
		c.follower.Close()
		c.follower = nil
	}
	c.runner.state.steps.returned()
}

// pause waits for t, and reports whether another commit may be taken: not if the join is answered
// or the catch-up ends meanwhile.
func (c *catchUp) pause(t time.Duration) bool {
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.answered:
	case <-c.ctx.Done():
	}
	return false
}

var errNobody = errors.New("elastic: no worker trains")

// take sets the state to the newest commit of a worker, and starts to follow that worker.
func (c *catchUp) take() error {
	s := c.runner.state
	sources, err := c.from.sources(c.ctx)
	if err != nil || len(sources) == 0 {
		return errors.Join(errNobody, err)
	}
	_, blobs := s.parts.memory()
	memory := transfer.Memory{Layout: s.layout(), Blobs: blobs, Buffers: s.steps.lent(transfer.Depth(s.steps.averaged()))}
	var errs []error
	for _, source := range sources {
		err := c.follow(source, memory)
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// follow takes the commit of one source and starts to follow that source.
func (c *catchUp) follow(source transfer.Source, memory transfer.Memory) error {
	s, w := c.runner.state, c.runner.worker
	conn, err := source(c.ctx)
	if err != nil {
		return err
	}
	s.saved.clean = false
	f, err := transfer.Follow(c.ctx, conn, memory)
	if err != nil {
		return err
	}
	w.prepared() // from now on, arriving bytes show that the worker is alive
	c.report()
	tick := time.NewTicker(fetchReports)
	defer tick.Stop()
	for loaded := false; !loaded; {
		select {
		case <-f.Loaded():
			loaded = true
		case <-tick.C:
			c.report()
		case <-f.Failed():
			f.Close()
			return f.Err()
		case <-c.answered:
			f.Close()
			return errors.New("elastic: the join was answered before the commit had arrived")
		}
	}
	if err := c.taken(f); err != nil {
		f.Close()
		return err
	}
	c.follower, c.applied, c.broken, c.spoiled = f, 0, false, false
	w.log.Debugf("following a worker from commit %d: %.1f MB", f.Head.Number, float64(f.Received())/bytesPerMega)
	return nil
}

// taken completes the state with the head of the commit, and saves it.
func (c *catchUp) taken(f *transfer.Follower) error {
	s := c.runner.state
	if err := s.parts.readCarried(f.Head.Carried); err != nil {
		return err
	}
	if s.steps.Applied() != f.Head.Steps {
		return errUnlike
	}
	s.commits = f.Head.Number
	return s.saveReplayed()
}

// saveReplayed saves the state after a replayed step, or after a commit of another worker was
// taken. It does not save if further steps are waiting to be applied, because only the last one
// counts, or if others are waiting in the next world, because the sync saves. A save in place is
// always made, because it takes no time.
func (s *State) saveReplayed() error {
	inPlace := s.savesInPlace() && s.steps.inStep()
	if c := s.catchUp; !inPlace && c.follower != nil && (len(c.follower.Ready()) > 0 || c.isAnswered()) {
		s.saved.Abandon()
		return nil
	}
	return s.saveReplayedAs(inPlace)
}

func (s *State) saveReplayedAs(inPlace bool) error {
	if err := s.saveAs(s.commits, inPlace); err != nil {
		return err
	}
	s.saved.mark, s.saved.clean = snapshotID{Count: fetchedCount}, true
	return nil
}

// report reports to the driver that this worker is alive. It is called as bytes arrive.
func (c *catchUp) report() {
	if now := time.Now(); c.answered == nil && now.Sub(c.reported) >= fetchReports/2 {
		c.reported = now
		c.runner.worker.reportFetching()
	}
}

// train calls the training function while the worker is in no world.
func (c *catchUp) train() {
	r := c.runner
	err := r.train(r.ctx)
	if c.synced {
		return
	}
	c.leave()
	r.worker.log.Debugf("%d steps of other workers were applied, until the training function returned: %v", c.applied, err)
}

// next returns the next step to apply. It returns nil when the join is answered and all steps that
// were in flight by then have been applied.
func (c *catchUp) next(ctx context.Context) (*transfer.Step, error) {
	f := c.follower
	for f != nil && !c.spoiled {
		c.runner.worker.fake.Survive()
		select {
		case step := <-f.Ready():
			return step, nil
		default:
		}
		applied, answered := c.runner.state.steps.Applied(), c.answered
		if c.isAnswered() {
			if applied >= f.Latest() {
				return nil, nil
			}
			answered = nil // first apply what others have already applied, one step in each Step
		} else if c.answered == nil && applied+1 >= f.Latest() {
			c.join()
			answered = c.answered
		}
		select {
		case step := <-f.Ready():
			return step, nil
		case <-answered:
		case <-f.Beats():
			c.report()
		case <-f.Failed():
			if len(f.Ready()) > 0 {
				continue
			}
			if c.answersSoon(ctx) {
				return nil, nil
			}
			c.broken = true
			return nil, fmt.Errorf("%w: %w", errThread, f.Err())
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.ctx.Done():
			return nil, c.ctx.Err()
		}
	}
	return nil, errOutside
}

// answerBound is how long a follower waits for a world when no further steps arrive.
const answerBound = 500 * time.Millisecond

// answersSoon reports whether the join is answered within answerBound. That is the case if the
// followed worker has died: then there is no time to take another commit, and the sync sends what
// is missing.
func (c *catchUp) answersSoon(ctx context.Context) bool {
	if c.isAnswered() {
		return true
	}
	if c.answered == nil || errors.Is(c.follower.Err(), transfer.ErrLost) {
		return false
	}
	timer := time.NewTimer(answerBound)
	defer timer.Stop()
	select {
	case <-c.answered:
		return true
	case <-timer.C:
	case <-ctx.Done():
	case <-c.ctx.Done():
	}
	return false
}

// isAnswered reports whether the join has been answered.
func (c *catchUp) isAnswered() bool {
	select {
	case <-c.answered:
		return true
	default:
		return false
	}
}

// join starts waiting for the first world, and then connecting to its members.
func (c *catchUp) join() {
	w := c.runner.worker
	w.doing.enter(line.Joins)
	c.answered = make(chan struct{})
	answer := sync.OnceFunc(func() { close(c.answered) })
	c.err = errLeft // kept if the goroutine ends with its worker
	c.joining.Go(func() { c.err = w.enterFirst(c.ctx, answer) })
}

// enter ends the catch-up in a Step once the join is answered: it enters the world and
// synchronises.
func (c *catchUp) enter() error {
	w := c.runner.worker
	c.joining.Wait()
	w.fake.Survive()
	if c.err != nil {
		return c.err
	}
	c.inside = true
	w.first.none.Store(nil)
	c.failed = c.runner.sync()
	c.synced = true
	c.leave()
	if c.failed != nil {
		if s := c.runner.state; !s.holds { // the sync may have failed after this rank had saved the state
			s.commits = 0
		}
		return c.failed
	}
	return errRejoined
}

// following returns the ID of the feed that this worker follows or by which others follow it; 0:
// none.
func (s *State) following() uint64 {
	switch {
	case s.catchUp != nil && s.catchUp.follower != nil:
		return s.catchUp.follower.Head.Feed
	case s.feed != nil && s.feed.Followed():
		return s.feed.ID()
	}
	return 0
}

// replayable reports whether the state can be reached by applying the averages of steps: all of it
// must be the same on all ranks, and it must be possible to set it to that of a commit.
func (s *State) replayable() bool {
	if s.steps == nil || s.steps.averaged() == 0 {
		return false
	}
	large := false
	for i, c := range s.parts.of {
		if !s.parts.own(i) || c.local != nil || c.setRank != nil || c.later != nil {
			return false
		}
		large = large || c.inMemory()
	}
	return large
}

// layout returns a description of the whole state.
func (s *State) layout() string { return strings.Join(s.parts.layouts(), "\n") }

// newFeed returns a feed for workers that follow this one; nil if the state does not permit that.
func (s *State) newFeed() *transfer.Feed {
	if !s.replayable() {
		return nil
	}
	layout := s.layout()
	return transfer.NewFeed(transfer.FeedSource{
		Size:    s.steps.averaged(),
		Reserve: s.reserve,
		Trim:    s.saved.Trim,
		Hold:    func() (*transfer.Commit, error) { return s.hold(layout) },
		Sample:  s.sample,
	})
}

// reserve allocates the memory that is needed to hold a commit. It does nothing while it is unknown
// whether saves will lie in place.
func (s *State) reserve() {
	if !s.waitsForCalm() {
		s.saved.Reserve()
	}
}

// hold holds the newest commit for a follower. It returns ErrSoon while commits are copied only
// until apply is known to be calm: a commit held now would need a second copy beside the next one.
func (s *State) hold(layout string) (*transfer.Commit, error) {
	if s.waitsForCalm() {
		return nil, transfer.ErrSoon
	}
	m := s.saved.Hold()
	if m == nil {
		return nil, nil
	}
	c := &transfer.Commit{Number: m.Number(), Layout: layout, Blobs: s.parts.memoryIn(m.Blobs()), Release: m.Release}
	c.Carried = make([][]byte, len(s.parts.of))
	for i, of := range s.parts.of {
		if !of.carried() {
			continue
		}
		for j := range of.blobs() {
			c.Carried[i] = append(c.Carried[i], s.parts.piece(m, i, j).Bytes()...)
		}
	}
	var err error
	if c.Steps, err = s.steps.appliedIn(c.Carried[s.stepsAt()]); err != nil {
		c.Release()
		return nil, err
	}
	return c, nil
}

// stepsAt returns the index of the Steps among the parts.
func (s *State) stepsAt() int {
	for i, p := range s.parts.all {
		if p == Part(s.steps) {
			return i
		}
	}
	return -1
}

// sample returns the checksums of some chunks of a commit.
func (s *State) sample(commit uint64) (sums []transfer.Sum) {
	number, blobs := s.saved.Lend()
	if blobs == nil || number != commit {
		return nil
	}
	pieces := s.parts.memoryIn(blobs)
	count := 0
	for _, p := range pieces {
		count += p.Chunks()
	}
	for i := range min(samples, count) {
		chunk := int((commit*samples + uint64(i)) * sampleStep % uint64(count))
		p, at := chunkOf(pieces, chunk)
		if sum, ok := p.TrySum(at); ok {
			sums = append(sums, transfer.Sum{Chunk: uint32(chunk), Sum: sum})
		}
	}
	return sums
}

// chunkOf returns the blob that has the given chunk of all blobs, and the index of the chunk in
// that blob; nil: there are fewer chunks.
func chunkOf(all []*snapshot.Blob, chunk int) (*snapshot.Blob, int) {
	for _, b := range all {
		if chunk < b.Chunks() {
			return b, chunk
		}
		chunk -= b.Chunks()
	}
	return nil, 0
}

// resembles reports whether chunks of the last save have these checksums. It returns true if the
// live state is not saved.
func (s *State) resembles(sums []transfer.Sum) bool {
	if !s.saved.clean {
		return true
	}
	pieces := s.parts.memoryIn(s.saved.Last().Blobs())
	for _, want := range sums {
		if p, at := chunkOf(pieces, int(want.Chunk)); p == nil || p.Sum(at) != want.Sum {
			return false
		}
	}
	return true
}
