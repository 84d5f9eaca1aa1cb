package decide

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// TestRandomJobs simulates the environment of the machine: hosts come and go; workers die, hang,
// fail to start and leave at random; the driver dies and is resumed. It checks all invariants that
// do not depend on a scenario after each input. Then the disturbances end, and the job must finish
// without further help.
func TestRandomJobs(t *testing.T) {
	for seed := range rounds(400) {
		randomJob(t, newSim(t, seed), seed)
	}
}

// TestRandomJobsTogether: the same holds if steps have several inputs. When the driver dies, it may
// have written some of them.
func TestRandomJobsTogether(t *testing.T) {
	for seed := range rounds(400) {
		s := newSim(t, 20_000+seed)
		s.together = true
		randomJob(t, s, seed)
	}
}

func randomJob(t *testing.T, s *sim, seed uint64) {
	for range 120 {
		s.trouble()
	}
	s.calm()
	if t.Failed() {
		t.Fatalf("seed %d:\n%s", seed, s.tail())
	}
}

// rounds returns n, or with -short the smaller number that is enough for make check.
func rounds(n uint64) uint64 {
	if testing.Short() {
		return n / 4
	}
	return n
}

// sim is a cluster whose workers follow the protocol, apart from disturbances.
type sim struct {
	t     *testing.T
	rnd   *rand.Rand
	m     *Machine
	now   time.Time
	hosts []plan.Host
	ages  map[string]int // when each listed host was first seen

	procs  []*simProc
	latest simWorld
	seq    uint64
	made   uint64 // the last commit that all members of a world made
	ended  bool
	result error
	trace  []string

	// The driver's journal. The last record is lost if the driver dies before it is written.
	job      JobRecord
	log      [][]byte
	minted   []string
	dies     bool
	resuming bool
	// stepped, if not nil, is called after each step.
	stepped func()
	// together: inputs of workers are held until the next step, which handles several at once.
	together bool
	held     []Input
	lost     []Input // of the dead driver's last step; nobody was notified that they were recorded
}

type simProc struct {
	id         string
	slot       plan.SlotID
	joined     bool   // it waits in a join
	generation uint64 // of the world it is in
	commits    uint64
	holds      bool
	stopped    bool // it has been sent SIGTERM
	dismissed  bool
	hung       bool
}

type simWorld struct {
	world   plan.World
	members []string
}

func newSim(t *testing.T, seed uint64) *sim {
	s := &sim{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), now: time.Unix(0, 0), ages: map[string]int{}}
	np := 1 + s.rnd.IntN(4)
	size := job.Size{NP: np, Min: 1 + s.rnd.IntN(np), Elastic: true, Stateless: seed%8 == 3}
	if s.rnd.IntN(2) == 0 {
		size.Max = np + s.rnd.IntN(3)
	}
	if s.rnd.IntN(3) == 0 {
		size.Spares = 1 + s.rnd.IntN(3)
	}
	if s.rnd.IntN(2) == 0 {
		size.Starts = 1 + s.rnd.IntN(2)
	}
	cfg, err := withDefaults(Config{Size: size})
	if err != nil {
		t.Fatal(err)
	}
	if s.rnd.IntN(4) == 0 {
		cfg.Blame = job.Blame{Policy: job.BlameHost, CooldownMin: time.Second, CooldownMax: 60 * time.Second}
	}
	s.job = JobRecord{Version: JournalVersion, Size: cfg.Size, Blame: cfg.Blame, Timeouts: cfg.Timeouts}
	s.write(s.job)
	s.m = New(cfg, s.newID)
	return s
}

func (s *sim) newID(id plan.SlotID) string {
	name := fmt.Sprintf("%v#%d", id, len(s.log)*100+len(s.minted))
	s.minted = append(s.minted, name)
	return name
}

func (s *sim) write(record any) {
	b, err := json.Marshal(record)
	if err != nil {
		s.t.Fatal(err)
	}
	s.log = append(s.log, b)
}

