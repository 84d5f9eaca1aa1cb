package elastic

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/elastic/image"
	"github.com/hvdrun/hvdrun/notify"
	"github.com/hvdrun/hvdrun/plan"
	"github.com/hvdrun/hvdrun/rendezvous"
)

// HostsUpdatedError says that the hosts of the job have changed and a new world is due. All ranks
// get it from the same Commit or CheckHostUpdates. The training function returns it as it is, or
// wrapped.
type HostsUpdatedError struct{ Change plan.Change }

// Error names the change.
func (e *HostsUpdatedError) Error() string { return "elastic: hosts updated: " + e.Change.String() }

// State is what training carries from step to step and from world to world: parts that are
// committed, rolled back and synchronised together. One goroutine at a time uses it.
type State struct {
	worker *Worker
	parts  []Part
	own    []own  // own[i] is parts[i], or nil where that is foreign
	kept   []kept // kept[i] is parts[i], or nil where that is in no image
	err    error  // why the state cannot be used

	saidLeftOut bool // which parts have no image
	supplies    bool // others may fetch its commits

	onReset []func() error
	ctx     context.Context // of the Run under way: Commit has none of its own
	commits uint64
	agreed  bool // all ranks have made the last commit
	holds   bool // has been through a sync, so it can be another's root
	word    [4]uint64

	mark     imageID            // of what is saved
	given    imageID            // the last that was given
	clean    bool               // the live value is what is saved; Run alone says so, and a Sync ends it
	promised *HostsUpdatedError // of a Commit after which nothing is to be changed
	synced   [][][]bool         // of each part in memory and its pieces: the chunks that a sync has written to; nil: not known

	audit    *audit // of the last sync, until the ranks have compared what it came to
	auditing sync.WaitGroup

	saved       image.Store // of the parts that are kept
	sources     []image.Source
	first       []int        // of each part that is kept: its first piece in an image
	checkpoints *Checkpoints // nil: none

	locals locals

	copying *image.Pending // begun by a commit and not settled yet; nil otherwise
	lost    error          // why the save that was settled last is none; nobody has been told yet
	torn    bool           // parts of other packages may have kept something newer than the last save

	heeding *heed // of the Run under way; nil: none

	watch *watch // of the memory of parts that are Watched; nil: none
	blind bool   // there is to be none
}

// NewState returns the state of w that consists of parts, and starts nothing. A nil worker, a nil
// part and two parts of one name are errors of whatever is done with the state: of Run, Sync,
// Commit and the rest.
//
// A part of another package should keep its last save when its Save fails; the State can make its
// saves atomic only for the parts of this package and those that are [Imaged].
func NewState(w *Worker, parts ...Part) *State {
	s := &State{worker: w, ctx: context.Background()}
	for _, p := range parts {
		if c, ok := p.(*Checkpoints); ok && c != nil {
			s.checkpoints = c
		} else {
			s.parts = append(s.parts, p)
		}
	}
	s.own, s.kept, s.first = make([]own, len(s.parts)), make([]kept, len(s.parts)), make([]int, len(s.parts))
	if w == nil {
		s.err = errors.New("elastic: the state's worker is nil")
		return s
	}
	names := make(map[string]bool)
	for i, p := range s.parts {
		if p == nil {
			s.err = fmt.Errorf("elastic: part %d of the state is nil", i)
			return s
		}
		o := asOwn(p)
		if s.own[i] = o; o == nil {
			if f, ok := p.(Imaged); ok {
				s.kept[i] = foreign{f}
			}
			continue
		}
		s.kept[i] = o
		if l, ok := o.(localPart); ok {
			s.locals.parts = append(s.locals.parts, l)
		}
		if name := o.name(); name != "" && names[name] {
			s.err = fmt.Errorf("elastic: two parts of the state are named %q", name)
		} else {
			names[name] = true
		}
	}
	if s.err == nil && s.checkpoints != nil {
		s.err = s.checkDurable()
	}
	s.locals.replicas = w.replicas
	s.placeParts(w.Rank(), w.Size())
	return s
}

// OnReset adds a function that every reset calls, in the new world and before its sync, after those
// added before. What it changes of the state is overwritten by the sync on every rank but the root.
// An error that is collective.ErrAborted leads to another reset; any other ends Run.
func (s *State) OnReset(f func() error) { s.onReset = append(s.onReset, f) }

// Commits is the number of the last commit; 0 before the first. A sync makes it the root's.
func (s *State) Commits() uint64 { return s.commits }

