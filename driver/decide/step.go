package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/job"
	"github.com/hvdrun/hvdrun/plan"
)

// Step processes inputs that arrive at the same time, in their order, and returns the actions to
// perform, in order. A step of many inputs takes little longer than a step of one, because
// reconcile runs once, after the last input.
func (m *Machine) Step(now time.Time, inputs ...Input) []Action {
	m.out = nil
	for _, in := range inputs {
		m.note(now, in)
	}
	m.settle(now)
	return m.out
}

// effect says how much of the machine the inputs of a step may affect.
type effect uint8

const (
	noEffect  effect = iota // nothing: the inputs are only shown
	factsOnly               // facts on which reconcile does not depend: it runs only if a deadline has passed
	anyEffect
)

// note updates the facts by an input.
func (m *Machine) note(now time.Time, in Input) {
	if m.Over {
		return
	}
	m.ledger.Begin(now)
	leads := anyEffect
	switch e := in.(type) {
	case HostsFound:
		m.emit(now, job.HostsFound, field("hosts", foundHosts(e.Hosts)))
		m.hosts.Update(now, e.Hosts)
		m.forgetFailures()
	case SourceFailed:
		m.emit(now, job.DiscoveryFailed, field("error", e.Err.Error()))
		m.decide(now, fmt.Errorf("%w: %w", job.ErrDiscovery, e.Err))
	case SourceStale:
		m.emit(now, job.DiscoveryFailed, field("error", e.Err.Error()))
	case WorkerForked:
		m.forked(now, e)
		leads = factsOnly
	case WorkerJoined:
		leads = m.workerJoined(now, e)
	case WorkerReported:
		leads = m.reported(now, e)
	case WorkerWrites:
		m.writerProgress(now, e)
	case WorkerEnded:
		m.ended(now, e)
	case Interrupted:
		m.decide(now, e.Err)
	case WorkerStalled:
		m.stalled(now, e)
	case WorkerLocated:
		m.located(now, e)
		leads = factsOnly
	case WorkerStirred:
		m.stirred(now, m.member(e.ID, e.Generation))
	case WorkerHung:
		m.hung(now, e)
	case WorkerMoved:
		m.moved(now, e)
	case WorkerTrains:
		m.trainsOn(e)
	case WorkerDying:
		m.dying(now, e)
	case WorldJammed:
		m.jammed(now, e)
	case WorldStuck:
		m.stuck(now, e)
	case WorldTrains:
		m.begins(e)
	case WorldStirred:
		m.unjammed(e)
	case DeadlinePassed:
	case Commanded:
		m.command(now, e.Command)
	case Audited:
		m.do(EmitEvent{job.AuditEvent(now, e.Record)})
		leads = noEffect
	case TasksTold:
		if e.Name == job.TaskWorkerStuck {
			m.taskStuck(now, e)
			break
		}
		m.do(EmitEvent{e.Event(now)})
		leads = noEffect
	case Resumed:
		m.resume(now)
	case WorkerFailing:
		m.failing(e)
		leads = factsOnly
	case BackendTold:
		m.backendTold(now, e)
		leads = factsOnly
	default:
		panic(fmt.Sprintf("driver: unknown input %T", in))
	}
	m.noted = max(m.noted, leads)
}

// settle ends a step: it acts on the noted inputs.
func (m *Machine) settle(now time.Time) {
	leads := m.noted
	if m.noted = noEffect; m.Over {
		return
	}
	defer func() { m.Stepped = now }()
	switch {
	case leads == noEffect:
		return
	case leads == factsOnly && !m.Decided && m.due.known && !m.due.passed(now):
		m.ledger.Count(now) // reconcile has nothing to do at this time
		return
	}
	m.reconcile(now)
	m.noteState(now)
	m.account(now)
	m.Stepped = now // so that the next deadline is one after this step
	m.due = m.nextDue()
}

