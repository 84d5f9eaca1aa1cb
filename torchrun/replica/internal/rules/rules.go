package rules

import "slices"

// Evidence is what a node has observed of another member's process.
type Evidence struct {
	// Refused means that a connection to the member's address was refused: nobody listens there, or
	// a firewall refuses.
	Refused bool
	// Ended means that the member's end has closed the connection that each process keeps open as
	// long as it lives.
	Ended bool
	// Replaced means that another process answers at the member's address.
	Replaced bool
}

// Dead reports whether the evidence proves that the process is gone for good. A refused connection
// alone does not, because a firewall may have refused it. The end of a connection alone does not
// either, because something in between may have ended it.
func (e Evidence) Dead() bool { return e.Replaced || e.Refused && e.Ended }

// quorum reports whether the members that has selects are a quorum of a list of members: more than
// half of the members that are not dead. In a list of two members, the first alone is a quorum, so
// that it can continue when the other is silent, while the other cannot. Two quorums of a list of
// up to four members have a member in common, or all members of one of them are dead.
func quorum(list []string, has, dead func(member string) bool) bool {
	have, living := count(list, has, dead)
	return 2*have > living || living == 0 || len(list) == 2 && has(list[0]) && !dead(list[0])
}

func count(list []string, has, dead func(member string) bool) (have, living int) {
	for _, member := range list {
		if !dead(member) {
			living++
			if has(member) {
				have++
			}
		}
	}
	return have, living
}

// members returns the members of all lists, each once.
func members(lists ...[]string) (all []string) {
	for _, list := range lists {
		for _, member := range list {
			if !slices.Contains(all, member) {
				all = append(all, member)
			}
		}
	}
	return all
}

// sameMembers reports whether two lists have the same members, in any order.
func sameMembers(a, b []string) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(a, b)
}

// Voter is what a node has promised and has received. The zero value is that of a process that has
// just started.
type Voter struct {
	Name     string // name of the node among the members; empty: it answers to all names
	Promised uint64
	Copy     Copy
}

// Answer carries out a leader's request. It refuses a term earlier than its promise. It also
// refuses a Lead of the promised term itself, because it has promised that term already.
func (v *Voter) Answer(q Question) Reply {
	if q.To != v.Name && q.To != "" && v.Name != "" {
		return Reply{Other: true}
	}
	if q.Term < v.Promised || q.Lead && q.Term == v.Promised {
		return Reply{Promised: max(v.Promised, q.Term+1)}
	}
	v.Promised = q.Term
	switch {
	case q.Lead:
		c := v.Copy.Clone()
		return Reply{Promised: v.Promised, Copy: &c}
	case q.Whole != nil:
		// A copy that was sent earlier, over another connection, may arrive after a later one.
		if q.Whole.newer(v.Copy) {
			v.Copy = q.Whole.Clone()
		}
	case v.Copy.Term != q.Term || v.Copy.Count != q.From:
		return Reply{Promised: v.Promised, Gap: true}
	default:
		for _, ch := range q.Changes {
			v.Copy.apply(ch)
		}
	}
	return Reply{Promised: v.Promised}
}

// Ballot is a node's attempt to lead.
type Ballot struct {
	term  uint64
	round []string // members of the node's round
	asked []string // members that were asked, the node itself first
	heard map[string]bool
	Dead  map[string]bool // members that are known to be dead
	Best  Copy            // newest copy of the members that have promised
	Later uint64          // a term later than the promise of a member that has refused; 0: none has
}

// NewBallot returns a ballot without answers. term must be later than every term that the node has
// promised. The node must answer its own Question first, before it asks others.
func NewBallot(term uint64, own string, round []string) *Ballot {
	return &Ballot{term: term, round: round, asked: []string{own}, heard: make(map[string]bool), Dead: make(map[string]bool)}
}

// Question returns the question for a member.
func (b *Ballot) Question(member string) Question {
	return Question{To: member, Term: b.term, Lead: true}
}

