package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/hvdrun/hvdrun/driver/job"
	"github.com/hvdrun/hvdrun/plan"
)

// reconcile compares the facts with what is wanted and asks for the difference. It looks at levels,
// never at the event that led here, so that events may come in any order and more than once.
func (m *Machine) reconcile(now time.Time) {
	for _, x := range m.hosts.Expire(now) {
		m.emit(now, job.Returned, field("host", x.Host), field("slot", x.Slot))
		m.log(Info, "%s may be used again", excludedName(x))
	}
	m.endWaits(now)
	if !m.decided && m.doneFrom.IsZero() {
		m.checkAlive(now)
	}
	switch {
	case m.decided:
		m.windDown(now)
	case !m.doneFrom.IsZero():
		m.finish(now)
	default:
		wanted := m.wanted(now)
		m.sayWhoStays()
		m.startMissing(now, wanted)
		m.releaseUnwanted(now)
		m.form(now, wanted)
		m.announce(now)
		if m.decided { // a world that cannot be formed may have ended the job
			m.windDown(now)
		}
	}
}

// wanted returns the slots that should have a worker now, oldest hosts first, and marks the workers
// that are in one. Where there are a thousand workers there are steps for each of them, so what
// else a step does looks at marks and not at lists.
func (m *Machine) wanted(now time.Time) []plan.SlotID {
	if m.fixed != nil {
		m.want(m.fixed)
		return m.wants
	}
	if at := m.hosts.Changes(); m.freeAt != at { // reconcile has expired what there is
		m.free, m.freeAt = m.hosts.Available(now), at
	}
	free := m.withoutAsked(m.free)
	if m.size.Max > 0 && len(free) > m.size.Max {
		free = m.preferred(free, m.size.Max)
	}
	m.want(free)
	m.holder = m.lastHolder()
	if w := m.holder; w != nil {
		// Discovery does not want it any more, but it alone has the state: it stays until another
		// has it too.
		m.want(m.insertByAge(m.withRoomFor(m.wants), w.slot))
	}
	return m.wants
}

// withRoomFor returns the slots without the one that is missed least, where one more than them
// would exceed the bound.
func (m *Machine) withRoomFor(ids []plan.SlotID) []plan.SlotID {
	if m.size.Max == 0 || len(ids) < m.size.Max {
		return ids
	}
	return m.preferred(ids, m.size.Max-1)
}

// want makes ids the wanted slots. It looks at the workers of those alone that are between what
// both lists begin and end with: where a thousand die, each death changes one.
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
			w.wanted = wanted
		}
	}
}

// insertByAge puts a slot behind those of its own host and of older ones; a host that is gone from
// the list is the oldest.
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

