// Package agreement decides which asynchronous operations the ranks of a group perform together,
// since each rank submits operations in its own order. A [Table] is the state that is equal on all
// ranks: the names, the votes on them, the resulting buckets, and the guess of the next bucket. The
// package is pure.
package agreement

import (
	"cmp"
	"iter"
	"slices"

	"github.com/hvdrun/hvdrun/collective/internal/frame"
)

// Table is what the ranks know about each other's submissions, and what this rank has yet to
// announce. A submission is an H; the zero H stands for no submission.
type Table[H comparable] struct {
	rank, size int
	Fusion     int // smallest threshold of all ranks, in bytes
	Alone      int // size in bytes from which a tensor has its own bucket
	ids        map[string]int
	table      []Entry[H] // by id; equal on all ranks, except Mine
	Pending    int        // number of entries with Mine
	joined     []bool     // by rank
	Contribute int        // number of ranks that have not joined
	votes      []uint8
	buckets    []Bucket
	Guess      Guess
	Awaited    bool // some ranks have submitted operations that others have not

	unannounced   []unannounced[H]
	JoinAnnounced bool // this rank has announced that it joins
	statement     []uint8
}

// Entry is a name that all ranks know.
type Entry[H comparable] struct {
	Name    string
	Request Request
	Mine    H      // this rank's submission
	Ended   uint64 // number of operations of the name that have ended
}

// unannounced is a submission that has not been announced to the other ranks.
type unannounced[H comparable] struct {
	name    string
	request *Request
	mine    H
}

// NewTable returns the table of a rank before any submission.
func NewTable[H comparable](rank, size int) Table[H] {
	return Table[H]{rank: rank, size: size, Alone: aloneOnWire, ids: map[string]int{}, joined: make([]bool, size), Contribute: size}
}

// At returns the entry of an id. It is valid until names are announced.
func (a *Table[H]) At(id int) *Entry[H] { return &a.table[id] }

// News reports whether this rank has submissions to announce.
func (a *Table[H]) News() bool { return len(a.unannounced) > 0 }

// Whole reports whether no rank has joined.
func (a *Table[H]) Whole() bool { return a.Contribute == a.size }

// Submit adds a submission of this rank. It keeps the request, which must not change.
func (a *Table[H]) Submit(name string, r *Request, mine H) {
	if id, ok := a.ids[name]; ok && a.table[id].Request == *r {
		a.hold(id, mine)
	} else {
		a.unannounced = append(a.unannounced, unannounced[H]{name, r, mine})
	}
}

func (a *Table[H]) hold(id int, mine H) {
	a.table[id].Mine = mine
	a.Pending++
}

// Take removes a submission of this rank and returns it; the zero H if the rank has joined.
func (a *Table[H]) Take(id int) (mine H) {
	var none H
	t := &a.table[id]
	if mine = t.Mine; mine != none {
		t.Mine = none
		a.Pending--
	}
	return mine
}

// Submitted yields this rank's submissions whose names all ranks know.
func (a *Table[H]) Submitted() iter.Seq[H] {
	return func(yield func(H) bool) {
		var none H
		for i := range a.table {
			if mine := a.table[i].Mine; mine != none && !yield(mine) {
				return
			}
		}
	}
}

// Asked is what the ranks request besides operations.
type Asked struct{ News, Stall bool }

// Indices of a vote, before the two of each name.
const (
	newsVote  = iota // 0 if a rank has news
	stallVote        // 0 if a rank asks for a stall report
	nameVotes
)

// Vote returns this rank's votes, in a slice that the caller reduces in place by Min over all
// ranks. For each name there are two: whether the rank has submitted it, and whether it has not. So
// all ranks also learn which names only some have submitted. want is what this rank requests.
func (a *Table[H]) Vote(want Asked) []uint8 {
	var none H
	a.votes = append(a.votes[:0], 1, 1)
	if want.News {
		a.votes[newsVote] = 0
	}
	if want.Stall {
		a.votes[stallVote] = 0
	}
	all := a.joined[a.rank] && a.Contribute > 0
	for i := range a.table {
		switch {
		case a.table[i].Mine != none:
			a.votes = append(a.votes, 1, 0)
		case all:
			a.votes = append(a.votes, 1, 1)
		default:
			a.votes = append(a.votes, 0, 1)
		}
	}
	return a.votes
}

// Voted returns what the ranks request, after the votes have been reduced.
func (a *Table[H]) Voted() Asked {
	a.Awaited = false
	for i := nameVotes; i < len(a.votes); i += 2 {
		a.Awaited = a.Awaited || a.votes[i] == 0 && a.votes[i+1] == 0
	}
	return Asked{News: a.votes[newsVote] == 0, Stall: a.votes[stallVote] == 0}
}

// elected reports whether all ranks have submitted a name.
func (a *Table[H]) elected(id int) bool { return a.votes[nameVotes+2*id] != 0 }

// Say returns what this rank announces: its news and, if join is true, that it joins.
func (a *Table[H]) Say(join bool) []byte {
	own := a.statement[:0]
	for _, u := range a.unannounced {
		own = u.request.state(own, u.name)
	}
	if join {
		own = append(own, joinStatement)
		a.JoinAnnounced = true
	}
	a.statement = own
	return own
}

