package driver

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/driver/decide"
	"github.com/hvdrun/hvdrun/internal/line"
	"github.com/hvdrun/hvdrun/internal/proc"
	"github.com/hvdrun/hvdrun/job"
)

const (
	// silentLooks is the number of looks for which a worker of a small world may be silent; it
	// sends a heartbeat every fourth look. Silence is counted in looks so that no worker is blamed
	// while the driver itself is suspended.
	silentLooks = 10
	leastMove   = time.Second
)

// stalls detects workers that hold up others, from the heartbeats of all: rank r holds up its world
// if others have waited long in an operation that r has not entered, and r either does something
// else or is silent. Changes are returned as inputs for the machine. Its methods are safe for
// concurrent use.
type stalls struct {
	warning, limit time.Duration // 0: never
	grace          time.Duration // of workers that are being stopped

	mu      sync.Mutex
	workers map[string]*beating // workers known to the loop, by incarnation
	beats   uint64              // number of heartbeats so far
	past    work                // work of workers that have ended
	world   []*member           // members of the current world, by rank
	number  uint64              // its generation
	before  int                 // size of the previous world, whose heartbeat interval connecting workers keep
	jam     jam                 // state of the current world
	trains  bool                // rank 0 of the current world trains, by its heartbeats

	// late holds the workers awaited in the next world, with the time when they were reported or
	// last made progress.
	late map[string]time.Time
	// stops holds the members that were reported, with the time when they will be stopped.
	stops map[string]time.Time
	doneWatch
	stragglers stragglers
}

// beating is a worker with its last heartbeat.
type beating struct {
	beat  line.Beat // the zero Beat: none yet
	at    time.Time
	looks int // number of looks since the last heartbeat

	used       *proc.Usage // from the last heartbeat that included it; nil: none has
	usedAt     time.Time
	processors float64 // processors busy between the last two of these heartbeats
	short      bool    // the worker was short of memory at the last look

	written   uint64    // largest beat.Written so far
	writtenAt time.Time // when the machine was last informed of it

	work      work
	lanes     map[uint64]laneFrom // lanes of the last heartbeat
	enteredAt time.Time           // when its world was published
	trial
}

// laneFrom is what the driver itself has seen of a lane: the earliest times at which the worker can
// have entered the operation, and begun to wait in it.
type laneFrom struct {
	operation    uint64
	at, waitFrom time.Time
}

// member is a member of the current world.
type member struct {
	id    string
	held  *holdUp // the hold-up that was reported; nil: none
	where string  // where the member is meanwhile; empty: unknown
	ended bool    // the member was reported as hung
}

// holdUp is an operation that a worker holds up.
type holdUp struct {
	lane, operation uint64
	what            string
	waiting         []int // ranks
	long            time.Duration
}

// jam is what has been reported about a world in which all ranks wait and none is missing.
type jam uint8

const (
	jamNone jam = iota
	jamNamed
	jamEnded // the world was reported as stuck
)

func newStalls(t job.Timeouts) *stalls {
	return &stalls{
		warning: max(0, t.StallWarning), limit: max(0, t.Stall), grace: t.Drain, workers: map[string]*beating{},
		stragglers: newStragglers(), stops: map[string]time.Time{},
	}
}

// pause returns the interval between two looks.
func (s *stalls) pause() time.Duration {
	pause := 250 * time.Millisecond
	if s.warning > 0 {
		pause = min(pause, s.warning/8) // workers send two heartbeats per warning time
	}
	return max(pause, 5*time.Millisecond)
}

// expect adds a worker; forget removes it.
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
	if w := s.workers[id]; w != nil {
		s.past.add(&w.work)
	}
	delete(s.workers, id)
	s.stragglers.forget(id)
}

// hear records a heartbeat. It reports whether the machine must be informed that the worker's last
// checkpoint has grown, which happens a few times per grace period.
func (s *stalls) hear(now time.Time, id string, b line.Beat) (writes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workers[id]
	if w == nil {
		return false
	}
	s.beats++
	w.work.hear(b.Counters)
	b.Counters = nil // w.work has the counters
	s.hearLanes(now, w, &b)
	if is := b.Usage; is != nil {
		if w.used != nil && now.After(w.usedAt) {
			w.processors = max(0, (is.Processor-w.used.Processor).Seconds()/now.Sub(w.usedAt).Seconds())
		}
		w.used, w.usedAt = is, now
	}
	w.beat, w.at, w.looks = b, now, 0
	s.hearTrained(now, w)
	if b.Generation == s.number {
		s.stragglers.hear(now, id, b.Waits)
	}
	if b.Written <= w.written || now.Before(w.writtenAt.Add(s.grace/4)) {
		return false
	}
	w.written, w.writtenAt = b.Written, now
	return true
}