// Commit saves the state, so that a failure costs only what was done since, and then does
// CheckHostUpdates. When it returns, everything has been copied, and the state may be changed
// again: of tensors only what differs from the last commit, with all processors where that is much.
// It is collective: every rank calls it equally often. The training function returns its errors as
// they are, and writes to no tensor in between: see [Run]. What a [Deferred] part has begun goes on
// in the background.
func (s *State) Commit() error {
	if err := s.replicate(); err != nil {
		return err
	}
	p, err := s.beginCommit()
	if err != nil {
		return err
	}
	p.Copy()
	if p.Comes() {
		s.copying = p
	} else {
		s.seal(p)
	}
	return s.agree()
}

// CommitAsync is Commit for large states: tensors are copied while training goes on, by half of the
// processors, and must not be written to until Settle has returned. A loop calls it after the
// optimizer's step and Settle before the next, with the forward and the backward pass, which only
// read them, in between. All other parts have been saved when it returns: counters may go on. A
// failure before Settle goes back to this commit, not to the one before. Every method of the state
// that saves, restores or synchronises settles first, so a forgotten Settle is an error only if a
// tensor is written to.
func (s *State) CommitAsync() error {
	if err := s.replicate(); err != nil {
		return err
	}
	p, err := s.beginCommit()
	if err != nil {
		return err
	}
	p.Start()
	s.copying = p
	return s.agree()
}

// Settle blocks until what CommitAsync has begun is done: the tensors may be written to again. It
// is not collective, and returns at once where nothing is under way.
//
// Where the save of a [Deferred] part has failed there is no such commit. Of that, whichever method
// saves, restores, compares or synchronises next returns the error.
func (s *State) Settle() {
	p := s.copying
	if p == nil {
		return
	}
	s.copying = nil
	if err := p.Wait(); err != nil {
		s.lost, s.mark = fmt.Errorf("elastic: commit %d: %w", s.commits, err), imageID{}
		return
	}
	s.seal(p)
	if s.agreed {
		s.offer()
	}
}

// seal makes a save the last one.
func (s *State) seal(p *image.Pending) {
	p.Seal()
	s.torn = false
	s.keepWatch()
}

// settled settles, and returns why the last save is none, once.
func (s *State) settled() error {
	s.Settle()
	err := s.lost
	s.lost = nil
	return err
}

// agree counts a commit and checks for updates. Where the ranks' states are to be compared it does
// that too.
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
	// Only now has every rank come this far: the driver takes it for a step that the whole world
	// has done.
	s.worker.committed(s.commits)
	s.agreed = true
	if err := s.gather(s.ctx, s.locals.wanted || s.worker.deserted && s.checkpoints != nil); err != nil {
		return err
	}
	if s.worker.deserted {
		return updated(plan.Removed)
	}
	s.offer()
	err = s.leave(change, false)
	s.promised, _ = err.(*HostsUpdatedError)
	return err
}