func (s *sim) step(in Input) {
	if s.ended {
		return
	}
	s.held = append(s.held, in)
	switch in.(type) {
	case WorkerForked, WorkerJoined, WorkerReported, WorkerWrites, WorkerEnded, WorkerMoved:
		if s.together && s.rnd.IntN(4) > 0 {
			return
		}
	}
	s.flush()
}

// flush passes the held inputs to one step.
func (s *sim) flush() {
	inputs := s.held
	if s.held = nil; len(inputs) == 0 || s.ended {
		return
	}
	for _, in := range inputs {
		s.trace = append(s.trace, fmt.Sprintf("%v %T %+v", s.now.Unix(), in, in))
	}
	defer s.checkRamp()
	s.minted = nil
	actions := s.m.Step(s.now, inputs...)
	records := NewRecords(s.now, inputs, s.minted)
	if s.dies && s.together { // perhaps before it has written them all
		ends := func(in Input) bool { _, ends := in.(WorkerEnded); return ends } // the sim has already applied an end
		written := len(inputs)
		for written > 0 && !ends(inputs[written-1]) && s.rnd.IntN(3) > 0 {
			written--
		}
		records, s.lost = records[:written], inputs[written:]
	}
	for _, r := range records {
		s.write(r)
	}
	if s.stepped != nil {
		s.stepped()
	}
	if s.dies {
		s.dies = false
		s.resume()
		return
	}
	for _, a := range actions {
		s.trace = append(s.trace, fmt.Sprintf("    %T %+v", a, a))
		s.take(a)
	}
}

// checkRamp checks that no host has more starting workers than permitted.
func (s *sim) checkRamp() {
	starts := map[string]int{}
	for _, w := range s.m.workers {
		if w.Phase == starting && s.now.Before(w.Begun.Add(plainHold)) {
			if starts[w.slot.Host]++; starts[w.slot.Host] > s.m.size.Starts {
				s.t.Errorf("%d workers of %s start at a time", starts[w.slot.Host], w.slot.Host)
			}
		}
	}
}

// resume replaces a dead machine by one restored from its journal.
func (s *sim) resume() {
	p := &Replay{}
	for _, b := range s.log {
		if err := p.Next(b); err != nil {
			s.t.Fatal(err)
		}
	}
	s.m = p.Machine
	s.m.newID = s.newID
	if s.m.Over {
		s.ended, s.result = true, s.m.Result.Err
		return
	}
	s.now = s.now.Add(time.Duration(s.rnd.IntN(60_000)) * time.Millisecond)
	s.resuming = true
	s.step(Resumed{})
	s.resuming = false
	lost := s.lost
	for s.lost = nil; len(lost) > 0; lost = lost[1:] {
		if _, joins := lost[0].(WorkerJoined); !joins {
			s.step(lost[0])
		}
	}
	for _, p := range slices.Clone(s.procs) {
		if p.joined {
			s.join(p) // its call was interrupted
		}
	}
}

// take performs an action and checks its preconditions.
func (s *sim) take(a Action) {
	switch a := a.(type) {
	case StartWorker:
		if a.Again && s.proc(a.ID) != nil {
			return
		}
		for _, p := range s.procs {
			if p.slot == a.Slot.SlotID {
				s.t.Errorf("%s is started while %s has its slot", a.ID, p.id)
			}
		}
		if !s.m.DoneFrom.IsZero() {
			s.t.Errorf("%s is started after training was done", a.ID)
		}
		s.procs = append(s.procs, &simProc{id: a.ID, slot: a.Slot.SlotID})
	case StopWorker:
		if p := s.proc(a.ID); p != nil || !s.together { // it can have ended in the same step
			p.stopped = true
		}
	case GiveTime:
	case ForgetWorker:
		s.procs = slices.DeleteFunc(s.procs, func(p *simProc) bool { return p.id == a.ID })
	case DismissWorker:
		p := s.proc(a.ID)
		if p == nil && s.together || s.resuming && p.dismissed {
			return
		}
		if !p.joined {
			s.t.Errorf("%s is dismissed and waits for nothing", a.ID)
		} else {
			p.joined, p.dismissed = false, true
		}
	case PublishWorld:
		if !s.resuming || a.World.Generation > s.latest.world.Generation {
			s.published(a)
		}
	case NotifyWorkers:
		if a.Seq <= s.seq && !(s.resuming && a.Seq == s.seq) {
			s.t.Errorf("seq %d follows %d", a.Seq, s.seq)
		}
		s.seq = a.Seq
	case TellLoss:
		for _, r := range a.Ranks {
			p := s.proc(s.latest.members[r])
			if a.Generation != s.latest.world.Generation || p != nil && !p.stopped {
				s.t.Errorf("rank %d of generation %d lives and is told to be dead", r, a.Generation)
			}
		}
	case FinishJob:
		if len(s.procs) > 0 {
			s.t.Errorf("the job ended with %d processes alive", len(s.procs))
		}
		s.ended, s.result = true, a.Err
	}
}