// forked handles the start of a worker's process. The time to join counts from now, because before
// that the agent had to be started, and the program may have been copied to the host.
func (m *Machine) forked(now time.Time, e WorkerForked) {
	if w := m.find(e.ID); w != nil && w.pid != e.PID { // if the pid is the same, a previous driver has recorded it
		w.pid = e.PID
		m.slotFree(w.slot)
		if w.Phase == starting {
			w.Since = now
		}
		m.emit(now, job.WorkerStarted, field("host", w.slot.Host), field("slot", w.slot.Index), field("pid", e.PID))
	}
}

// workerJoined handles a worker's request for a world newer than its last. A repeated join counts
// once; the join of a worker that is being stopped is answered with a dismissal.
func (m *Machine) workerJoined(now time.Time, e WorkerJoined) effect {
	w := m.find(e.ID)
	if w == nil {
		return anyEffect
	}
	if w.Phase == stopping && m.leavesLast() {
		w.join, w.Holds, w.Comes = e.Join, e.Join.HoldsState, true // answerAll answers it
	} else if w.Phase == stopping {
		m.release(w)
	}
	if !w.live() {
		return anyEffect // a dismissed worker already has its answer
	}
	if e.Join.After < w.Generation {
		return anyEffect // a repeated join that its current world has answered
	}
	j, ok := m.checkJoin(now, w, e.Join)
	if !ok {
		return anyEffect
	}
	if m.Joined.IsZero() {
		m.Joined = now
		if j.Program != "" {
			m.log(Info, "the program speaks by its socket: %s", j.Program)
		}
	}
	oneOfMany := w.Phase == training && w.Holds && j.HoldsState && !m.ResetFrom.IsZero() && m.DoneFrom.IsZero()
	w.join, w.Holds, w.Trains = j, j.HoldsState, w.Trains || m.denies(w, j)
	m.spoken = m.spoken || j.Program != ""
	m.Progress = m.Progress || w.state() > 0
	switch w.Phase {
	case starting:
		m.StartsFrom = now
		if f, ok := m.failures[w.slot]; ok {
			f.unjoined = 0
			m.failures[w.slot] = f
		}
		m.emit(now, job.WorkerReady, field("host", w.slot.Host), field("slot", w.slot.Index))
	case training:
		m.stirred(now, w)
		if !m.DeadFrom.IsZero() && !m.speaks() {
			m.DeadFrom = now // members notice the death by themselves
		}
		if j.Cause != "" {
			m.log(Debug, "%s left generation %d: %s", w.slot, w.Generation, j.Cause)
		}
		if m.DoneFrom.IsZero() {
			m.beginReset(now)
		}
		if j.After == m.Current.Generation {
			m.lookFor(j.Lost)
		}
	}
	w.join.Cause = "" // only the log uses it; those of many workers would make a snapshot large
	m.enter(now, w, waiting)
	if oneOfMany && slices.ContainsFunc(m.workers, (*Worker).inWorld) {
		return factsOnly // the last one leads to the next world
	}
	return anyEffect
}

// foundHosts converts hosts for an event.
func foundHosts(hosts []plan.Host) []job.FoundHost {
	found := make([]job.FoundHost, len(hosts))
	for i, h := range hosts {
		found[i] = job.FoundHost{Host: h.Name, Slots: h.Slots, Draining: h.Draining}
	}
	return found
}

// reconcile compares the facts with what is wanted and emits the actions for the difference. It
// depends on the state only, never on the event that led to it, so that events may arrive in any
// order and repeatedly.
func (m *Machine) reconcile(now time.Time) {
	for _, x := range m.hosts.Expire(now) {
		m.emit(now, job.Returned, field("host", x.Host), field("slot", x.Slot))
		m.log(Info, "%s may be used again", excludedName(x))
	}
	m.endWaits(now)
	m.settleDone(now, false)
	if !m.Decided && m.DoneFrom.IsZero() {
		m.checkAlive(now)
	}
	switch {
	case m.Decided:
		m.windDown(now)
	case m.Agreed:
		m.finish(now)
	case m.claimed():
	default:
		wanted := m.wanted(now)
		m.logStays()
		m.startMissing(now, wanted)
		m.startSpares(now)
		m.releaseUnwanted(now)
		first := m.Current.Generation == 0
		m.form(now, wanted)
		if first {
			m.startSpares(now)
		}
		m.announce(now)
		if m.Decided { // form may have ended the job
			m.windDown(now)
		}
	}
}