// CheckHostUpdates returns a *HostsUpdatedError, on every rank in the same call, where the hosts of
// the job have changed. It is collective, one reduction of eight bytes. Other errors are those of
// the collective.
func (s *State) CheckHostUpdates() error {
	if s.err != nil {
		return s.err
	}
	s.promised = nil
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

// agreeOnUpdates returns how the hosts differ from this world; all ranks get the same. In a commit
// after which an audit is due it carries that too.
func (s *State) agreeOnUpdates(commit bool) (plan.Change, error) {
	p := s.worker.place.Load()
	// The largest number wins, so whichever rank has heard of a change, all of them act on it, and
	// on the same one.
	latest := s.worker.meeting.latest()
	if latest.Seq <= p.world.Seq { // ranks that know of no change say the same, but for staysBit
		latest = notify.Update{Seq: p.world.Seq}
	}
	s.word[0] = (latest.Seq<<changeBits | uint64(latest.Change)&changeMask) << 1
	if !commit || !s.heeding.alone() {
		s.word[0] |= staysBit
	}
	word := s.word[:1]
	if commit && s.audit != nil {
		word = s.word[:]
		s.audit.say(word[1:])
	}
	if err := collective.AllReduce(s.ctx, p.group, word, collective.Max); err != nil {
		return 0, err
	}
	agreed := s.word[0] >> 1
	if agreed>>changeBits <= p.world.Seq { // this world takes account of it
		if s.worker.deserted = s.word[0]&staysBit == 0; commit && !s.worker.deserted {
			s.heeding.committed()
		}
		return 0, nil
	}
	return plan.Change(agreed & changeMask), nil
}

const (
	changeBits = 2
	changeMask = 1<<changeBits - 1
	// staysBit is said by a rank that has not been asked to leave, or whose driver is there.
	staysBit = 1
)

// Save keeps a private copy of every part for Restore; it does not count as a commit. Where it
// fails the last copies of this package's parts stay, all of them. It is not collective. What Local
// parts hold is kept by others only of commits and syncs: who goes back to a Save of its own, as a
// root too, has all ranks go on with what they hold themselves.
func (s *State) Save() error {
	s.locals.astray()
	return s.save(s.commits)
}

// save saves the state as that of the commit of the number.
func (s *State) save(number uint64) error {
	p, err := s.begin(number)
	if err != nil {
		return err
	}
	s.mark = imageID{}
	p.Copy()
	if err := p.Wait(); err != nil {
		return fmt.Errorf("elastic: save: %w", err)
	}
	s.seal(p)
	return nil
}

// beginCommit begins to save the next commit.
func (s *State) beginCommit() (*image.Pending, error) {
	s.promised = nil
	mark := s.nextMark()
	s.beginWatch()
	p, err := s.begin(s.commits + 1)
	if err == nil {
		s.mark = mark
	}
	return p, err
}

// begin does all of a save that can fail; what is left is to copy tensors.
func (s *State) begin(number uint64) (*image.Pending, error) {
	if s.err != nil {
		return nil, s.err
	}
	defer s.worker.doing.enter(s.worker.doing.phase())
	s.worker.commit = number
	s.worker.doing.enter(rendezvous.Saving)
	err := s.settled()
	if err != nil {
		return nil, err
	}
	s.sources = s.sources[:0]
	for i, o := range s.own {
		if o == nil {
			continue
		}
		s.place(i)
		if s.sources, err = o.sources(s.sources); err != nil {
			return nil, err
		}
		if s.synced != nil {
			for j, changed := range s.synced[i] {
				s.sources[s.first[i]+j].Changed = changed
			}
		}
	}
	for i, p := range s.parts {
		if s.own[i] != nil {
			continue
		}
		s.torn = true
		if err := p.Save(); err != nil {
			return nil, fmt.Errorf("elastic: save part %d (%T): %w", i, p, err)
		}
		if s.kept[i] == nil {
			continue
		}
		s.place(i)
		if s.sources, err = s.kept[i].sources(s.sources); err != nil {
			return nil, fmt.Errorf("elastic: image of part %d (%T): %w", i, p, err)
		}
	}
	if err := s.askWatch(s.worker.verification.due(number)); err != nil {
		return nil, err
	}
	return s.saved.Begin(number, s.sources), nil
}

// place notes where part i begins in images. It is always the same, and a checkpoint that is being
// written reads it.
func (s *State) place(i int) {
	if s.first[i] != len(s.sources) {
		s.first[i] = len(s.sources)
	}
}

// Restore takes every part back to the last Save, Commit or Sync. Run saves when it begins. It is
// not collective. Where what a commit has left to the background has failed, it takes them back to
// the one before, and returns that error.
func (s *State) Restore() error {
	return s.restore(func(Part) bool { return true })
}

// restoreExposed is Restore of what others may have written to since.
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
	errs := []error{s.settled()}
	var pieces []image.Piece
	if last := s.saved.Last(); last != nil {
		pieces = last.Pieces()
	}
	for i, p := range s.parts {
		if !which(p) {
			continue
		}
		var err error
		switch o := s.own[i]; {
		case o == nil && s.torn && s.kept[i] != nil && pieces != nil:
			err = s.kept[i].restore(pieces[s.first[i]:])
		case o == nil:
			err = p.Restore()
		case pieces == nil:
			err = errNothingSaved
		default:
			err = o.restore(pieces[s.first[i]:])
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("elastic: restore part %d: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

// partName names a part to people.
func (s *State) partName(i int) string {
	if o := s.own[i]; o != nil && o.name() != "" {
		return fmt.Sprintf("%q", o.name())
	}
	return fmt.Sprintf("part %d (%T)", i, s.parts[i])
}

// placeParts tells the parts that depend on it this worker's rank.
func (s *State) placeParts(rank, size int) {
	if size == 0 {
		return // no world yet
	}
	for _, o := range s.own {
		if p, ok := o.(placed); ok {
			p.place(rank, size)
		}
	}
}