func (s *sim) published(a PublishWorld) {
	if a.World.Generation != s.latest.world.Generation+1 {
		s.t.Errorf("generation %d follows %d", a.World.Generation, s.latest.world.Generation)
	}
	if n := a.World.Size(); n < s.m.size.Min || (s.m.size.Max > 0 && n > s.m.size.Max) {
		s.t.Errorf("a world of %d, want %d to %d", n, s.m.size.Min, s.m.size.Max)
	}
	if !slices.IsSortedFunc(a.World.Slots, func(x, y plan.Slot) int { return x.Rank - y.Rank }) {
		s.t.Error("ranks are out of order")
	}
	root := s.proc(a.Members[a.Root].id)
	for r, w := range a.Members {
		p := s.proc(w.id)
		if p == nil || !p.joined {
			s.t.Errorf("%s is in world %d and had not asked for it", w.id, a.World.Generation)
			continue
		}
		if p.slot != a.World.Slots[r].SlotID {
			s.t.Errorf("rank %d is %v, its worker runs in %v", r, a.World.Slots[r].SlotID, p.slot)
		}
		if p.holds && (!root.holds || min(p.commits, s.made) > root.commits) {
			s.t.Errorf("the root has %d commits (%v), %s has %d, all %d", root.commits, root.holds, p.id, p.commits, s.made)
		}
	}
	for _, w := range a.Members {
		p := s.proc(w.id)
		p.joined, p.generation = false, a.World.Generation
		if s.rnd.IntN(8) > 0 { // most syncs succeed
			p.commits, p.holds = root.commits, root.holds || p.holds
		}
	}
	s.latest = simWorld{world: a.World}
	for _, w := range a.Members {
		s.latest.members = append(s.latest.members, w.id)
	}
	s.checkAge(a.World)
}

// checkAge: older hosts keep lower ranks, unless a host is no longer listed.
func (s *sim) checkAge(w plan.World) {
	last := -1
	for _, slot := range w.Slots {
		at := slices.IndexFunc(s.m.hosts.Listed(), func(h plan.Host) bool { return h.Name == slot.Host })
		if at >= 0 && at < last {
			s.t.Errorf("rank %d is on an older host than the rank before", slot.Rank)
		}
		last = max(last, at)
	}
}

func (s *sim) proc(id string) *simProc {
	for _, p := range s.procs {
		if p.id == id {
			return p
		}
	}
	return nil
}

func (s *sim) end(p *simProc, x job.Exit) {
	s.procs = slices.DeleteFunc(s.procs, func(o *simProc) bool { return o == p })
	var ran []string
	if s.rnd.IntN(4) == 0 {
		ran = []string{[]string{"f", "g", "h", "i"}[s.rnd.IntN(4)]}
	}
	s.step(WorkerEnded{ID: p.id, Exit: x, Ran: ran})
}

// simCause is why workers leave their worlds.
const simCause = "a peer is gone"