// wanted returns the slots that should have a worker now, oldest hosts first, and marks their
// workers. A job of a thousand workers has as many steps, so the rest of a step uses these marks
// instead of searching lists.
func (m *Machine) wanted(now time.Time) []plan.SlotID {
	if m.fixed != nil {
		m.want(m.fixed)
		return m.wants
	}
	if at := m.hosts.Changes(); m.freeAt != at { // reconcile has removed ended exclusions already
		m.free, m.freeAt = m.hosts.Available(now), at
	}
	free := m.withoutTaken(now, m.withoutAsked(m.free))
	if m.size.Max > 0 && len(free) > m.size.Max {
		free = m.preferred(free, m.size.Max)
	}
	m.want(free)
	m.holder = m.lastHolder()
	if w := m.holder; w != nil {
		// Its slot is not wanted any more, but only this worker has the state: it stays until
		// another worker has the state too.
		m.want(m.insertByAge(m.withRoomFor(m.wants), w.slot))
	}
	return m.wants
}

// withRoomFor returns the slots. If there is no room for one more, it leaves out the least
// preferred slot.
func (m *Machine) withRoomFor(ids []plan.SlotID) []plan.SlotID {
	if m.size.Max == 0 || len(ids) < m.size.Max {
		return ids
	}
	return m.preferred(ids, m.size.Max-1)
}

// want sets the wanted slots. It marks only workers of slots between the common prefix and the
// common suffix of the old and new lists: when a thousand workers die, each death changes one slot.
func (m *Machine) want(ids []plan.SlotID) {
	old, fresh := m.wants, ids
	for len(old) > 0 && len(fresh) > 0 && old[0] == fresh[0] {
		old, fresh = old[1:], fresh[1:]
	}
	for len(old) > 0 && len(fresh) > 0 && old[len(old)-1] == fresh[len(fresh)-1] {
		old, fresh = old[:len(old)-1], fresh[:len(fresh)-1]
	}
	m.wants = ids
	m.mark(old, false)
	m.mark(fresh, true)
}

func (m *Machine) mark(ids []plan.SlotID, wanted bool) {
	for _, id := range ids {
		if w := m.in(id); w != nil {
			w.Wanted = wanted
		}
	}
}

// insertByAge inserts a slot after those of its own host and of older hosts. A host that is not
// listed counts as the oldest.
func (m *Machine) insertByAge(ids []plan.SlotID, id plan.SlotID) []plan.SlotID {
	age := make(map[string]int) // from 1
	for i, h := range m.hosts.Listed() {
		age[h.Name] = i + 1
	}
	at := slices.IndexFunc(ids, func(o plan.SlotID) bool { return age[o.Host] > age[id.Host] })
	if at < 0 {
		at = len(ids)
	}
	return slices.Insert(slices.Clip(ids), at, id)
}

// preferred returns the slots to keep if at most the given number may be kept: first those of
// workers in the current world, then those of workers that have joined, then those of workers that
// are starting, because no running worker is replaced only for the order of the hosts.
func (m *Machine) preferred(free []plan.SlotID, most int) []plan.SlotID {
	class := func(id plan.SlotID) int {
		w := m.in(id)
		switch {
		case w == nil || !w.live():
			return 3
		case w.Generation != 0 && w.Generation == m.Current.Generation:
			return 0
		case w.Phase == waiting:
			return 1
		}
		return 2
	}
	classes, count := make([]int, len(free)), [4]int{}
	for i, id := range free {
		classes[i] = class(id)
		count[classes[i]]++
	}
	// The number of slots to take of each class.
	room, left := [4]int{}, most
	for c, n := range count {
		room[c] = min(n, left)
		left -= room[c]
	}
	chosen := make([]plan.SlotID, 0, most)
	for i, id := range free {
		if c := classes[i]; room[c] > 0 {
			room[c]--
			chosen = append(chosen, id)
		}
	}
	return chosen
}

