package elastic

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/internal/snapshot"
	"github.com/hvdrun/hvdrun/elastic/internal/transfer"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
)

// HostsUpdatedError means that the hosts of the job have changed and a new world follows. All ranks
// get it from the same Commit or CheckHostUpdates. The training function must return it unchanged
// or wrapped.
type HostsUpdatedError struct{ Change plan.Change }

// Error returns a message that names the change.
func (e *HostsUpdatedError) Error() string { return "elastic: hosts updated: " + e.Change.String() }

// State holds what training carries from step to step and from world to world, as parts that are
// committed, restored and synchronised together. A State must be used by one goroutine at a time.
type State struct {
	worker *Worker
	parts  parts
	err    error // why the state is unusable; nil: usable

	steps   stepper // nil: none
	onReset []func() error
	training
	position

	saved         saves
	inPlace       inPlace
	locals        locals
	watch         *watch
	audits        audits
	checkpoints   *Checkpoints // nil: none
	loggedLeftOut bool         // the parts without an image have been logged
}

// training holds what belongs to the current Run, if there is one.
type training struct {
	ctx     context.Context // Commit has no ctx argument
	loops   counting
	run     *runner
	catchUp *catchUp       // the catch-up while the worker is in no world; nil otherwise
	feed    *transfer.Feed // nil: nobody can follow this worker
	term    *termHandler
}

// position is where this rank is among the commits of the job.
type position struct {
	commits uint64
	agreed  bool // all ranks have made the last commit
	holds   bool // this rank has been synchronised and can be the sync root
	// followed reports whether, at the last commit, workers followed a member: this one or another.
	followed bool
	word     [4]uint64 // the message of a commit's agreement, reused to avoid an allocation
}

// snapshotID identifies a save that all ranks of a world have made in one commit or sync. The zero
// value stands for a save of one rank alone. Saves with the same ID are equal if training is
// deterministic across ranks; comparisons verify that.
type snapshotID struct{ Generation, Count uint64 }

// saves contains the snapshots of a State and metadata of the last one.
type saves struct {
	snapshot.Store
	sources []snapshot.Source // sources of the last save begun, one for each blob of the parts; nil before the first

	copying *snapshot.Pending // started by a commit and not settled yet; nil: none
	lost    error             // why the last settled save failed, until a method has returned it
	torn    bool              // foreign parts may have saved a newer value than the last snapshot has

	mark     snapshotID         // ID of the last save
	given    snapshotID         // the last ID assigned
	clean    bool               // the live value equals the last save; set by Run, cleared by Sync
	promised *HostsUpdatedError // error of a Commit after which tensors must not change
	synced   [][][]bool         // by part in memory and slice: the chunks to which a sync has written; nil: unknown
}

// nextMark returns the ID of the next save in a world. Failed saves count too, because all ranks
// call Commit and Sync equally often.
func (m *saves) nextMark(generation uint64) snapshotID {
	if m.given.Generation != generation {
		m.given = snapshotID{Generation: generation}
	}
	m.given.Count++
	return m.given
}

// NewState returns a State of w with the given parts. It does not block and starts no goroutine. A
// nil worker, a nil part or two parts of the same name make Run, Sync, Commit and all other methods
// that return an error fail.
//
// A part of another package should keep its last save when its Save fails: a State saves atomically
// only the parts of this package and those that are [Imaged].
func NewState(w *Worker, all ...Part) *State {
	s := &State{worker: w, training: training{ctx: context.Background()}}
	held := make([]Part, 0, len(all))
	for _, p := range all {
		if c, ok := p.(*Checkpoints); ok && c != nil {
			s.checkpoints = c
		} else {
			held = append(held, p)
		}
	}
	if w == nil {
		s.err = errors.New("elastic: the state's worker is nil")
		return s
	}
	s.parts, s.err = newParts(held)
	if s.err != nil {
		return s
	}
	for _, p := range held {
		if steps, ok := p.(stepper); ok {
			if s.steps != nil {
				s.err = errors.New("elastic: a state has at most one Steps")
				return s
			}
			if s.err = steps.bind(s); s.err != nil {
				return s
			}
			s.steps = steps
		}
	}
	if s.checkpoints != nil {
		if names := s.parts.withoutImage(); len(names) > 0 {
			s.err = fmt.Errorf("elastic: %s cannot be in a checkpoint: it is not elastic.Imaged", names[0])
		}
	}
	s.locals = locals{worker: w, parts: s.parts.local(), replicas: w.replicas, soon: s.checkpoints.soon}
	s.watch = &watch{worker: w, parts: &s.parts}
	s.parts.setRank(w.Rank(), w.Size())
	return s
}