// members returns the members of the round, and the members named by the newest copy.
func (b *Ballot) members() []string { return members(append(slices.Clone(b.Best.Members), b.round)...) }

// Ask returns the members to ask that it has not returned before, because a member refuses a second
// question of the same ballot. After each answer there may be further ones.
func (b *Ballot) Ask() []string {
	more := slices.DeleteFunc(b.members(), func(member string) bool { return slices.Contains(b.asked, member) })
	b.asked = append(b.asked, more...)
	return more
}

// Answered records the answer of a member.
func (b *Ballot) Answered(member string, r Reply) {
	switch {
	case r.Other:
		b.Dead[member] = true
	case r.Promised > b.term || r.Copy == nil:
		b.Later = max(b.Later, r.Promised+1)
	default:
		b.heard[member] = true
		if r.Copy.newer(b.Best) {
			b.Best = *r.Copy
		}
	}
}

// Won reports whether the node leads. It needs a quorum of each list of members in the newest copy,
// so that it knows everything that was kept, and more than half of its round.
func (b *Ballot) Won() bool {
	has, dead := func(m string) bool { return b.heard[m] }, func(m string) bool { return b.Dead[m] }
	for _, list := range b.Best.Members {
		if !quorum(list, has, dead) {
			return false
		}
	}
	have, living := count(b.round, has, dead)
	last := len(b.Best.Members) - 1
	return b.Later == 0 && (2*have > living || last >= 0 && sameMembers(b.Best.Members[last], b.round))
}

// Missing returns the members that have neither answered nor are dead.
func (b *Ballot) Missing() []string {
	return slices.DeleteFunc(b.members(), func(m string) bool { return b.heard[m] || b.Dead[m] })
}

// Tenure is the state of a leader.
type Tenure struct {
	own     string
	term    uint64
	Copy    Copy
	changes []Change // changes of the term after the first base ones
	base    uint64
	joint   uint64 // the change that must be kept before Settle
	Others  map[string]*Standing
}

// Standing is the progress of another member.
type Standing struct {
	acked uint64 // number of changes of the term that the member has
	whole bool   // the member needs the whole copy first
	dead  bool
}

// Begin returns the tenure of a node that has won. It continues from the newest copy, which must
// also be given to the node's own voter.
func (b *Ballot) Begin(own string) *Tenure {
	t := &Tenure{own: own, term: b.term, Copy: b.Best.Clone(), Others: make(map[string]*Standing)}
	t.Copy.Term, t.Copy.Count = b.term, 0
	if len(t.Copy.Members) == 0 {
		t.Copy.Members = [][]string{ownFirst(own, b.round)}
	}
	t.admit()
	for member, dead := range b.Dead {
		if s := t.Others[member]; s != nil {
			s.dead = dead
		}
	}
	return t
}

func ownFirst(own string, list []string) []string {
	return append([]string{own}, others(list, own)...)
}

// others returns the members of list except own.
func others(list []string, own string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(member string) bool { return member == own })
}

// admit adapts the standings to the lists of members.
func (t *Tenure) admit() {
	now := others(members(t.Copy.Members...), t.own)
	for member := range t.Others {
		if !slices.Contains(now, member) {
			delete(t.Others, member)
		}
	}
	for _, member := range now {
		if t.Others[member] == nil {
			t.Others[member] = &Standing{whole: true}
		}
	}
}

// Do makes a change, and returns the question for this node's own voter. If the voter has promised
// to follow another leader, nothing is kept any longer.
func (t *Tenure) Do(ch Change) Question {
	q := Question{To: t.own, Term: t.term, From: t.Copy.Count, Changes: []Change{ch}}
	t.Copy.apply(ch)
	switch {
	case ch.Replace: // members that lack earlier changes get the whole copy, which is not longer
		t.changes, t.base = nil, t.Copy.Count
	default:
		t.changes = append(t.changes, ch)
		t.forget()
	}
	if len(ch.Members) > 0 {
		t.joint = t.Copy.Count
		t.admit()
	}
	return q
}

