package driver

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/rendezvous"
)

const (
	// silentLooks is how many looks a worker of a small world may be silent; it beats in each
	// fourth. It is counted in looks: where the driver itself has stood still, nobody was silent.
	silentLooks = 10
	leastMove   = time.Second
)

// stalls finds the workers that hold up the others, from what all of them say of themselves: rank r
// holds up its world where others have waited for long in an operation that r has not entered, and
// r either says that it does something else or says nothing any more. What changes about that comes
// out as events for the machine. Its methods may be called by several goroutines.
type stalls struct {
	warning, limit time.Duration // 0: never
	grace          time.Duration // of workers that are to end

	mu      sync.Mutex
	workers map[string]*beating // that are known to the loop, by incarnation
	world   []*seat             // the current one, by rank
	number  uint64              // its generation
	before  int                 // size of the world before it, to whose spacing workers keep that connect
	jam     jam                 // of that world

	// late is who is waited for in the next world, and when they were named, or seen on their way.
	late map[string]time.Time
}

// beating is a worker and what it has said last.
type beating struct {
	beat  rendezvous.Beat // the zero Beat: nothing yet
	at    time.Time
	looks int // since then

	written   uint64    // beat.Written, at its most
	writtenAt time.Time // when that was last told to the machine
}

// seat is a member of the current world.
type seat struct {
	id    string
	held  *hold // what it was told to hold up; nil: nothing
	ended bool  // it was told to hang
}

// hold is what a worker holds up: an operation that others are in.
type hold struct {
	lane, operation uint64
	what            string
	waiting         []int // ranks
	long            time.Duration
}

// jam is what was told of a world in which all ranks wait for nobody.
type jam uint8

const (
	jamNone jam = iota
	jamNamed
	jamEnded // the world is to be given up
)

func newStalls(t Timeouts) *stalls {
	return &stalls{
		warning: max(0, t.StallWarning), limit: max(0, t.Stall), grace: t.Drain, workers: map[string]*beating{},
	}
}

// pause is that between two looks.
func (s *stalls) pause() time.Duration {
	pause := 250 * time.Millisecond
	if s.warning > 0 {
		pause = min(pause, s.warning/8) // workers beat twice in the time of a warning
	}
	return max(pause, 5*time.Millisecond)
}

// expect begins to listen to a worker, forget ends it.
func (s *stalls) expect(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.workers[id] == nil {
		s.workers[id] = &beating{}
	}
}

func (s *stalls) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.workers, id)
}

// hear takes note of a beat. It tells whether the machine is to hear that the worker has written
// more of its last checkpoint: a few times in each grace.
func (s *stalls) hear(now time.Time, id string, b rendezvous.Beat) (writes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[id]
	if w == nil {
		return false
	}
	w.beat, w.at, w.looks = b, now, 0
	if b.Written <= w.written || now.Before(w.writtenAt.Add(s.grace/4)) {
		return false
	}
	w.written, w.writtenAt = b.Written, now
	return true
}

// enter makes a world current, whose members are told by rank.
func (s *stalls) enter(generation uint64, members []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if generation == s.number {
		return
	}
	s.number, s.jam, s.late = generation, jamNone, nil
	s.before = len(s.world)
	s.world = make([]*seat, len(members))
	for r, id := range members {
		s.world[r] = &seat{id: id}
		if b := s.workers[id]; b != nil {
			b.looks = 0 // it has joined: that is a sign of life too
		}
	}
}

// look is called once in each pause, and returns what has changed.
func (s *stalls) look(now time.Time) (changes []decide.Input) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		w.looks++
	}
	changes = s.moves(now)
	if s.warning == 0 && s.limit == 0 {
		return changes
	}
	holds := s.holds()
	for r, seat := range s.world {
		switch h := holds[r]; {
		case seat.ended:
		case h != nil && s.limit > 0 && h.long >= s.limit:
			seat.ended = true
			changes = append(changes, decide.WorkerHung{ID: seat.id, Generation: s.number, What: s.accuse(now, seat, h)})
		case h != nil && seat.held == nil && s.warning > 0:
			changes = append(changes, decide.WorkerStalled{
				ID: seat.id, Generation: s.number, What: s.accuse(now, seat, h) + s.threat(h),
			})
			seat.held = h
		case h == nil && seat.held != nil && s.through(seat):
			changes = append(changes, decide.WorkerStirred{ID: seat.id, Generation: s.number})
			seat.held = nil
		}
	}
	if len(holds) == 0 {
		changes = append(changes, s.jammed()...)
	}
	return changes
}