// OnReset adds a function that every reset calls after entering the new world and before the sync,
// in the order in which the functions were added. The sync overwrites its changes to the state on
// every rank but the root. An error that is collective.ErrAborted causes another reset; any other
// error ends Run.
func (s *State) OnReset(f func() error) { s.onReset = append(s.onReset, f) }

// Commits returns the number of the last commit, 0 before the first. A sync sets it to the root's.
func (s *State) Commits() uint64 { return s.commits }

var errNoParts = errors.New("elastic: Commit of a state without parts, which saves nothing: give NewState what must survive, or call CheckHostUpdates")

// Commit saves the state, so that a failure costs only later work, and then does CheckHostUpdates.
// When it returns, everything has been copied, and the state may be changed again. It copies only
// the parts of tensors that differ from the last commit, and uses all processors if these are
// large. It is collective: every rank calls it the same number of times. After an error, the
// training function must return it, and must not write to tensors before that: see [Run]. Saves
// that a [Deferred] part has begun continue in the background.
//
// It blocks until every rank has called it. The wait itself has no time limit, but the driver stops
// a rank for which the others wait longer than --stall-timeout. Call it from the goroutine that
// runs the training function.
//
// A commit has the values that the parts have when it is called. Count a step before the commit, as
// [State.Count] does: a loop that adds 1 afterwards repeats a step when the hosts change. Write to
// the tensors that the state was given: see [TensorVar]. Its errors:
//   - a *HostsUpdatedError if the hosts have changed, on all ranks at once: the commit counts;
//   - collective.ErrAborted if a rank was lost: the commit may count on some ranks only, and the
//     next world goes back to a commit that all members can have;
//   - a *DivergedError or an *UnseenWriteError if ranks were compared and differ;
//   - an error of a part's Save or encoding, or the reason why the state cannot be used
//     ([NewState]), such as that it has no parts: there is no new commit, and the previous one
//     stays.
//
// On a worker that is in no world yet ([Steps.Step]), Commit saves the state on this worker alone.
func (s *State) Commit() error { return s.commit(false) }

// CommitAsync is like Commit, for large states: it returns before tensors are copied. Half of the
// processors copy them while training continues, and the program must not write to tensors until
// Settle has returned. A loop calls CommitAsync after the optimizer's step and Settle before the
// next one; the forward and backward pass in between only read the tensors. All other parts have
// been saved when CommitAsync returns and may be changed. A failure before Settle restores this
// commit, not the previous one. Every method of the State that saves, restores or synchronises
// calls Settle first, so a forgotten Settle is an error only if the program writes to a tensor.
func (s *State) CommitAsync() error { return s.commit(true) }

func (s *State) commit(async bool) error {
	s.count()
	if s.catchingUp() {
		return s.saveReplayed()
	}
	if s.err == nil && len(s.parts.all) == 0 {
		return errNoParts
	}
	if err := s.replicate(); err != nil {
		return err
	}
	begun := time.Now()
	p, err := s.beginCommit()
	if err != nil {
		return err
	}
	bytes := p.Bytes()
	defer func() { s.noteCommit(begun, bytes) }()
	if async {
		p.Start()
	} else {
		p.Copy()
	}
	if async || p.HasLater() {
		s.saved.copying = p
	} else {
		s.seal(p)
	}
	return s.agree()
}

// noteCommit counts a commit that began at the given time and that all ranks have made.
func (s *State) noteCommit(begun time.Time, bytes int) {
	if s.agreed {
		s.worker.doing.made.note(begun, bytes)
	}
}

// Settle blocks until the copy that CommitAsync started is complete; then the program may write to
// tensors again. It is not collective, and returns at once if no copy is in progress.
//
// If the save of a [Deferred] part has failed, the commit does not exist. The next method that
// saves, restores, compares or synchronises returns the error.
func (s *State) Settle() {
	if s.saved.copying == nil {
		return
	}
	p := s.saved.copying
	s.saved.copying = nil
	if err := p.Wait(); err != nil {
		s.saved.lost, s.saved.mark = fmt.Errorf("elastic: commit %d: %w", s.commits, err), snapshotID{}
		return
	}
	s.seal(p)
	if s.agreed {
		s.offer()
	}
}

// seal makes p the last save.
func (s *State) seal(p *snapshot.Pending) {
	p.Seal()
	s.saved.torn = false
	s.watch.keep()
	s.giveBack()
}

// settled calls Settle and returns why the last save failed, once.
func (s *State) settled() error {
	s.Settle()
	err := s.saved.lost
	s.saved.lost = nil
	return err
}