// begins reports whether a heartbeat is the first that shows that rank 0 of the current world
// trains.
func (s *stalls) begins(id string, b line.Beat) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.trains || len(s.world) == 0 || s.world[0].id != id || b.Generation != s.number {
		return false
	}
	s.trains = b.Phase == line.Training || b.Phase == line.Saving
	return s.trains
}

// enter sets the current world. members are its incarnations by rank.
func (s *stalls) enter(now time.Time, generation uint64, members []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if generation == s.number {
		return
	}
	s.number, s.jam, s.late, s.trains = generation, jamNone, nil, false
	s.before = len(s.world)
	s.stragglers.enter(slices.Clone(members))
	clear(s.stops)
	s.world = make([]*member, len(members))
	for r, id := range members {
		s.world[r] = &member{id: id}
		if b := s.workers[id]; b != nil {
			b.looks = 0 // its join is a sign of life
			b.lanes, b.enteredAt = nil, now
		}
	}
}

// look evaluates the heartbeats and returns what has changed. It is called once per pause.
func (s *stalls) look(now time.Time) (changes []decide.Input) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.workers {
		w.looks++
	}
	changes = append(s.moves(now), s.refutals(now)...)
	if s.warning == 0 && s.limit == 0 {
		return changes
	}
	holds := s.holds(now)
	for r, member := range s.world {
		switch h := holds[r]; {
		case member.ended:
		case h != nil && s.limit > 0 && h.long >= s.limit:
			member.ended = true
			changes = append(changes, decide.WorkerHung{ID: member.id, Generation: s.number, What: s.accuse(now, member, h)})
		case h != nil && member.held == nil && s.warning > 0:
			changes = append(changes, decide.WorkerStalled{
				ID: member.id, Generation: s.number, What: s.accuse(now, member, h) + s.threat(h), Long: h.long,
			})
			member.held = h
			if s.limit > 0 {
				s.stops[member.id] = now.Add(s.limit - h.long)
			}
		case h == nil && member.held != nil && s.through(member):
			changes = append(changes, decide.WorkerStirred{ID: member.id, Generation: s.number})
			member.held, member.where = nil, ""
			delete(s.stops, member.id)
		}
	}
	if len(holds) == 0 {
		changes = append(changes, s.jammed()...)
	}
	return changes
}

// await sets the workers that have been reported for not joining the next world, so that look
// reports their progress.
func (s *stalls) await(now time.Time, late []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.late = map[string]time.Time{}
	for _, id := range late {
		s.late[id] = now
	}
}

// moves reports which awaited workers have connected to another worker or begun to join, each at
// most once per leastMove.
func (s *stalls) moves(now time.Time) (changes []decide.Input) {
	for id, seen := range s.late {
		w := s.workers[id]
		if w == nil || w.beat.Generation != s.number || w.beat.Phase != line.Connecting && w.beat.Phase != line.Joins {
			continue
		}
		if at := w.at.Add(-w.beat.Quiet); at.Sub(seen) >= leastMove {
			s.late[id] = at
			changes = append(changes, decide.WorkerMoved{ID: id, Generation: s.number, Ago: now.Sub(at)})
		}
	}
	return changes
}

// patience returns the shorter of the warning and the limit.
func (s *stalls) patience() time.Duration {
	if s.warning == 0 || s.limit > 0 && s.limit < s.warning {
		return s.limit
	}
	return s.warning
}

// fresh returns the member's last heartbeat if it is recent and from the current world; otherwise
// nil.
func (s *stalls) fresh(member *member) *line.Beat {
	w := s.workers[member.id]
	if w == nil || s.silent(w) || w.beat.Phase == 0 || w.beat.Generation != s.number {
		return nil
	}
	return &w.beat
}

// silent reports whether a worker's heartbeats are overdue.
func (s *stalls) silent(w *beating) bool {
	return w.looks > silentLooks*line.BeatSpacing(max(len(s.world), s.before))
}