// await has look find when workers move that have been named for not coming to the next world.
func (s *stalls) await(now time.Time, late []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.late = map[string]time.Time{}
	for _, id := range late {
		s.late[id] = now
	}
}

// moves finds who of them has connected to another worker meanwhile, or has begun to join: each
// once in leastMove at most.
func (s *stalls) moves(now time.Time) (changes []decide.Input) {
	for id, seen := range s.late {
		w := s.workers[id]
		if w == nil || w.beat.Generation != s.number || w.beat.Phase != rendezvous.Connecting && w.beat.Phase != rendezvous.Joins {
			continue
		}
		if at := w.at.Add(-w.beat.Quiet); at.Sub(seen) >= leastMove {
			s.late[id] = at
			changes = append(changes, decide.WorkerMoved{ID: id, Generation: s.number, Ago: now.Sub(at)})
		}
	}
	return changes
}

// patience is the shorter of the warning and the limit.
func (s *stalls) patience() time.Duration {
	if s.warning == 0 || s.limit > 0 && s.limit < s.warning {
		return s.limit
	}
	return s.warning
}

// fresh returns what the member says of the current world, if it says something.
func (s *stalls) fresh(seat *seat) *rendezvous.Beat {
	w := s.workers[seat.id]
	if w == nil || s.silent(w) || w.beat.Phase == 0 || w.beat.Generation != s.number {
		return nil
	}
	return &w.beat
}

// silent tells whether a worker has said nothing for longer than it should.
func (s *stalls) silent(w *beating) bool {
	return w.looks > silentLooks*rendezvous.BeatSpacing(max(len(s.world), s.before))
}

// holds finds who holds up an operation, and which, by rank.
func (s *stalls) holds() map[int]*hold {
	waits := s.waits()
	if len(waits) == 0 {
		return nil
	}
	found := map[int]*hold{}
	for _, wait := range waits {
		var behind, silent []int
		for r, seat := range s.world {
			switch s.place(seat, wait) {
			case isBehind:
				behind = append(behind, r)
			case isSilent:
				silent = append(silent, r)
			}
		}
		if len(behind) == 0 {
			behind = silent // it may have been stopped within the operation
		}
		for _, r := range behind {
			if found[r] == nil || found[r].long < wait.long {
				found[r] = wait
			}
		}
	}
	return found
}

// waits are the operations that somebody has been in for too long, one of a lane: the last.
func (s *stalls) waits() map[uint64]*hold {
	patience := s.patience()
	waits := map[uint64]*hold{}
	for r, seat := range s.world {
		b := s.fresh(seat)
		if b == nil {
			continue
		}
		for i := range b.Lanes {
			l := &b.Lanes[i]
			if !l.Waiting || l.For < patience {
				continue
			}
			h := waits[l.ID]
			if h == nil || h.operation < l.Operation {
				h = &hold{lane: l.ID, operation: l.Operation, what: l.What}
				waits[l.ID] = h
			}
			if h.operation == l.Operation {
				h.waiting, h.long = append(h.waiting, r), max(h.long, l.For)
			}
		}
	}
	return waits
}

type standing uint8

const (
	isThere  standing = iota // it waits itself, or has no part in it
	isBehind                 // it has not come to the operation, and does not wait for others either
	isSilent                 // it is not known to be behind, but says nothing of this world any more
)

// place tells how a member stands to an operation.
func (s *stalls) place(seat *seat, wait *hold) standing {
	w := s.workers[seat.id]
	if w == nil {
		return isThere // its end is on its way to the machine
	}
	if w.beat.Phase == 0 && !s.silent(w) {
		return isThere // a driver that took over has not heard it yet
	}
	lane := w.lane(wait.lane, s.number)
	came := lane != nil && lane.Operation >= wait.operation
	b := s.fresh(seat)
	switch {
	case b == nil && (came || lane == nil && wait.lane != 0):
		return isSilent
	case b == nil:
		return isBehind
	case lane == nil && wait.lane != 0: // of groups of its own a member tells as long as it is in them
		return isThere
	case !came && !waitsItself(b, s.patience()):
		return isBehind
	}
	return isThere
}