// agree counts a commit, checks for host updates and, when a verification is due, compares the
// states of the ranks.
func (s *State) agree() error {
	s.commits++
	s.agreed = false
	s.locals.counted()
	change, err := s.agreeOnUpdates(true)
	if err != nil {
		return err
	}
	s.locals.settled()
	if err := s.compareAudited(); err != nil {
		return err
	}
	if s.worker.verification.due(s.commits) {
		if err := s.settled(); err != nil {
			return err
		}
		if err := s.verify(s.ctx, -1); err != nil {
			return err
		}
	}
	// Every rank has reached this point, so the driver can count the step as done by the whole
	// world.
	s.worker.committed(s.commits)
	s.agreed = true
	if err := s.locals.gather(s.ctx, s.locals.wanted || s.worker.run.deserted && s.checkpoints != nil); err != nil {
		return err
	}
	if s.worker.run.deserted {
		return updated(plan.Removed)
	}
	s.offer()
	err = s.leave(change, false)
	s.saved.promised, _ = err.(*HostsUpdatedError)
	return err
}

// CheckHostUpdates returns a *HostsUpdatedError, on every rank in the same call, if the hosts of
// the job have changed. It is collective and blocks for one reduction of eight bytes. Its other
// errors are those of the reduction.
func (s *State) CheckHostUpdates() error {
	if s.err != nil || s.catchingUp() {
		return s.err
	}
	s.count()
	s.saved.promised = nil
	change, err := s.agreeOnUpdates(false)
	if err != nil {
		return err
	}
	return s.leave(change, true)
}

func updated(c plan.Change) error {
	if c == 0 {
		return nil
	}
	return &HostsUpdatedError{Change: c}
}

// agreeOnUpdates returns how the hosts differ from this world, the same on all ranks. In a commit
// during an audit, the reduction also carries the audit's words.
func (s *State) agreeOnUpdates(commit bool) (plan.Change, error) {
	p := s.worker.member.Load()
	// The reduction takes the maximum, so all ranks act on the same change if any rank knows of it.
	latest := s.worker.meeting.Latest()
	if latest.Seq <= p.world.Seq { // all ranks that know of no change send the same value, except for staysBit
		latest = notify.Update{Seq: p.world.Seq}
	}
	s.word[0] = (latest.Seq<<changeBits | uint64(latest.Change)&changeMask) << flagBits
	if !commit || !s.term.alone(s.ctx) {
		s.word[0] |= staysBit
	}
	if s.feed != nil && s.feed.Followed() {
		s.word[0] |= followedBit
	}
	word := s.word[:1]
	if commit && s.audits.due != nil {
		word = s.word[:]
		s.audits.due.fill(word[1:])
	}
	if err := collective.AllReduce(s.ctx, p.group, word, collective.Max); err != nil {
		return 0, explained(err)
	}
	s.followed = s.word[0]&followedBit != 0
	agreed := s.word[0] >> flagBits
	if agreed>>changeBits <= p.world.Seq { // this world already includes the change
		if s.worker.run.deserted = s.word[0]&staysBit == 0; commit && !s.worker.run.deserted {
			s.term.committed()
		}
		return 0, nil
	}
	return plan.Change(agreed & changeMask), nil
}

const (
	changeBits = 2
	changeMask = 1<<changeBits - 1
	flagBits   = 2
	// staysBit is set by a rank that was not asked to leave, or that is connected to its driver.
	staysBit = 2
	// followedBit is set by a rank that others follow. It can be lost if not all ranks have the
	// same staysBit.
	followedBit = 1
)

// replicate does steps 1 and 2 of a save in the current world. Without Local parts it does nothing.
func (s *State) replicate() error {
	if s.err != nil || len(s.locals.parts) == 0 {
		return s.err
	}
	return s.locals.replicateAfter(s.ctx, s.locals.set(s.locals.current))
}