// manyChanges is the number of changes beyond which those that no member lacks are dropped.
const manyChanges = 1024

// forget drops the changes that no member lacks. Members that need the whole copy do not count.
func (t *Tenure) forget() {
	if len(t.changes) < manyChanges {
		return
	}
	least := t.Copy.Count
	for _, s := range t.Others {
		if !s.whole && !s.dead {
			least = min(least, s.acked)
		}
	}
	if least >= t.base+manyChanges {
		t.changes, t.base = slices.Clone(t.changes[least-t.base:]), least
	}
}

// Reform returns the change that makes the members of a round, with this node first, the members of
// the copy. Until Settle, a quorum of the previous list is needed too. ok is false if they already
// are the members.
func (t *Tenure) Reform(round []string) (ch Change, ok bool) {
	list := ownFirst(t.own, round)
	if slices.Equal(list, t.Copy.Members[len(t.Copy.Members)-1]) {
		return Change{}, false
	}
	return Change{Members: [][]string{t.Copy.Members[0], list}}, true
}

// Settle returns the change that makes the last list of members the only one. ok is false if it
// already is, or if Reform's change is not kept yet.
func (t *Tenure) Settle() (ch Change, ok bool) {
	if len(t.Copy.Members) < 2 || !t.Kept(t.joint) {
		return Change{}, false
	}
	return Change{Members: t.Copy.Members[1:]}, true
}

// Next returns the question that brings a member up to date, and the number of changes that the
// member has afterwards. q is nil if it lacks nothing.
func (t *Tenure) Next(member string) (q *Question, upTo uint64) {
	s := t.Others[member]
	switch {
	case s.whole || s.acked < t.base:
		whole := t.Copy.Clone()
		q = &Question{To: member, Term: t.term, Whole: &whole}
	case s.acked < t.Copy.Count:
		q = &Question{To: member, Term: t.term, From: s.acked, Changes: slices.Clone(t.changes[s.acked-t.base:])}
	}
	return q, t.Copy.Count
}

// Answered records a member's answer to the question that Next has returned. It returns false if
// another node leads.
func (t *Tenure) Answered(member string, upTo uint64, r Reply) bool {
	s := t.Others[member]
	switch {
	case r.Promised > t.term:
		return false
	case s == nil: // it is no longer a member
	case r.Other:
		s.dead = true
	default:
		s.whole, s.dead = r.Gap, false
		if !r.Gap {
			s.acked = max(s.acked, upTo)
		}
	}
	return true
}

// Unreached records that the connection to a member has failed. It is then unknown what the member
// has.
func (t *Tenure) Unreached(member string, e Evidence) {
	if s := t.Others[member]; s != nil {
		s.whole, s.dead = true, s.dead || e.Dead() // until it answers
	}
}

func (t *Tenure) has(upTo uint64) func(member string) bool {
	return func(member string) bool {
		s := t.Others[member]
		return member == t.own || s != nil && !s.whole && s.acked >= upTo
	}
}

// Dead reports whether another member is known to be dead.
func (t *Tenure) Dead(member string) bool {
	s := t.Others[member]
	return s != nil && s.dead
}

// Kept reports whether the first upTo changes are certain to be in the copy of every later leader,
// because a quorum of each list of members has them.
func (t *Tenure) Kept(upTo uint64) bool {
	for _, list := range t.Copy.Members {
		if !quorum(list, t.has(upTo), t.Dead) {
			return false
		}
	}
	return true
}

// Everywhere reports whether all members that are not dead have the first upTo changes.
func (t *Tenure) Everywhere(upTo uint64) bool {
	have, living := count(members(t.Copy.Members...), t.has(upTo), t.Dead)
	return have == living
}

// Alone reports whether all other members are dead.
func (t *Tenure) Alone() bool {
	for _, s := range t.Others {
		if !s.dead {
			return false
		}
	}
	return true
}