// holds returns, by rank, the operation that each member holds up, and for how long. The duration
// is at most the time since the member last moved. A member that moves holds up nobody, whatever
// others report.
func (s *stalls) holds(now time.Time) map[int]*holdUp {
	waits := s.waits()
	if len(waits) == 0 {
		return nil
	}
	found := map[int]*holdUp{}
	for _, wait := range waits {
		var behind, silent []int
		for r, member := range s.world {
			switch s.standing(member, wait) {
			case isBehind:
				behind = append(behind, r)
			case isSilent:
				silent = append(silent, r)
			}
		}
		if len(behind) == 0 {
			behind = silent // a silent rank may have been suspended within the operation
		}
		for _, r := range behind {
			h := *wait
			if h.long = min(h.long, s.still(now, s.world[r], wait.lane)); h.long < s.patience() {
				continue
			}
			if found[r] == nil || found[r].long < h.long {
				found[r] = &h
			}
		}
	}
	return found
}

// waits returns, by lane, the last operation in which a rank has waited too long.
func (s *stalls) waits() map[uint64]*holdUp {
	patience := s.patience()
	waits := map[uint64]*holdUp{}
	for r, member := range s.world {
		b := s.fresh(member)
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
				h = &holdUp{lane: l.ID, operation: l.Operation, what: l.What}
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
	isThere  standing = iota // it waits too, or is not part of the operation
	isBehind                 // it has not entered the operation and waits for no other rank
	isSilent                 // it may have entered the operation, but its heartbeats are overdue
)

// standing returns a member's position relative to an operation.
func (s *stalls) standing(member *member, wait *holdUp) standing {
	w := s.workers[member.id]
	if w == nil {
		return isThere // the member has ended
	}
	if w.beat.Phase == 0 && !s.silent(w) {
		return isThere // no heartbeat yet since this driver took over
	}
	lane := w.lane(wait.lane, s.number)
	came := lane != nil && lane.Operation >= wait.operation
	b := s.fresh(member)
	switch {
	case b == nil && (came || lane == nil && wait.lane != 0):
		return isSilent
	case b == nil:
		return isBehind
	case lane == nil && wait.lane != 0: // a member reports other groups' lanes only while it is in them
		return isThere
	case !came && !waitsItself(b, s.patience()):
		return isBehind
	}
	return isThere
}

// lane returns the lane of the generation in the worker's last heartbeat, or nil.
func (w *beating) lane(id, generation uint64) *line.Lane {
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

// waitsItself reports whether a member has waited for a while: then the ranks that it waits for
// hold up the operation.
func waitsItself(b *line.Beat, patience time.Duration) bool {
	return slices.ContainsFunc(b.Lanes, func(l line.Lane) bool {
		return l.Waiting && l.For >= min(time.Second, patience/2)
	})
}

// through reports whether the member has entered the operation that it held up, or waits for others
// now.
func (s *stalls) through(member *member) bool {
	b := s.fresh(member)
	if b == nil {
		return false
	}
	lane := s.workers[member.id].lane(member.held.lane, s.number)
	return lane == nil || lane.Operation >= member.held.operation || waitsItself(b, s.patience())
}

// accuse describes what a member does while others wait for it.
func (s *stalls) accuse(now time.Time, member *member, h *holdUp) string {
	verb := "wait"
	if len(h.waiting) == 1 {
		verb = "waits"
	}
	return fmt.Sprintf("%s; %s %s for it in %s for %v", s.does(now, member.id), ranks(h.waiting), verb, named(h), job.Round(h.long))
}

// threat describes when the member will be stopped.
func (s *stalls) threat(h *holdUp) string {
	if s.limit == 0 {
		return ""
	}
	return fmt.Sprintf("; it will be stopped in %v (--stall-timeout)", job.Round(s.limit-h.long))
}

// shows returns what the heartbeats of a worker show, for Machine.Status.
func (s *stalls) shows(now time.Time) func(id string, generation uint64) decide.Beat {
	where := make(map[string]string) // the members that hold up others, of a world that may be large
	s.mu.Lock()
	for _, member := range s.world {
		if member.where != "" {
			where[member.id] = member.where
		}
	}
	s.mu.Unlock()
	return func(id string, generation uint64) decide.Beat {
		s.mu.Lock()
		defer s.mu.Unlock()
		w := s.workers[id]
		b := decide.Beat{
			What: s.whatOf(now, id), Where: where[id],
			Straggler: s.stragglers.score(now, id), Usage: w.usage(), Figures: w.figures(),
		}
		if w != nil && w.beat.Generation == generation {
			b.Commits = w.beat.Commits
		}
		return b
	}
}

// what describes what a worker is doing, and when it will be stopped if it holds up others; empty:
// unknown.
func (s *stalls) what(now time.Time, id string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.whatOf(now, id)
}

// whatOf is like the method what. The caller holds the lock.
func (s *stalls) whatOf(now time.Time, id string) string {
	if w := s.workers[id]; w == nil || w.beat.Phase == 0 {
		return ""
	}
	does := s.does(now, id)
	if at, held := s.stops[id]; held {
		does += fmt.Sprintf("; it will be stopped in %v (--stall-timeout)", job.Round(max(0, at.Sub(now))))
	}
	return does
}

// shortages describes the members of the world whose memory has become short since the last call.
func (s *stalls) shortages() (lines []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, member := range s.world {
		w := s.workers[member.id]
		if w == nil {
			continue
		}
		was, u := w.short, w.usage()
		if w.short = u.Short(); w.short && !was {
			const mebi = 1 << 20
			lines = append(lines, fmt.Sprintf("rank %d: %d of %d MiB of the memory are used that its processes can have, %d MiB by them: when it is full, the kernel kills processes",
				r, u.Used/mebi, u.Limit/mebi, u.Resident/mebi))
		}
	}
	return lines
}

// usage returns what the worker uses, rounded down by at most 3 % so that a small change shows
// nothing new; nil: unknown.
func (w *beating) usage() *job.Usage {
	if w == nil || w.used == nil || w.used.Resident == 0 {
		return nil
	}
	u := w.used
	return &job.Usage{
		Processors: math.Round(10*w.processors) / 10, Resident: roundBytes(u.Resident), Used: roundBytes(u.Used), Limit: u.Limit,
	}
}

func (w *beating) figures() []job.Figure {
	if w == nil {
		return nil
	}
	return slices.Clone(w.beat.Figures)
}

// roundBytes rounds to the six highest bits.
func roundBytes(n uint64) uint64 {
	drop := max(0, bits.Len64(n)-6)
	return n >> drop << drop
}

// locate sets where a worker is, and returns the generation and a text that describes how the
// worker affects the others.
func (s *stalls) locate(id, where string) (generation uint64, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, member := range s.world {
		if member.id != id {
			continue
		}
		member.where = where
		if h := member.held; h != nil {
			return s.number, h.text(s.waitIn(h))
		}
	}
	return s.number, "waits like all others"
}

// text describes how the worker affects the others.
func (h *holdUp) text(waiting int) string {
	others := "others"
	if waiting == 1 {
		others = "other"
	}
	return fmt.Sprintf("holds up %d %s for %v before %s", waiting, others, job.Round(h.long), named(h))
}

// waitIn returns the number of members that wait in the operation, however long, by their last
// heartbeats.
func (s *stalls) waitIn(h *holdUp) (n int) {
	for _, member := range s.world {
		if w := s.workers[member.id]; w != nil {
			if l := w.lane(h.lane, s.number); l != nil && l.Waiting && l.Operation >= h.operation {
				n++
			}
		}
	}
	return max(n, len(h.waiting))
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
	case w.beat.Phase == line.Connecting:
	case in != nil:
		doing, quiet = fmt.Sprintf("%s, in %s", doing, operation(in.What, in.ID, in.Operation)), in.For
	case last != nil && last.Operation > 0:
		doing = fmt.Sprintf("%s, after %s", doing, operation(last.What, 0, last.Operation))
	}
	ago := now.Sub(w.at)
	if s.silent(w) {
		return fmt.Sprintf("silent for %v, was %s", job.Round(ago), doing)
	}
	if quiet += ago; quiet >= time.Second {
		return fmt.Sprintf("%s for %v", doing, job.Round(quiet))
	}
	return doing
}

func named(h *holdUp) string { return operation(h.what, h.lane, h.operation) }

// operation describes an operation. Only operations of the group of all ranks have numbers;
// connecting has none.
func operation(what string, lane, number uint64) string {
	switch {
	case lane == 0 && number > 0:
		return fmt.Sprintf("%s (operation %d)", what, number)
	case lane == 0:
		return what
	}
	if strings.HasSuffix(what, `"`) { // of one tensor
		return what
	}
	return fmt.Sprintf("%s of a group of its own", what)
}

// ranks lists ranks: "rank 3", "ranks 0 1 2", "ranks 0 1 2 3 4 5 6 7 and 992 more".
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