func (s *sim) join(p *simProc) {
	p.joined = true
	if p.holds && p.commits == s.made && p.generation == s.latest.world.Generation && s.rnd.IntN(4) == 0 {
		p.commits++ // it has begun a commit that others have not
	}
	s.step(WorkerJoined{p.id, Join{
		After: p.generation, Commits: p.commits, HoldsState: p.holds, Undone: time.Duration(s.rnd.IntN(5)) * time.Second,
		Cause: simCause,
	}})
}

// trouble causes one random disturbance.
func (s *sim) trouble() {
	if s.ended {
		return
	}
	if s.rnd.IntN(40) == 0 {
		s.dies = true // at the next event
	}
	if s.rnd.IntN(12) == 0 || len(s.hosts) == 0 {
		s.hosts = nil
		for _, name := range []string{"a", "b", "c", "d"} {
			if s.rnd.IntN(3) > 0 {
				s.hosts = append(s.hosts, plan.Host{Name: name, Slots: s.rnd.IntN(4)})
			}
		}
		s.step(HostsFound{slices.Clone(s.hosts)})
		return
	}
	if s.rnd.IntN(25) == 0 {
		s.command()
		return
	}
	if len(s.procs) == 0 || s.rnd.IntN(5) == 0 {
		s.pass(time.Duration(s.rnd.IntN(3000)) * time.Millisecond)
		return
	}
	p := s.procs[s.rnd.IntN(len(s.procs))]
	switch n := s.rnd.IntN(100); {
	case n < 4:
		s.end(p, job.Exit{Code: 137, Signal: syscall.SIGKILL})
	case n < 6:
		s.end(p, job.Exit{Code: 1})
	case n < 7 && len(s.procs) > 1:
		s.end(p, job.Exit{})
	case n < 8:
		p.hung = true
	case n < 11 && p.generation > 0:
		s.step(WorkerReported{p.id, ReportDraining, p.generation, p.commits})
	case n < 12:
		s.end(p, job.Exit{Code: 143, Signal: syscall.SIGTERM, Evicted: true})
	case n < 15:
		s.stall(p)
	case n < 20 && !p.joined && !p.stopped && p.generation == 0:
		s.end(p, job.Exit{Code: 127, Err: errors.New("the slot is taken"), TakenBy: "another"})
	default:
		s.behave(p)
	}
}

// stall reports a worker that holds up others, in time or too late.
func (s *sim) stall(p *simProc) {
	generation := s.latest.world.Generation - uint64(min(s.rnd.IntN(4)/3, int(s.latest.world.Generation)))
	switch s.rnd.IntN(8) {
	case 7:
		s.step(WorldTrains{generation})
	case 6:
		s.step(WorldStirred{generation})
	case 5:
		s.step(WorkerMoved{p.id, generation, time.Duration(s.rnd.IntN(3)) * time.Second})
	case 4:
		s.step(WorldStuck{generation, "all wait"})
	case 0:
		s.step(WorkerStalled{p.id, generation, "in its own code", time.Duration(s.rnd.IntN(9)) * time.Second})
	case 1:
		s.step(WorkerStirred{p.id, generation})
	case 2:
		p.hung = true
		s.step(WorkerHung{p.id, generation, "in its own code"})
	case 3:
		s.step(WorldJammed{generation, "all wait", 5 * time.Second})
	}
}

// command gives an operator's command, which may be invalid.
func (s *sim) command() {
	c := job.Command{
		Verb: []job.Verb{job.Drain, job.Exclude, job.Readmit, job.Readmit, job.Scale}[s.rnd.IntN(5)],
		Host: []string{"a", "b", "c", "d", "f"}[s.rnd.IntN(5)],
	}
	if s.rnd.IntN(2) == 0 {
		c.Slot = new(s.rnd.IntN(4))
	}
	if c.Verb == job.Exclude && s.rnd.IntN(2) == 0 {
		c.For = time.Duration(1+s.rnd.IntN(20_000)) * time.Millisecond
	}
	if c.Verb == job.Scale {
		c.MinNP, c.MaxNP = new(1+s.rnd.IntN(4)), new(s.rnd.IntN(6))
	}
	s.step(Commanded{c})
}

