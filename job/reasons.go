package job

import (
	"fmt"
	"maps"
	"slices"

	"github.com/hvdrun/hvdrun/plan"
)

// Reason is something that leads to another world.
type Reason struct {
	Kind Kind
	// Why is short, such as "rank 2 on b:0 was lost"; it is empty if another reason or a later
	// event says it. Text is the text of the event that Entry.Words returns; it is empty if other
	// reasons say more.
	Why, Text string
}

// mostReasons bounds the reasons of a kind that have a Text, those that have none, and the stalls.
const mostReasons = 1 << 14

// Reasons derives from a job's events the reasons for its next world. It is a pure value of bounded
// size. The zero Reasons is ready for use.
type Reasons struct {
	list    []Reason
	known   map[Reason]bool     // the Why, and the Kind and Text, of each element of list
	count   map[Kind]int        // number of reasons in list with a Text, by kind; without: under ""
	stalled map[string]bool     // places of workers that hold up others
	hosts   map[string]string   // the state of each host in the last list; nil: no list yet
	members map[plan.SlotID]int // the process ids of the last world; nil: no world yet
}

// Take returns the reasons since the last Take, in the order of their events. Each Why, and each
// Text of a kind, occurs once. The caller owns the slice.
func (r *Reasons) Take() []Reason {
	list := r.list
	r.list, r.known, r.count = nil, nil, nil
	return list
}

// Add takes the job's next event. It reads only Hosts of HostsFound, and Cause and Slots of
// WorldPublished.
func (r *Reasons) Add(e Entry) {
	switch e.Name {
	case HostsFound: // there may be thousands of hosts
		r.listed(e.Hosts)
		return
	case WorldPublished:
		r.published(e)
		return
	}
	kind, text := e.Words()
	switch e.Name {
	case Stalled:
		if r.stalled == nil {
			r.stalled = make(map[string]bool)
		}
		if e.Host != "" && len(r.stalled) < mostReasons {
			r.stalled[e.Place()] = true
		}
	case StallEnded:
		delete(r.stalled, e.Place())
	case WorkerDying:
		if r.stalled[e.Place()] {
			kind = KindStall
		}
		r.add(kind, lost(e), text)
	case WorkerExited:
		r.exited(e, text)
	case Draining:
		r.add(kind, e.Member()+" was asked to leave", text)
	case DrainAsked:
		r.add(kind, e.Place()+" is drained", text)
	case Excluded:
		if e.Until != nil { // after a failure, which is a reason itself
			r.add(kind, "", text)
		} else {
			r.add(kind, e.Place()+" is excluded", text)
		}
	case Returned:
		r.add(kind, e.Place()+" is back", "")
	case Scaled:
		r.add(kind, text, text)
	case HostsUpdated:
		if of := changed[kind]; of != "" {
			r.add(kind, "", of)
		}
	}
}

// changed describes changes of the hosts, by kind.
var changed = map[Kind]string{KindGrown: "slots were added", KindShrunk: "slots were removed", KindChanged: "slots were added and removed"}

// lost is the Why of WorkerDying and of the exit that follows.
func lost(e Entry) string { return e.Member() + " was lost" }

// exited adds the end of a worker as a reason, unless the worker is not in the last world.
func (r *Reasons) exited(e Entry, text string) {
	switch {
	case r.stalled[e.Place()]:
		delete(r.stalled, e.Place())
		r.add(KindStall, e.Member()+" held up the others", text)
	case !r.isMember(e):
	case e.Cause == "failed" && r.known[Reason{Why: lost(e)}]:
		r.add(KindFailure, "", text)
	case e.Cause == "failed":
		r.add(KindFailure, fmt.Sprintf("%s failed (%s)", e.Member(), e.Exit()), text)
	case e.Cause == "left" && len(r.members) > 0:
		r.add(KindOther, e.Member()+" left", "")
	}
}

// isMember reports whether the worker that ended is a member of the last world, rather than an
// earlier worker of the same slot. If no members are known, it counts as one.
func (r *Reasons) isMember(e Entry) bool {
	if e.Slot == nil || len(r.members) == 0 {
		return e.Slot != nil
	}
	pid, is := r.members[plan.SlotID{Host: e.Host, Index: *e.Slot}]
	return is && (pid == e.PID || pid == 0 || e.PID == 0)
}

// listed adds a reason for each host that is new, changed or missing in a list of hosts.
func (r *Reasons) listed(found []FoundHost) {
	now := make(map[string]string, len(found))
	for _, h := range found {
		now[h.Host] = "with " + plural(h.Slots, "slot")
		if h.Draining {
			now[h.Host] = "draining"
		}
	}
	if r.hosts != nil {
		for _, name := range slices.Sorted(maps.Keys(now)) {
			if was, known := r.hosts[name]; !known {
				r.add(KindGrown, name+" came", "")
			} else if was != now[name] {
				r.add(KindChanged, name+" is now "+now[name], "")
			}
		}
		for _, name := range slices.Sorted(maps.Keys(r.hosts)) {
			if _, there := now[name]; !there {
				r.add(KindShrunk, name+" went", "")
			}
		}
	}
	r.hosts = now
}

// published adds the cause of a world, if no other reason says more, and the workers that replace
// lost ones.
func (r *Reasons) published(e Entry) {
	cause, members := Cause(e.Cause), make(map[plan.SlotID]int, len(e.Slots))
	if !slices.ContainsFunc(r.list, func(had Reason) bool { return had.Why != "" }) {
		r.add(KindOther, causes[cause], "")
	}
	for _, s := range e.Slots {
		at := plan.SlotID{Host: s.Host, Index: s.Slot}
		members[at] = s.PID
		if _, was := r.members[at]; !was && (cause == CauseDeath || cause == CauseDeparture || cause == CauseStall) {
			r.add(KindOther, fmt.Sprintf("%s:%d is in its place", s.Host, s.Slot), "")
		}
	}
	r.members = members
}

// causes describes why a world was left, for worlds of which no event says it.
var causes = map[Cause]string{
	CauseBroken: "a connection between workers broke", CauseDeparture: "a worker left", CauseDeath: "a worker was lost",
	CauseStall: "workers held up the others",
}

// add adds a reason, without the Why or Text that an earlier reason has. A reason with neither is
// dropped.
func (r *Reasons) add(kind Kind, why, text string) {
	whyKey, textKey := Reason{Why: why}, Reason{Kind: kind, Text: text}
	if r.known[whyKey] {
		why = ""
	}
	if r.known[textKey] {
		text = ""
	}
	counts := kind
	if text == "" {
		counts = ""
	}
	if why == "" && text == "" || r.count[counts] >= mostReasons {
		return
	}
	if r.known == nil {
		r.known, r.count = make(map[Reason]bool), make(map[Kind]int)
	}
	r.known[whyKey], r.known[textKey] = true, true
	r.count[counts]++
	r.list = append(r.list, Reason{kind, why, text})
}