// Hear derives the same state on all ranks from the announcements of all. It returns the highest
// rank that joins in these announcements, or −1. fault, if not nil, is the reason why the group
// ends.
func (a *Table[H]) Hear(parts [][]byte) (last int, fault *frame.Notice) {
	invalid := func(err error, rank int) (int, *frame.Notice) {
		n := frame.Gone(err, rank)
		return -1, &n
	}
	var said []statement
	last = -1
	for rank, part := range parts {
		from, joins, err := parseStatements(part, rank)
		if err != nil {
			return invalid(err, rank)
		}
		for i := range from {
			if r := &from[i].request; r.moves() && !r.Refused && int(r.Root) >= a.size {
				return invalid(frame.ErrInvalid, rank)
			}
		}
		said = append(said, from...)
		if joins && !a.joined[rank] {
			a.joined[rank], last = true, rank
			a.Contribute--
		}
	}
	slices.SortStableFunc(said, func(a, b statement) int { return cmp.Compare(a.name, b.name) }) // then by rank
	for i := range said {
		if fault := a.define(&said[i], said[:i]); fault != nil {
			return -1, fault
		}
	}
	for _, u := range a.unannounced {
		a.hold(a.ids[u.name], u.mine)
	}
	clear(a.unannounced)
	a.unannounced = a.unannounced[:0]
	return last, nil
}

// define stores a rank's statement about a name. It returns a fault if the statement contradicts an
// earlier statement of another rank, or this rank's submission.
func (a *Table[H]) define(s *statement, before []statement) (fault *frame.Notice) {
	var none H
	if len(before) > 0 && before[len(before)-1].name == s.name {
		if other := before[len(before)-1]; other.request != s.request {
			return mismatch(other, *s)
		}
		return nil
	}
	id, known := a.ids[s.name]
	if !known {
		a.ids[s.name] = len(a.table)
		a.table = append(a.table, Entry[H]{Name: s.name, Request: s.request})
		return nil
	}
	t := &a.table[id]
	if t.Mine != none && t.Request != s.request {
		return mismatch(statement{rank: a.rank, name: s.name, request: t.Request}, *s)
	}
	t.Request = s.request
	return nil
}

func mismatch(a, b statement) *frame.Notice {
	n := frame.Mismatched(a.rank, a.request.call().Call(), b.rank, b.request.call().Call())
	n.Tensor = a.name
	return &n
}

// Restart resets the state after all ranks have joined, so that no rank counts as joined.
func (a *Table[H]) Restart() {
	clear(a.joined)
	a.Contribute, a.JoinAnnounced = a.size, false
}

// Forget drops all names, on all ranks in the same cycle, so that unused names do not accumulate.
// This rank's submissions are announced again.
func (a *Table[H]) Forget() {
	var none H
	for i := range a.table {
		if t := &a.table[i]; t.Mine != none {
			again := t.Request
			a.unannounced = append(a.unannounced, unannounced[H]{t.Name, &again, t.Mine})
		}
	}
	a.table, a.Pending, a.Guess.Times = a.table[:0], 0, 0
	clear(a.ids)
}

// Full reports whether there are so many names that the ranks call Forget.
func (a *Table[H]) Full() bool { return len(a.table) > maxNames }

const maxNames = 8192 // number of names above which the ranks forget all

// The state of a name on a rank, in a stall report.
const (
	missing = iota
	here
	tooLong // submitted, and waiting for too long
)

// Waiting returns, for each name, its state on this rank.
func (a *Table[H]) Waiting(late func(H) bool) []uint8 {
	var none H
	state := make([]uint8, len(a.table))
	for i := range a.table {
		switch mine := a.table[i].Mine; {
		case mine != none && late(mine):
			state[i] = tooLong
		case mine != none || a.joined[a.rank]:
			state[i] = here
		}
	}
	return state
}

// Stalled calls report for each name for which some rank has waited too long, with the ranks that
// have not submitted it. all has the result of Waiting of each rank. If that of a rank is invalid,
// Stalled returns the rank, and otherwise −1.
func (a *Table[H]) Stalled(all [][]uint8, report func(name string, missing []int)) (invalid int) {
	for i := range a.table {
		var absent []int
		late := false
		for rank, s := range all {
			if len(s) != len(a.table) {
				return rank
			}
			late = late || s[i] == tooLong
			if s[i] == missing {
				absent = append(absent, rank)
			}
		}
		if late && len(absent) > 0 {
			report(a.table[i].Name, absent)
		}
	}
	return -1
}

// Elect returns the names that the last vote found ready, in buckets that depend only on the vote
// and the table. It calls refused for each name whose operation all ranks refuse. The buckets are
// valid until the next call.
func (a *Table[H]) Elect(refused func(id int)) []Bucket {
	if a.Contribute == 0 {
		return nil
	}
	used := 0
	for id := range a.table {
		if !a.elected(id) {
			continue
		}
		r := &a.table[id].Request
		if r.Refused {
			refused(id)
			continue
		}
		bytes := int(r.Count) * r.wire().Size()
		at := -1
		for i := used - 1; i >= 0 && at < 0; i-- {
			if b := &a.buckets[i]; b.fits(r, bytes, a.Alone, a.Fusion) {
				at = i
			} else if b.alike(r) {
				b.full = true // later tensors go into a later bucket, to keep their order
			}
		}
		if at < 0 {
			at = used
			if used++; used > len(a.buckets) {
				a.buckets = append(a.buckets, Bucket{})
			}
			a.buckets[at] = Bucket{Do: r.Do, Wire: r.wire(), Op: r.Op, Compression: r.Compression, Elsewhere: r.Elsewhere,
				IDs: a.buckets[at].IDs[:0], full: r.ownBucket(bytes, a.Alone)}
		}
		b := &a.buckets[at]
		b.IDs, b.Bytes = append(b.IDs, id), b.Bytes+bytes
	}
	return a.buckets[:used]
}