// lastHolder returns a worker with the job's state if no worker of a wanted slot has it; otherwise
// nil.
func (m *Machine) lastHolder() *Worker {
	var last *Worker
	for _, w := range m.workers {
		if !w.live() || !w.Holds {
			continue
		}
		if w.Wanted {
			return nil
		}
		if last == nil || w.join.Commits > last.join.Commits ||
			(w.join.Commits == last.join.Commits && w.Rank < last.Rank) {
			last = w
		}
	}
	return last
}

// startMissing starts a worker in every wanted slot without one, as far as the ramp permits. The
// first start waits for enough slots.
func (m *Machine) startMissing(now time.Time, wanted []plan.SlotID) {
	if !m.Started {
		if len(wanted) < m.size.NP {
			m.lackSlots(now, len(wanted), m.size.NP)
			return
		}
		if m.Started = true; len(m.Taken) == 0 { // otherwise the wait continues if the slots are still taken
			m.ShortFrom = time.Time{}
		}
		if !m.size.Elastic {
			m.fixed = wanted
		}
	}
	taken := 0 // wanted slots whose workers run or are ending
	for _, w := range m.workers {
		if w.Wanted {
			taken++
		}
	}
	m.rampUntil = time.Time{}
	if m.queued = len(wanted) - taken; m.queued == 0 {
		return
	}
	room := m.room(now)
	if room.all >= min(m.queued, rampLeast) {
		m.queued = m.startIn(now, wanted, &room, false)
	}
	if m.queued > 0 {
		m.rampUntil = room.next
	}
}

// startIn starts workers in the free ones of the slots, within the room of the ramp, and returns
// the number of slots that exceed it. The workers are spares or belong to wanted slots.
func (m *Machine) startIn(now time.Time, wanted []plan.SlotID, room *ramp, spares bool) (queued int) {
	slots, err := plan.Assign(wanted)
	if err != nil {
		panic(fmt.Sprintf("driver: trial assignment: %v", err)) // cannot happen: without bounds every number of slots is valid
	}
	groups := groupsOf(slots)
	if !m.any(starting) {
		m.StartsFrom = now
	}
	for _, s := range slots {
		if !m.mayStart(s.SlotID) {
			continue
		}
		if !room.take(s.Host) {
			queued++
			continue
		}
		w := &Worker{
			identity: identity{id: m.newID(s.SlotID), slot: s.SlotID},
			life:     life{Rank: s.Rank, Since: now, Begun: now, Wanted: !spares, Spare: spares},
		}
		if !m.size.Elastic {
			m.ran[s.SlotID] = true
		}
		if room.next.IsZero() {
			room.next = now.Add(m.rampHold())
		}
		trial := TrialWorld{Size: len(slots), First: slots[0].Host, GroupRank: groups[s.Host], GroupSize: len(groups)}
		w.start = StartWorker{ID: w.id, Slot: s, Trial: trial, Resets: m.Resets}
		m.add(w)
		m.do(w.start)
	}
	return queued
}

// groupsOf returns the group rank of each host of a world, like plan.World.Group for one host.
func groupsOf(slots []plan.Slot) map[string]int {
	groups := make(map[string]int)
	for _, s := range slots {
		if s.LocalRank == 0 {
			groups[s.Host] = len(groups)
		}
	}
	return groups
}

