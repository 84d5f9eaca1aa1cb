package rules

import "slices"

// Evidence is what a node has seen of another member's process.
type Evidence struct {
	// Refused: nobody listens at the member's address, or a firewall says so.
	Refused bool
	// Ended: the member's side has closed the connection that each process keeps open as long as
	// it lives.
	Ended bool
	// Replaced: another process answers at the member's address.
	Replaced bool
}

// Dead returns whether the evidence proves that the process is gone for good. A refusal alone does
// not: a firewall may refuse what the process would take. Nor does the end of a connection alone:
// what is between may have ended it.
func (e Evidence) Dead() bool { return e.Replaced || e.Refused && e.Ended }

// quorum returns whether those that have something are a quorum of a list of members: more than
// half of the members that are not dead; and of two the first alone, which may go on when the other
// is silent, while the other may not. Two quorums of up to four members have a member in common, or
// all of one are dead.
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

// members returns all members of lists, each once.
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

// sameMembers returns whether two lists have the same members, in whatever order.
func sameMembers(a, b []string) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(a, b)
}

// Voter is what a node has promised and has been told. The zero value is that of a process that has
// just been started.
type Voter struct {
	Name     string // the node's among the members; empty: it answers to all names
	Promised uint64
	Copy     Copy
}

// Answer does what a leader asks for. A node that has promised nothing to the leader refuses a Lead
// of a term that is not later than its own promise.
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
		// One that was sent before what the node has may arrive after it, on another connection.
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
	round []string // the members of the node's round
	asked []string // by the node, itself first
	heard map[string]bool
	Dead  map[string]bool // are known to be dead
	Best  Copy            // the newest of those who have promised
	Later uint64          // more than the promise of one that has refused; 0: none has
}

// NewBallot returns the ballot of a node, which nobody has answered. The term must be later than
// all that the node has promised. The node answers its Question itself, before it asks others.
func NewBallot(term uint64, own string, round []string) *Ballot {
	return &Ballot{term: term, round: round, asked: []string{own}, heard: make(map[string]bool), Dead: make(map[string]bool)}
}

// Question is what all members are asked.
func (b *Ballot) Question(member string) Question {
	return Question{To: member, Term: b.term, Lead: true}
}

// members returns those of the round, and those whom the newest copy names.
func (b *Ballot) members() []string { return members(append(slices.Clone(b.Best.Members), b.round)...) }

// Ask returns the members to ask that Ask has not returned before: a member refuses a second
// question of the same ballot. After each answer there may be more.
func (b *Ballot) Ask() []string {
	more := slices.DeleteFunc(b.members(), func(member string) bool { return slices.Contains(b.asked, member) })
	b.asked = append(b.asked, more...)
	return more
}

// Answered takes what a member says.
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

// Won returns whether the node leads. It needs a quorum of each list by which the newest copy was
// written, so that it knows all that was kept, and more than half of its round.
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

// Missing returns the members that are neither heard nor dead.
func (b *Ballot) Missing() []string {
	return slices.DeleteFunc(b.members(), func(m string) bool { return b.heard[m] || b.Dead[m] })
}

// Tenure is what a leader knows.
type Tenure struct {
	own     string
	term    uint64
	Copy    Copy
	changes []Change // the last ones, after the first base of the term
	base    uint64
	joint   uint64 // how many changes must be kept before the last list of members is the only one
	Others  map[string]*Standing
}

// Standing is how far another member has come.
type Standing struct {
	acked uint64 // the member has so many changes of the term
	whole bool   // the member needs the whole copy first
	dead  bool
}

// Begin returns the tenure of a node that has won. It goes on from the newest copy, which the
// node's own voter must be given.
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

// others returns the members but this one.
func others(list []string, own string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(member string) bool { return member == own })
}

// admit keeps the standings in step with the lists of members.
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

// Do makes a change, and returns what this node's voter must be asked. Where that has promised to
// follow another leader, nothing is kept any more.
func (t *Tenure) Do(ch Change) Question {
	q := Question{To: t.own, Term: t.term, From: t.Copy.Count, Changes: []Change{ch}}
	t.Copy.apply(ch)
	switch {
	case ch.Replace: // those that lack what was before get the whole copy, which is not longer
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

// manyChanges is how many changes that nobody lacks are kept at most.
const manyChanges = 1024

// forget drops the changes that no member lacks, apart from those that need the whole copy.
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

// Reform returns the change by which the members become those of a round, this node first. Until
// it is kept, a quorum of the last list that is by itself is needed too. ok is false where they are
// that already.
func (t *Tenure) Reform(round []string) (ch Change, ok bool) {
	list := ownFirst(t.own, round)
	if slices.Equal(list, t.Copy.Members[len(t.Copy.Members)-1]) {
		return Change{}, false
	}
	return Change{Members: [][]string{t.Copy.Members[0], list}}, true
}

// Settle returns the change by which the last list is the only one; ok is false where it is, or is
// not kept yet.
func (t *Tenure) Settle() (ch Change, ok bool) {
	if len(t.Copy.Members) < 2 || !t.Kept(t.joint) {
		return Change{}, false
	}
	return Change{Members: t.Copy.Members[1:]}, true
}

// Next returns what a member lacks, and how many changes it has after that; nil: nothing.
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

// Answered takes what a member says to what next has returned. It returns false where another node
// leads.
func (t *Tenure) Answered(member string, upTo uint64, r Reply) bool {
	s := t.Others[member]
	switch {
	case r.Promised > t.term:
		return false
	case s == nil: // it is no member any more
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

// Unreached takes that the connection to a member has failed, after which it is not known what the
// member has.
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

// Dead returns whether another member is known to be dead.
func (t *Tenure) Dead(member string) bool {
	s := t.Others[member]
	return s != nil && s.dead
}

// Kept returns whether so many changes are in the copy of each leader to come: they are with a
// quorum of each list of members.
func (t *Tenure) Kept(upTo uint64) bool {
	for _, list := range t.Copy.Members {
		if !quorum(list, t.has(upTo), t.Dead) {
			return false
		}
	}
	return true
}

// Everywhere returns whether all members that are not dead have so many changes.
func (t *Tenure) Everywhere(upTo uint64) bool {
	have, living := count(members(t.Copy.Members...), t.has(upTo), t.Dead)
	return have == living
}

// Alone returns whether all other members are dead.
func (t *Tenure) Alone() bool {
	for _, s := range t.Others {
		if !s.dead {
			return false
		}
	}
	return true
}