// behave makes a worker take its next step.
func (s *sim) behave(p *simProc) {
	switch {
	case p.hung && !p.stopped:
	case p.dismissed:
		s.end(p, job.Exit{})
	case p.stopped && (p.generation == 0 || s.rnd.IntN(2) == 0):
		s.end(p, job.Exit{Code: 143, Signal: syscall.SIGTERM})
	case p.joined:
	case p.generation == 0:
		s.join(p)
	case p.generation == s.latest.world.Generation && s.complete() && s.rnd.IntN(3) > 0:
		// A commit needs all members, and all have it afterwards.
		for _, id := range s.latest.members {
			q := s.proc(id)
			s.made = max(s.made, q.commits+1)
		}
		for _, id := range s.latest.members {
			q := s.proc(id)
			q.commits, q.holds = s.made, true
		}
		s.step(WorkerReported{p.id, ReportCommitted, p.generation, p.commits})
	default:
		s.join(p) // a failed operation, or an update of the hosts
	}
}

// complete reports whether all members of the latest world live and train.
func (s *sim) complete() bool {
	return !slices.ContainsFunc(s.latest.members, func(id string) bool {
		p := s.proc(id)
		return p == nil || p.joined || p.stopped || p.hung || p.generation != s.latest.world.Generation
	})
}

func (s *sim) pass(d time.Duration) {
	s.flush()
	end := s.now.Add(d)
	for n := 0; !s.ended; n++ {
		at, ok := s.m.Deadline()
		if !ok || at.After(end) {
			break
		}
		if n > 1000 {
			s.t.Errorf("a deadline at %v is never dealt with", at)
			break
		}
		if at.After(s.now) {
			s.now = at
		}
		s.step(DeadlinePassed{})
	}
	if end.After(s.now) { // a driver that takes over starts later
		s.now = end
	}
}

// calm ends the disturbances: enough hosts remain, all workers behave, and the job must succeed,
// unless its state or all its workers are already lost.
func (s *sim) calm() {
	s.hosts = []plan.Host{{Name: "a", Slots: 2}, {Name: "b", Slots: 2}, {Name: "e", Slots: 4}}
	s.step(HostsFound{slices.Clone(s.hosts)})
	for _, p := range s.procs {
		p.hung = false
	}
	for range 4000 {
		if s.ended {
			break
		}
		// Without disturbances, workers join a new world only when required.
		busy := false
		for _, p := range slices.Clone(s.procs) {
			switch {
			case s.ended || p.joined:
			case p.stopped, p.dismissed, p.generation == 0:
				s.behave(p)
				busy = true
			case !s.complete() || s.m.Announced != 0:
				s.join(p)
				busy = true
			}
		}
		if !busy && !s.ended && len(s.latest.members) > 0 && s.complete() && s.m.ResetFrom.IsZero() && !s.m.any(starting) {
			for _, id := range slices.Clone(s.latest.members) {
				s.step(WorkerReported{id, ReportDone, s.latest.world.Generation, 0})
			}
			for _, id := range slices.Clone(s.latest.members) {
				if p := s.proc(id); p != nil {
					s.end(p, job.Exit{})
				}
			}
		} else if !busy {
			s.pass(time.Second)
		}
	}
	var worker *job.WorkerError
	switch {
	case !s.ended:
		s.t.Errorf("the job does not end")
	case s.job.Size.Stateless && errors.Is(s.result, job.ErrStateLost):
		s.t.Errorf("a job without state has lost it: %v", s.result)
	case s.result == nil, errors.Is(s.result, job.ErrStateLost), errors.As(s.result, &worker),
		strings.Contains(s.result.Error(), "waited for each other"):
	default:
		s.t.Errorf("the job ended with %v", s.result)
	}
}

func (s *sim) tail() string {
	out := ""
	for _, line := range s.trace[max(0, len(s.trace)-60):] {
		out += line + "\n"
	}
	return out
}