// releaseUnwanted ends workers that are in no world and whose slots are not wanted. Members of the
// current world are notified by announce and leave when the next world is published.
func (m *Machine) releaseUnwanted(now time.Time) {
	for _, w := range m.workers {
		switch {
		case w.Wanted, w.Spare:
		case w.Phase == starting:
			m.stop(now, w, "")
		case w.Phase == waiting && w.Generation == 0:
			m.dismiss(now, w, DismissRemoved)
		}
	}
}

// form publishes the next world once all members of the current world have joined or ended. The
// first world, and one that lacked workers, also waits for starting workers; any other does not.
func (m *Machine) form(now time.Time, wanted []plan.SlotID) {
	if !m.Started || m.Decided || slices.ContainsFunc(m.workers, (*Worker).inWorld) {
		return
	}
	if m.size.TasksOnly {
		m.formPool(now)
		return
	}
	come, soon := 0, m.queued > 0
	for _, w := range m.workers {
		switch {
		case !w.Wanted:
		case w.Phase == waiting:
			come++
		case w.Phase == starting, !w.live(): // it joins, or its slot becomes free for a new worker
			soon = true
		}
	}
	first := m.Current.Generation == 0
	if come < m.size.Min {
		m.Short = true
		m.releaseAsked(now)
		switch {
		case m.size.Elastic && (!soon || m.StartFailed): // a start has its own deadline; this one bounds repeated failed starts
			m.lackWorkers(now, come)
		case soon:
		default:
			m.decide(now, m.incomplete(come, wanted))
		}
		return
	}
	if soon && (first || m.Short) && m.newcomers(now) {
		return
	}
	members := make([]*Worker, 0, come)
	for _, id := range wanted {
		if w := m.in(id); w != nil && w.Phase == waiting {
			members = append(members, w)
		}
	}
	if m.beginReset(now); m.Decided { // the reset begins here if all members left on their own
		return
	}
	if w, why := m.part(now); w != nil {
		m.stop(now, w, why)
		if !m.Decided {
			m.form(now, m.wanted(now))
		}
		return
	}
	m.publish(now, members)
}

// formPool is like form, for workers that only run tasks: no world is formed, but there should be
// enough workers.
func (m *Machine) formPool(now time.Time) {
	come := 0
	for _, w := range m.workers {
		if w.Wanted && w.live() {
			come++
		}
	}
	switch {
	case come >= m.size.Min:
		m.ShortFrom = time.Time{}
	case m.size.Elastic:
		m.lackWorkers(now, come)
	}
}

// incomplete returns the error of a job that is not elastic if workers exited with 0 before the
// others were done. It names the wanted slots that have no worker.
func (m *Machine) incomplete(n int, wanted []plan.SlotID) error {
	var gone []string
	for _, id := range wanted {
		if w := m.in(id); w == nil || !w.live() {
			gone = append(gone, id.String())
		}
	}
	why := ""
	if len(gone) > 0 {
		why = fmt.Sprintf(": %s exited with status 0 before training was done", named(gone))
	}
	return fmt.Errorf("driver: only %d of %d workers are left, and the job is not elastic%s", n, m.size.NP, why)
}

// lackSlots and lackWorkers start the wait for slots and log it once.
func (m *Machine) lackSlots(now time.Time, have, need int) {
	if m.ShortFrom.IsZero() {
		m.ShortFrom = now
		m.log(Info, "waiting up to %v for %d slots, %d available%s", m.wait.Elastic, need, have, m.lackWords())
	}
}

func (m *Machine) lackWorkers(now time.Time, have int) {
	if m.ShortFrom.IsZero() {
		m.ShortFrom = now
		m.log(Info, "waiting up to %v for %d workers, %d joined", m.wait.Elastic, m.size.Min, have)
	}
}