// leave returns the error of a commit or a check that finds that the hosts change. Before the ranks
// separate, they send the pieces of the last save to ranks that lack them, because the members of
// the next world are not known yet.
func (s *State) leave(change plan.Change, live bool) error {
	l := &s.locals
	if change == 0 || len(l.parts) == 0 {
		return updated(change)
	}
	if live {
		if err := s.replicate(); err != nil {
			return err
		}
		if err := s.save(s.commits); err != nil {
			return err
		}
		l.counted()
	}
	p, set := s.worker.member.Load(), l.set(l.current)
	if set == nil {
		return updated(change)
	}
	sum := []uint64{0}
	for _, n := range set.own() {
		sum[0] += uint64(set.of[n].size())
	}
	mine := sum[0]
	if err := collective.AllReduce(s.ctx, p.group, sum, collective.Sum); err != nil {
		return err
	}
	l.settled()
	most := []uint64{mine}
	if sum[0] > handOverLimit {
		if err := collective.AllReduce(s.ctx, p.group, most, collective.Max); err != nil {
			return err
		}
	}
	count := holders(set.size, l.replicas, sum[0], most[0])
	if count < set.size-1 && set.mine == 0 {
		s.worker.log.Warnf("the local parts of all ranks have %d MB, so before the hosts change each rank's are copied to %d other ranks only", sum[0]>>20, count)
	}
	to := keepers(hostsOf(p.world.World), set.mine, count)
	if count > l.replicas {
		// Ranks that already keep copies receive nothing.
		to = to[min(l.replicas, len(to)):]
		if err := l.spread(s.ctx, p, set, to, base{number: func(int) int { return -1 }}); err != nil {
			return err
		}
		// A rank that leaves can abort the group, so all ranks wait until every rank has its
		// pieces.
		if err := collective.Barrier(s.ctx, p.group); err != nil {
			return err
		}
	}
	if s.checkpoints != nil && count < set.size-1 && change&plan.Removed != 0 {
		// If no rank stays, one rank must have all pieces to write the last checkpoint.
		if err := l.gather(s.ctx, true); err != nil {
			return err
		}
	}
	return updated(change)
}

// Save keeps a private copy of every part for Restore. It does not count as a commit and is not
// collective. If it fails, the last copies of all parts of this package stay. Other ranks keep
// copies of Local parts only for commits and syncs: after a rank has restored its own Save, also as
// the sync root, every rank continues with its own live Local parts. With Local parts, all ranks
// call Save at the same step, or none does: otherwise Local parts of different steps may meet.
func (s *State) Save() error {
	s.locals.unreplicated()
	return s.save(s.commits)
}

// save saves the state as commit number.
func (s *State) save(number uint64) error {
	return s.saveAs(number, false)
}

// saveAs is like save, but saves in place if inPlace is set.
func (s *State) saveAs(number uint64, inPlace bool) error {
	p, err := s.begin(number, inPlace)
	if err != nil {
		return err
	}
	s.saved.mark = snapshotID{}
	p.Copy()
	if err := p.Wait(); err != nil {
		return fmt.Errorf("elastic: save: %w", err)
	}
	s.seal(p)
	return nil
}

func (s *State) beginCommit() (*snapshot.Pending, error) {
	s.saved.promised = nil
	mark := s.saved.nextMark(s.worker.Generation())
	inPlace := s.savesInPlace() && s.steps.inStep()
	if s.err == nil && !inPlace && !s.inPlace.used {
		s.watch.begin()
	}
	p, err := s.begin(s.commits+1, inPlace)
	if err == nil {
		s.saved.mark = mark
	}
	return p, err
}

// begin does the part of a save that can fail. Only copying tensors remains.
func (s *State) begin(number uint64, inPlace bool) (_ *snapshot.Pending, err error) {
	if s.err != nil {
		return nil, s.err
	}
	defer func() {
		if err != nil {
			s.saved.Abandon()
		}
	}()
	if !s.catchingUp() { // in a catch-up the worker joins concurrently
		defer s.worker.doing.enter(s.worker.doing.phase())
		s.worker.run.commit = number
		s.worker.doing.enter(line.Saving)
	}
	if err := s.settled(); err != nil {
		return nil, err
	}
	m := &s.saved
	if m.sources == nil {
		m.sources = make([]snapshot.Source, s.parts.blobs)
	}
	if err := s.parts.sources(m.sources, true); err != nil {
		return nil, err
	}
	for i := range m.synced {
		for j, changed := range m.synced[i] {
			m.sources[s.parts.first[i]+j].Changed = changed
		}
	}
	m.torn = true
	if err := s.parts.sources(m.sources, false); err != nil {
		return nil, err
	}
	if s.laysOut(inPlace); inPlace {
		return m.Begin(number, m.sources), nil
	}
	if err := s.watch.mark(m.sources, m.Last(), s.worker.verification.due(number)); err != nil {
		return nil, err
	}
	return m.Begin(number, m.sources), nil
}

// Restore sets every part back to the last Save, Commit or Sync; Run saves when it begins. It is
// not collective. If the background part of a commit has failed, Restore goes back to the previous
// save and returns that error.
func (s *State) Restore() error {
	return s.restore(func(Part) bool { return true })
}

// restoreExposed restores the parts to which other ranks may have written since the last Restore.
func (s *State) restoreExposed() error {
	return s.restore(func(p Part) bool {
		e, ok := p.(Exposed)
		return ok && e.Exposed()
	})
}

func (s *State) restore(which func(Part) bool) error {
	if s.err != nil {
		return s.err
	}
	err := s.settled()
	last := s.saved.Last()
	return errors.Join(append(s.parts.restore(last, s.saved.torn, which, s.watch.since(last)), err)...)
}
