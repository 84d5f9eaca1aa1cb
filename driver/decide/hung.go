package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// MostNamed is the largest number of workers or ranks named in a line.
const MostNamed = 8

// named joins the first MostNamed of some names, and says how many others there are.
func named(names []string) string {
	text := strings.Join(names[:min(len(names), MostNamed)], " ")
	if more := len(names) - MostNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// mostHolding is how many workers that hold up the job get a line each; a line for each of many
// would be too much.
const mostHolding = 2

// member returns the worker if it trains in the given generation, that generation is current, and
// the job is not ending; otherwise nil.
func (m *Machine) member(id string, generation uint64) *Worker {
	w := m.find(id)
	if w == nil || w.Phase != training || generation != m.Current.Generation || m.Decided || !m.DoneFrom.IsZero() {
		return nil
	}
	return w
}

// runs reports whether the generation is that of the current world and the world is not being left.
func (m *Machine) runs(generation uint64) bool {
	return generation == m.Current.Generation && m.ResetFrom.IsZero() && !m.Decided && m.DoneFrom.IsZero()
}

func (m *Machine) stalled(now time.Time, e WorkerStalled) {
	w := m.member(e.ID, e.Generation)
	if w == nil || !w.StalledFrom.IsZero() {
		return
	}
	w.StalledFrom = now
	m.ledger.Owe(now, job.PartStalled, w.slot, min(e.Long, now.Sub(m.ledger.Begun())))
	m.emit(now, job.Stalled, append(w.fields(), field("generation", e.Generation), field("what", e.What))...)
	switch n := m.holdUp(); {
	case n <= mostHolding:
		m.log(Warn, "%s holds up the job: %s", w, e.What)
	case n == mostHolding+1:
		m.log(Warn, "more than %d workers hold up the job; hvdrun status shows what each does", mostHolding)
	}
}

// located records where a worker that holds up others is.
func (m *Machine) located(now time.Time, e WorkerLocated) {
	w := m.member(e.ID, e.Generation)
	if w == nil {
		return
	}
	m.emit(now, job.Located, append(w.fields(), field("generation", e.Generation), field("what", e.What), field("where", e.Where))...)
	m.log(Warn, "%s %s: %s", w, e.What, e.Where)
}

// holdUp returns the number of workers that hold up the job.
func (m *Machine) holdUp() (n int) {
	for _, w := range m.workers {
		if !w.StalledFrom.IsZero() {
			n++
		}
	}
	return n
}

// stirred records that a worker no longer holds up others: it continues or has joined.
func (m *Machine) stirred(now time.Time, w *Worker) {
	if w == nil || w.StalledFrom.IsZero() {
		return
	}
	held, few := now.Sub(w.StalledFrom), m.holdUp() <= mostHolding
	w.StalledFrom = time.Time{}
	m.emit(now, job.StallEnded, append(w.fields(), field("generation", w.Generation), field("seconds", held.Seconds()))...)
	if few {
		m.log(Warn, "%s continues, %v after it was reported", w, job.Round(held))
	}
}

// moved records when a worker was last seen moving to the next world.
func (m *Machine) moved(now time.Time, e WorkerMoved) {
	w, at := m.member(e.ID, e.Generation), now.Add(-e.Ago)
	if w != nil && !m.ResetFrom.IsZero() && at.After(w.MovedFrom) {
		w.MovedFrom = at
	}
}

// mostMoves bounds the time that a member gets because it is seen moving to the next world, as a
// multiple of the join timeout. The others wait meanwhile, and only the member itself reports that
// it moves.
const mostMoves = 10

// joinBy returns the deadline for a member's join to the next world.
func (m *Machine) joinBy(w *Worker) time.Time {
	from := m.ResetFrom
	if w.MovedFrom.After(from) {
		from = w.MovedFrom
	}
	by, last := from.Add(m.wait.Join), m.ResetFrom.Add(mostMoves*m.wait.Join)
	if by.After(last) {
		return last
	}
	return by
}

// hung stops a worker for which the others have waited too long, and sends them the loss at once,
// because its process may take long to end.
func (m *Machine) hung(now time.Time, e WorkerHung) {
	w := m.member(e.ID, e.Generation)
	if w == nil {
		return
	}
	m.stop(now, w, "held up the job: "+e.What)
	m.because(job.CauseStall)
	m.loseAtOnce(now, w)
}

// dying gives up a worker before its process has ended, which takes long if the kernel writes a
// core file or frees much memory. Its slot stays taken until the process has ended.
func (m *Machine) dying(now time.Time, e WorkerDying) {
	w := m.find(e.ID)
	if w == nil || w.Done || w.Phase == stopping {
		return
	}
	member := m.member(e.ID, w.Generation) != nil
	if e.Signal == 0 {
		m.emitDying(now, w, e)
		m.stop(now, w, e.What)
		if member {
			m.loseAtOnce(now, w)
		}
		return
	}
	if !member || w.Asked || w.Left {
		return // nobody waits for it, or it is leaving: its exit is enough
	}
	m.emitDying(now, w, e)
	_, why, _ := strings.Cut(e.What, ": ")
	m.stopAs(now, w, e.What, &job.WorkerError{
		Slot: w.slot, Rank: w.Rank, Exit: job.Exit{Code: 128 + int(e.Signal), Signal: e.Signal, Why: why},
	})
	m.lose(now, w)
}

func (m *Machine) emitDying(now time.Time, w *Worker, e WorkerDying) {
	signal := any(nil)
	if e.Signal != 0 {
		signal = int(e.Signal)
	}
	m.emit(now, job.WorkerDying, append(w.fields(), field("signal", signal), field("what", e.What))...)
}

// lookFor asks, once for each, whether a signal is terminating members that others have lost. If
// so, the next world can be formed without such a member before its process has ended. The reports
// of the others do not prove that, because a connection can break while both of its ends live.
func (m *Machine) lookFor(lost []int) {
	if !m.size.Elastic || m.Decided || !m.DoneFrom.IsZero() {
		return
	}
	for _, rank := range lost {
		if rank < 0 || rank >= len(m.Current.Slots) {
			continue
		}
		w := m.in(m.Current.Slots[rank].SlotID)
		if w != nil && w.inWorld() && w.Generation == m.Current.Generation && !slices.Contains(m.Sought, rank) {
			m.Sought = append(m.Sought, rank)
			m.do(LookAt{w.id})
		}
	}
}

// loseAtOnce records the loss of a member, and makes this step send it to the others.
func (m *Machine) loseAtOnce(now time.Time, w *Worker) {
	m.lose(now, w)
	m.DeadFrom = now.Add(-lossAfter)
}

func (m *Machine) jammed(now time.Time, e WorldJammed) {
	if !m.runs(e.Generation) {
		return
	}
	m.emit(now, job.Stalled, field("host", nil), field("slot", nil), field("generation", e.Generation), field("what", e.What))
	m.log(Warn, "%s", e.What)
	m.Jam = true
	m.ledger.Owe(now, job.PartStalled, plan.SlotID{}, min(e.Long, now.Sub(m.ledger.Begun())))
}

// String names the worker by rank, slot and process.
func (w *Worker) String() string { return fmt.Sprintf("rank %d (%s, pid %d)", w.Rank, w.slot, w.pid) }

func (w *Worker) fields() []job.Field {
	return []job.Field{field("host", w.slot.Host), field("slot", w.slot.Index), field("pid", w.pid), field("rank", w.Rank)}
}

// remindAfter is how long the driver waits for members before it logs the late ones.
func (m *Machine) remindAfter() time.Duration {
	if warning := m.wait.StallWarning; warning > 0 && warning < m.wait.Join {
		return warning
	}
	return m.wait.Join / 2
}

// remindOf emits a Remind action for the workers that late selects, if there are any.
func (m *Machine) remindOf(late func(*Worker) bool, to, limit string, left time.Duration) {
	r := Remind{To: to, Limit: limit, Left: left}
	for _, w := range m.workers {
		if late(w) {
			r.Late = append(r.Late, w)
		}
	}
	if len(r.Late) > 0 {
		m.do(r)
	}
}

// remindOfReset logs the members that have not joined the next world, or that have not reached a
// commit at which to leave this one.
func (m *Machine) remindOfReset(now time.Time) {
	m.Reminded = true
	switch {
	case !m.ResetFrom.IsZero():
	default:
		m.remindOfCommit(now)
		return
	}
	// The members that have left have closed their connections, so the remaining ones should know.
	// If they have not noticed, only the driver can inform them.
	if slices.ContainsFunc(m.workers, func(w *Worker) bool { return w.hasLeft(m.Current.Generation) }) {
		m.Given = true
		m.tellLoss(nil)
	}
	left := m.ResetFrom.Add(m.wait.Join).Sub(now)
	m.remindOf(func(w *Worker) bool { return w.Phase == training }, "come to the next world", "--join-timeout", left)
}

// remindOfCommit logs the members that were notified long ago that the hosts have changed and still
// train.
func (m *Machine) remindOfCommit(now time.Time) {
	since := now.Sub(m.ChangeFrom)
	to := fmt.Sprintf("leave at a commit (state.Commit), for %v now", job.Round(since))
	if m.Announced&plan.Removed == 0 {
		to = fmt.Sprintf("commit (state.Commit) and return its error, for %v now, so that %s can be let in", job.Round(since),
			m.namesOf(func(w *Worker) bool { return w.Phase == waiting && w.Wanted }))
	}
	m.remindOf(m.owesCommit, to, "", 0)
	named := 0
	for _, w := range m.workers {
		if m.owesCommit(w) && named < MostNamed {
			named++
			m.emit(now, job.CommitMissing, append(w.fields(), field("generation", w.Generation),
				field("change", m.Announced.String()), field("seconds", since.Seconds()))...)
		}
	}
}

// owesCommit reports whether a member has been notified that the hosts have changed and therefore
// has to reach a commit: every member if workers are only added, otherwise those that have to
// leave.
func (m *Machine) owesCommit(w *Worker) bool {
	return w.Phase == training && !m.ChangeFrom.IsZero() && m.ResetFrom.IsZero() && (!w.Wanted || m.Announced&plan.Removed == 0)
}

// hasLeft reports whether the worker was in that generation and has left it on its own.
func (w *Worker) hasLeft(generation uint64) bool {
	return w.Generation != 0 && w.Generation == generation && (w.Phase == waiting || w.Phase == training && w.Left)
}

// lingers reports whether the worker has reported done and has not exited.
func (w *Worker) lingers() bool { return w.Done && w.Phase != stopping }

// remindOfExit logs, once each, the workers that have reported done and have not exited.
func (m *Machine) remindOfExit(now time.Time) {
	var late []*Worker
	left := m.wait.Exit
	for _, w := range m.workers {
		if w.lingers() && !w.Reminded && !now.Before(w.DoneFrom.Add(m.wait.Exit/2)) {
			w.Reminded = true
			late, left = append(late, w), min(left, w.DoneFrom.Add(m.wait.Exit).Sub(now))
		}
	}
	if len(late) > 0 {
		m.do(Remind{late, "exit after they reported done", "--exit-timeout", left})
	}
}