func (m *Machine) publish(now time.Time, members []*Worker) {
	ids := make([]plan.SlotID, len(members))
	for i, w := range members {
		ids[i] = w.slot
	}
	slots, err := plan.Assign(ids)
	if err != nil {
		panic(fmt.Sprintf("driver: assigning ranks: %v", err))
	}
	world := plan.World{Generation: m.Current.Generation + 1, Slots: slots}
	root := m.rootOf(members)
	entry := m.entryOf()
	if m.undone(now, members); m.Current.Generation > 0 {
		m.ResetCauses[m.LeftFor]++
	}
	published := make([]job.PublishedSlot, len(members))
	for r, w := range members {
		w.Generation, w.Rank, w.Trains = world.Generation, r, false
		m.enter(now, w, training)
		published[r] = job.PublishedSlot{Rank: r, Host: w.slot.Host, Slot: w.slot.Index, PID: w.pid}
	}
	m.generation = generation{
		Current: world, published: PublishWorld{world, members, root, m.Seq},
		Commits: members[root].state(), Base: members[root].state(), Entry: entry,
	}
	m.do(m.published)
	m.emit(now, job.WorldPublished, field("generation", m.Current.Generation), field("size", len(members)),
		field("root", root), field("cause", entry.Cause), field("slots", published))
	for _, w := range m.workers {
		switch {
		case w.Phase == waiting && w.Spare:
		case w.Phase == waiting: // it joined, but its slot is not wanted
			m.dismiss(now, w, DismissRemoved)
		case w.Phase == training && w.Generation != m.Current.Generation: // it is still writing its last checkpoint
			m.enter(now, w, leaving)
		}
	}
}

// beginReset records and counts that the current world is being left.
func (m *Machine) beginReset(now time.Time) {
	if m.Current.Generation == 0 || !m.ResetFrom.IsZero() || m.Decided {
		return
	}
	m.ResetFrom, m.Reminded = now, false
	m.because(m.causeOfLeaving())
	m.Resets++
	if limit := m.blame.ResetLimit; limit != nil && m.resetsWithin(now) > *limit {
		within := ""
		if m.blame.ResetWindow > 0 {
			within = fmt.Sprintf(" within %v", m.blame.ResetWindow)
		}
		m.decide(now, fmt.Errorf("%w: number of resets exceeded limit %d%s", job.ErrResetLimit, *limit, within))
		return
	}
	m.emit(now, job.Reset, field("count", m.Resets))
}

// resetsWithin returns the number of resets that count towards the limit, including one at now.
func (m *Machine) resetsWithin(now time.Time) int {
	window := m.blame.ResetWindow
	if window == 0 {
		return m.Resets
	}
	m.ResetsAt = slices.DeleteFunc(m.ResetsAt, func(at time.Time) bool { return !now.Before(at.Add(window)) })
	m.ResetsAt = append(m.ResetsAt, now)
	return len(m.ResetsAt)
}

// announce notifies the members of the current world how the wanted slots differ from it: of
// removals at once, of additions once all starting workers wait in a join. If a change was
// reverted, announce notifies them that there is no change.
func (m *Machine) announce(now time.Time) {
	if m.Current.Generation == 0 || !m.ResetFrom.IsZero() || m.Decided {
		return
	}
	var change plan.Change
	var members []*Worker
	added := false
	for _, w := range m.workers {
		switch {
		case w.Phase == training:
			members = append(members, w)
			if !w.Wanted {
				change |= plan.Removed
			}
		case w.Phase == waiting && w.Wanted:
			added = true
		}
	}
	// A worker that has to leave does so within a bounded time, so its slot becomes free for a new
	// one.
	if added && (m.Announced&plan.Added != 0 || !m.newcomers(now)) {
		change |= plan.Added
	}
	if change == m.Announced || len(members) == 0 {
		return
	}
	switch {
	case change == 0:
		m.ChangeFrom = time.Time{}
	case change&^m.Announced != 0: // the log names workers that are late for this change, too
		m.ChangeFrom, m.Reminded = now, false
	}
	m.Announced = change
	m.Seq++
	m.emit(now, job.HostsUpdated, field("seq", m.Seq), field("change", change.String()))
	m.do(NotifyWorkers{m.Seq, change, m.Current.Generation, members})
}