// lane returns what the worker has said last of a lane of the generation.
func (w *beating) lane(id, generation uint64) *rendezvous.Lane {
	if w.beat.Generation != generation {
		return nil
	}
	for i := range w.beat.Lanes {
		if w.beat.Lanes[i].ID == id {
			return &w.beat.Lanes[i]
		}
	}
	return nil
}

// waitsItself: whoever has waited for a while has others to wait for, and they are the ones who are
// to be found.
func waitsItself(b *rendezvous.Beat, patience time.Duration) bool {
	return slices.ContainsFunc(b.Lanes, func(l rendezvous.Lane) bool {
		return l.Waiting && l.For >= min(time.Second, patience/2)
	})
}

// through tells whether the member has come to the operation that it held up, or waits for others
// now.
func (s *stalls) through(seat *seat) bool {
	b := s.fresh(seat)
	if b == nil {
		return false
	}
	lane := s.workers[seat.id].lane(seat.held.lane, s.number)
	return lane == nil || lane.Operation >= seat.held.operation || waitsItself(b, s.patience())
}

// accuse says what a member does in place of the operation that the others are in.
func (s *stalls) accuse(now time.Time, seat *seat, h *hold) string {
	verb := "wait"
	if len(h.waiting) == 1 {
		verb = "waits"
	}
	return fmt.Sprintf("%s; %s %s for it in %s for %v", s.does(now, seat.id), ranks(h.waiting), verb, named(h), decide.Round(h.long))
}

// threat says when the member will be stopped.
func (s *stalls) threat(h *hold) string {
	if s.limit == 0 {
		return ""
	}
	return fmt.Sprintf("; it will be stopped in %v (--stall-timeout)", decide.Round(s.limit-h.long))
}

// What tells what a worker does, as far as is known; empty: nothing is.
func (s *stalls) What(now time.Time, id string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.workers[id]; w == nil || w.beat.Phase == 0 {
		return ""
	}
	return s.does(now, id)
}

// Commits returns the number of the worker's last commit in that generation, as far as it has told;
// 0: it has not.
func (s *stalls) Commits(id string, generation uint64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.workers[id]; w != nil && w.beat.Generation == generation {
		return w.beat.Commits
	}
	return 0
}

func (s *stalls) does(now time.Time, id string) string {
	w := s.workers[id]
	if w == nil || w.beat.Phase == 0 {
		return "silent from the start"
	}
	doing, quiet := w.beat.Phase.String(), w.beat.Quiet
	last := w.lane(0, w.beat.Generation)
	in := longestWait(&w.beat)
	switch {
	case w.beat.Phase == rendezvous.Connecting:
	case in != nil:
		doing, quiet = fmt.Sprintf("%s, in %s", doing, operation(in.What, in.ID, in.Operation)), in.For
	case last != nil && last.Operation > 0:
		doing = fmt.Sprintf("%s, after %s", doing, operation(last.What, 0, last.Operation))
	}
	ago := now.Sub(w.at)
	if s.silent(w) {
		return fmt.Sprintf("silent for %v, was %s", decide.Round(ago), doing)
	}
	if quiet += ago; quiet >= time.Second {
		return fmt.Sprintf("%s for %v", doing, decide.Round(quiet))
	}
	return doing
}

func named(h *hold) string { return operation(h.what, h.lane, h.operation) }

// operation names one: those of the group of all ranks by their numbers too, and not the
// connecting, which is none.
func operation(what string, lane, number uint64) string {
	switch {
	case lane == 0 && number > 0:
		return fmt.Sprintf("%s (operation %d)", what, number)
	case lane == 0:
		return what
	}
	return fmt.Sprintf("%s of a group of its own", what)
}

// ranks names them: "rank 3", "ranks 0 1 2", "ranks 0 1 2 3 4 5 6 7 and 992 more".
func ranks(all []int) string {
	if len(all) == 1 {
		return fmt.Sprintf("rank %d", all[0])
	}
	var b strings.Builder
	b.WriteString("ranks")
	for _, r := range all[:min(len(all), decide.MostNamed)] {
		fmt.Fprintf(&b, " %d", r)
	}
	if more := len(all) - decide.MostNamed; more > 0 {
		fmt.Fprintf(&b, " and %d more", more)
	}
	return b.String()
}