// preferred returns that many of the slots at most: those whose workers train already, then those
// whose workers run at all, since nobody is replaced for the sake of order.
func (m *Machine) preferred(free []plan.SlotID, most int) []plan.SlotID {
	class := func(id plan.SlotID) int {
		w := m.in(id)
		switch {
		case w == nil || !w.live():
			return 2
		case w.generation != 0 && w.generation == m.world.Generation:
			return 0
		}
		return 1
	}
	classes, count := make([]int, len(free)), [3]int{}
	for i, id := range free {
		classes[i] = class(id)
		count[classes[i]]++
	}
	// How many of each class there is room for: the first ones.
	room, left := [3]int{}, most
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

// lastHolder returns a worker that has the job's state when no worker of a wanted slot has it; nil
// when one does, or when there is nothing to hold.
func (m *Machine) lastHolder() *Worker {
	var last *Worker
	for _, w := range m.workers {
		if !w.live() || !w.holds {
			continue
		}
		if w.wanted {
			return nil
		}
		if last == nil || w.join.Commits > last.join.Commits ||
			(w.join.Commits == last.join.Commits && w.rank < last.rank) {
			last = w
		}
	}
	return last
}

// startMissing starts a worker in every wanted slot that has none, as far as the ramp lets it.
// Before the first start it waits for enough slots.
func (m *Machine) startMissing(now time.Time, wanted []plan.SlotID) {
	if !m.started {
		if len(wanted) < m.size.NP {
			m.lackSlots(now, len(wanted), m.size.NP)
			return
		}
		m.started, m.shortFrom = true, time.Time{}
		if !m.size.Elastic {
			m.fixed = wanted
		}
	}
	taken := 0 // by workers that are in it or on their way out of it
	for _, w := range m.workers {
		if w.wanted {
			taken++
		}
	}
	m.rampUntil = time.Time{}
	if m.queued = len(wanted) - taken; m.queued == 0 {
		return
	}
	room := m.room(now)
	if room.all > 0 {
		m.startIn(now, wanted, &room)
	}
	if m.queued > 0 {
		m.rampUntil = room.next
	}
}

// startIn starts workers in the slots that lack one, as many as there is room for, and counts those
// for which there is none.
func (m *Machine) startIn(now time.Time, wanted []plan.SlotID, room *ramp) {
	slots, err := plan.Assign(wanted, 0, 0)
	if err != nil {
		panic(fmt.Sprintf("driver: trial assignment: %v", err)) // no number of slots is too few for 0
	}
	trial := plan.World{Generation: m.world.Generation + 1, Slots: slots}
	if !m.any(starting) {
		m.newsFrom = now
	}
	m.queued = 0
	for _, s := range slots {
		if !m.mayStart(s.SlotID) {
			continue
		}
		if !room.take(s.Host) {
			m.queued++
			continue
		}
		w := &Worker{
			identity: identity{id: m.newID(s.SlotID), slot: s.SlotID},
			rank:     s.Rank, since: now, begun: now, wanted: true,
		}
		if !m.size.Elastic {
			m.ran[s.SlotID] = true
		}
		if room.next.IsZero() {
			room.next = now.Add(m.rampHold())
		}
		w.start = StartWorker{ID: w.id, Slot: s, Trial: trialFor(s.Host, trial), Resets: m.resets}
		m.add(w)
		m.do(w.start)
	}
}

func trialFor(host string, w plan.World) TrialWorld {
	t := TrialWorld{Size: w.Size(), First: w.Slots[0].Host}
	t.GroupRank, t.GroupSize = w.Group(host)
	return t
}

// releaseUnwanted sends away workers that train nowhere and whose slots are not wanted any more.
// Members of the current world learn it from announce, and go when the next world is published.
func (m *Machine) releaseUnwanted(now time.Time) {
	for _, w := range m.workers {
		switch {
		case w.wanted:
		case w.phase == starting:
			m.stop(now, w, "")
		case w.phase == waiting && w.generation == 0:
			m.dismiss(now, w, DismissRemoved)
		}
	}
}

// form publishes the next world once everybody who must come has come. The first world, and one for
// which too few had come, also waits for those that are being started; any other goes without them.
func (m *Machine) form(now time.Time, wanted []plan.SlotID) {
	if !m.started || m.decided || slices.ContainsFunc(m.workers, (*Worker).inWorld) {
		return
	}
	come, soon := 0, m.queued > 0
	for _, w := range m.workers {
		switch {
		case !w.wanted:
		case w.phase == waiting:
			come++
		case w.phase == starting, !w.live(): // or its slot is about to be free for another
			soon = true
		}
	}
	first := m.world.Generation == 0
	if come < m.size.Min {
		m.short = true
		m.releaseAsked(now)
		switch {
		case m.size.Elastic && (!soon || m.unready): // a start has a deadline of its own, starts without end have this one
			m.lackWorkers(now, come)
		case soon:
		default:
			m.decide(now, m.incomplete(come))
		}
		return
	}
	if soon && (first || m.short) && m.newcomers(now) {
		return
	}
	members := make([]*Worker, 0, come)
	for _, id := range wanted {
		if w := m.in(id); w != nil && w.phase == waiting {
			members = append(members, w)
		}
	}
	if m.beginReset(now); m.decided { // where all members of a world have left, nobody else began it
		return
	}
	m.publish(now, members)
}

// incomplete is why a job that is not elastic cannot go on: some workers ended well before the
// others were done.
func (m *Machine) incomplete(n int) error {
	return fmt.Errorf("driver: only %d of %d workers are left, and the job is not elastic", n, m.size.NP)
}

func (m *Machine) publish(now time.Time, members []*Worker) {
	ids := make([]plan.SlotID, len(members))
	for i, w := range members {
		ids[i] = w.slot
	}
	slots, err := plan.Assign(ids, 0, 0)
	if err != nil {
		panic(fmt.Sprintf("driver: assigning ranks: %v", err))
	}
	world := plan.World{Generation: m.world.Generation + 1, Slots: slots}
	root := 0
	published := make([]job.PublishedSlot, len(members))
	for r, w := range members {
		if better(w, members[root]) {
			root = r
		}
		w.generation, w.rank = world.Generation, r
		m.enter(now, w, training)
		published[r] = job.PublishedSlot{Rank: r, Host: w.slot.Host, Slot: w.slot.Index, PID: w.pid}
	}
	m.generation = generation{
		world: world, published: PublishWorld{world, members, root, m.seq}, commits: members[root].join.Commits,
	}
	m.do(m.published)
	m.emit(now, job.WorldPublished, field("generation", m.world.Generation), field("size", len(members)),
		field("root", root), field("slots", published))
	for _, w := range m.workers {
		switch {
		case w.phase == waiting: // it came, but its slot is not wanted
			m.dismiss(now, w, DismissRemoved)
		case w.phase == training && w.generation != m.world.Generation: // it writes its last checkpoint still
			m.enter(now, w, leaving)
		}
	}
}

// better tells whether a is to be preferred to b as the source of everybody's state.
func better(a, b *Worker) bool {
	if a.holds != b.holds {
		return a.holds
	}
	return a.holds && a.join.Commits > b.join.Commits
}

// announce tells the members of a running world how the wanted slots differ from it: removals at
// once, additions when all that are being started stand at the door. A change that has gone away
// again is announced as none.
func (m *Machine) announce(now time.Time) {
	if m.world.Generation == 0 || !m.resetFrom.IsZero() || m.decided {
		return
	}
	var change plan.Change
	var members []*Worker
	door := false
	for _, w := range m.workers {
		switch {
		case w.phase == training:
			members = append(members, w)
			if !w.wanted {
				change |= plan.Removed
			}
		case w.phase == waiting && w.wanted:
			door = true
		}
	}
	// Whoever leaves makes room for another, in bounded time.
	if door && (m.announced&plan.Added != 0 || !m.newcomers(now)) {
		change |= plan.Added
	}
	if change == m.announced || len(members) == 0 {
		return
	}
	if change&plan.Removed == 0 {
		m.removeFrom = time.Time{}
	} else if m.announced&plan.Removed == 0 {
		m.removeFrom = now
	}
	m.announced = change
	m.seq++
	m.emit(now, job.HostsUpdated, field("seq", m.seq), field("change", change.String()))
	m.do(NotifyWorkers{m.seq, change, m.world.Generation, members})
}

// lossAfter is how long members have to notice a death by themselves. The kernel of a process that
// died tells its peers at once; only a host that was cut off takes its peers with it into the
// silence. As long as they die and come, one after the other, nobody needs to be told: a thousand
// take longer than this.
const lossAfter = 20 * time.Millisecond

// spreadLoss tells the members that still train in the current world which of its ranks are dead:
// nothing that they do together can come to its end any more. One that exited with 0 is not among
// the dead, it has said goodbye itself.
func (m *Machine) spreadLoss() {
	m.told, m.deadFrom = len(m.dead), time.Time{}
	m.tellLoss(slices.Sorted(slices.Values(m.dead)))
}

// tellLoss tells the members that still train which ranks are dead. None: their world is given up.
func (m *Machine) tellLoss(ranks []int) {
	var members []*Worker
	for _, w := range m.workers {
		if w.phase == training {
			members = append(members, w)
		}
	}
	if len(members) > 0 {
		m.do(TellLoss{Generation: m.world.Generation, Ranks: ranks, Members: members})
	}
}

// finish lets the others come to their end once one worker is done with training. What a worker
// does after its own training, such as saving a model, has a bound of its own.
func (m *Machine) finish(now time.Time) {
	for _, w := range m.workers {
		switch w.phase {
		case waiting:
			m.dismiss(now, w, DismissFinished)
		case starting:
			m.stop(now, w, "")
		}
	}
	if len(m.workers) == 0 {
		if m.late != nil && (m.late.Exit.Signal == 0 || !m.doneExit) {
			m.decide(now, m.late)
		}
		m.decide(now, nil)
		m.windDown(now)
	}
}

// stopUndone stops a worker that was to be done after the first one.
func (m *Machine) stopUndone(now time.Time, w *Worker) {
	if w.phase == training {
		m.log(Warn, "%s (rank %d) is not done %v after the first worker, stopping it", w.slot, w.rank, m.wait.Finish)
	}
	if w.phase == training || w.phase == leaving {
		m.stop(now, w, "")
	}
}

// windDown stops every worker, and ends the job when the last is gone.
func (m *Machine) windDown(now time.Time) {
	m.sendHome()
	if m.leavesLast() {
		m.answerAll()
	}
	for _, w := range m.workers {
		m.stop(now, w, "")
	}
	if m.endFrom.IsZero() {
		m.endFrom, m.reminded = now, false
	}
	if len(m.workers) > 0 || m.finished {
		return
	}
	m.finished = true
	m.result = m.withUnwritten(m.result)
	message := ""
	if m.result != nil {
		message = m.result.Error()
	}
	m.emit(now, job.JobDone, field("status", job.ExitStatus(m.result)), field("message", message))
	m.do(FinishJob{m.result})
}

// checkAlive ends the job when nobody is left who could go on with it.
func (m *Machine) checkAlive(now time.Time) {
	if !m.started || m.decided {
		return
	}
	alive, able := m.queued, false
	for _, w := range m.workers {
		if w.live() {
			alive++
			// What a member of the current world has is not known before it joins again.
			able = able || w.holds || w.phase == training
		}
	}
	switch {
	case m.progress && !able:
		m.decide(now, m.stateLost())
	case alive == 0 && m.bad != nil:
		m.decide(now, m.bad)
	case alive == 0 && m.went:
		// Nobody said done, but nobody ever committed either: commands that know nothing of hvdrun
		// end like this.
		m.decide(now, nil)
	}
}

func (m *Machine) stateLost() error {
	if m.bad == nil {
		return fmt.Errorf("%w: the last worker that had it has left", job.ErrStateLost)
	}
	return fmt.Errorf("%w: the last worker that had it is gone: %s", job.ErrStateLost, m.bad.What())
}

// lackSlots and lackWorkers start the clock of the wait for slots, and say what is waited for.
func (m *Machine) lackSlots(now time.Time, have, need int) {
	if m.shortFrom.IsZero() {
		m.shortFrom = now
		m.log(Info, "waiting up to %v for %d slots, %d there", m.wait.Elastic, need, have)
	}
}

func (m *Machine) lackWorkers(now time.Time, have int) {
	if m.shortFrom.IsZero() {
		m.shortFrom = now
		m.log(Info, "waiting up to %v for %d workers, %d there", m.wait.Elastic, m.size.Min, have)
	}
}

// startBy returns until when a worker that is being started must have joined. A job that is not
// elastic may run commands that never join; only when one of its workers has, the others must too.
func (m *Machine) startBy(w *Worker) (time.Time, bool) {
	switch {
	case m.size.Elastic:
		return w.since.Add(m.wait.Start), true
	case m.joined.IsZero():
		return time.Time{}, false
	case m.joined.After(w.since):
		return m.joined.Add(m.wait.Start), true
	}
	return w.since.Add(m.wait.Start), true
}

// notEnough is why the job ends when the elastic timeout has passed.
func (m *Machine) notEnough(now time.Time) error {
	need, there := m.size.Min, len(m.hosts.Available(now))
	switch {
	case !m.started:
		need = m.size.NP
	case m.unready && m.bad != nil:
		come := 0
		for _, w := range m.workers {
			if w.phase == waiting {
				come++
			}
		}
		return fmt.Errorf("%w: %d workers needed, %d came within %v, of %d slots; the first failure: %s",
			job.ErrNotEnoughSlots, need, come, m.wait.Elastic, there, m.bad.What())
	}
	return fmt.Errorf("%w: %d needed, %d there after %v", job.ErrNotEnoughSlots, need, there, m.wait.Elastic)
}
