package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/hvdrun/hvdrun/collective"
)

// program is a case: ranks on hosts, their connections, their steps and disturbances. Every program
// returned by tidy can be run.
type program struct {
	Seed        uint64
	Hosts       []int  // number of ranks on each host
	Sockets     []int  `json:",omitempty"` // hosts whose ranks do not use shared memory
	Encrypt     bool   `json:",omitempty"`
	Connections int    `json:",omitempty"`
	Algorithm   string `json:",omitempty"`
	Fusion      int    `json:",omitempty"` // bytes, as in collective.Config
	Cycle       int    `json:",omitempty"` // microseconds, as in collective.Config

	Buffers int `json:",omitempty"` // bytes of the kernel's buffer of each connection, in each direction; 0: default
	Busy    int `json:",omitempty"` // number of busy loops beside the ranks
	Procs   int `json:",omitempty"` // GOMAXPROCS of each rank; 0: default

	Subsets   []subset `json:",omitempty"`
	Steps     []step
	Disturbed []disturbance `json:",omitempty"`
}

// subset is a group of some ranks. Group 0 is the group of all ranks, group i is Subsets[i−1].
type subset struct {
	Of    int   // parent group, an earlier one
	Ranks []int // ranks in that group
}

// disturbance is a disturbance of a rank at a step.
type disturbance struct {
	Rank, Step int    // step −1: before the rank connects, for late and stop
	Kind       string // late, stop, abort or cancel
	After      int    `json:",omitempty"` // microseconds after the start of the step
	For        int    `json:",omitempty"` // milliseconds; for late and stop
}

const (
	late   = "late"   // the rank begins the step later
	stop   = "stop"   // its process is suspended by SIGSTOP and continued
	abort  = "abort"  // the rank aborts the group of all ranks
	cancel = "cancel" // the context of its operations ends
)

// aborts reports whether a rank ends the groups of all ranks, which can make their operations fail.
// If an operation succeeds nevertheless, its result is right.
func (p *program) aborts() bool {
	return slices.ContainsFunc(p.Disturbed, func(d disturbance) bool { return d.Kind == abort || d.Kind == cancel })
}

// step is an operation of all ranks of a group, repeated Times times.
type step struct {
	Do       string
	Group    int    `json:",omitempty"`
	Type     string `json:",omitempty"`
	Op       string `json:",omitempty"`
	Count    int    `json:",omitempty"` // elements of a rank
	Tensors  []int  `json:",omitempty"` // elements of each tensor, for operations on several tensors; replaces Count
	Uneven   bool   `json:",omitempty"` // numbers of elements differ between ranks, if permitted
	Root     int    `json:",omitempty"`
	Into     bool   `json:",omitempty"` // the form that puts the result into memory of the caller
	Counts   bool   `json:",omitempty"` // the form whose parts have lengths of the caller's choice
	Times    int
	Alloc    bool   `json:",omitempty"` // memory of collective.Alloc
	Rough    bool   `json:",omitempty"` // floating-point numbers whose sums are rounded
	Compress string `json:",omitempty"`
	Scale    bool   `json:",omitempty"` // by powers of two, before and after
	Beside   bool   `json:",omitempty"` // the next step begins before this one has ended
	Wrong    *wrong `json:",omitempty"`

	surplus bool // one part more than the number of ranks
}

// wrong is an error in the calls of a step, which must be refused.
type wrong struct {
	Rank int // rank in the step's group whose call differs, which ends the group; −1: all calls are wrong, and the group stays usable
	How  string
}

const (
	allReduce  = "AllReduce"
	compressed = "AllReduceCompressed"
	broadcast  = "Broadcast"
	bytesOp    = "BroadcastBytes"
	allGather  = "AllGather"
	scatter    = "ReduceScatter"
	allToAll   = "AllToAll"
	barrier    = "Barrier"
	async      = "AllReduceAsync"
	grouped    = "GroupedAllReduce"
	elsewhere  = "AllReduceElsewhere"
	join       = "Join"
	tree       = "ReduceTree"
	movesOp    = "Moves" // BroadcastAsync, AllGatherIntoAsync and ReduceScatterIntoAsync
	messagesOp = "Messages"
	resubset   = "Subset" // a subset of the group is created, used once and closed
)

// operations are all operations of steps.
var operations = []string{allReduce, compressed, broadcast, bytesOp, allGather, scatter, allToAll, barrier, async, grouped, elsewhere,
	join, resubset, tree, movesOp, messagesOp}

// background reports whether the operation runs beside blocking ones: by the group's engine, or
// between two ranks.
func (s *step) background() bool {
	return slices.Contains([]string{async, grouped, elsewhere, join, movesOp, messagesOp}, s.Do)
}

// several reports whether the operation takes several tensors.
func (s *step) several() bool { return s.background() }

// reduces reports whether the operation combines elements.
func (s *step) reduces() bool {
	return s.background() || slices.Contains([]string{allReduce, compressed, scatter, resubset, tree}, s.Do)
}

// reducesInPlace reports whether the operation is one blocking all-reduce, compressed or not.
func (s *step) reducesInPlace() bool { return s.Do == allReduce || s.Do == compressed }

// counts returns the number of elements of each tensor of a rank.
func (s *step) counts() []int {
	if s.several() {
		return s.Tensors
	}
	return []int{s.Count}
}

// ranks returns the number of all ranks.
func (p *program) ranks() int {
	n := 0
	for _, here := range p.Hosts {
		n += here
	}
	return n
}

// hostOf returns the number of a rank's host.
func (p *program) hostOf(rank int) int {
	for host, here := range p.Hosts {
		if rank < here {
			return host
		}
		rank -= here
	}
	return -1
}

// apart reports whether the ranks of a host do not use shared memory.
func (p *program) apart(host int) bool { return slices.Contains(p.Sockets, host) }

// members returns the ranks of a group, as numbered in the group of all ranks.
func (p *program) members(group int) []int {
	if group == 0 {
		all := make([]int, p.ranks())
		for i := range all {
			all[i] = i
		}
		return all
	}
	s := p.Subsets[group-1]
	of := p.members(s.Of)
	var all []int
	for _, place := range s.Ranks {
		all = append(all, of[place])
	}
	return all
}

// transport names the connections between ranks.
func (p *program) transport() string {
	sharing := false
	for host, here := range p.Hosts {
		sharing = sharing || here > 1 && !p.apart(host)
	}
	over := "TCP"
	if p.Encrypt {
		over = "TLS"
	}
	switch {
	case sharing && len(p.Hosts) == 1:
		return "shared memory"
	case sharing:
		return "shared memory and " + over
	}
	return over
}

// mode names the way in which the operation is run.
func (s *step) mode() string {
	switch {
	case s.Wrong != nil && s.Wrong.Rank < 0:
		return "refused on all"
	case s.Wrong != nil:
		return "refused on one"
	case s.Group > 0:
		return "in a subset"
	case s.background():
		return "in the background"
	}
	return "blocking"
}

// bytes returns the size of the tensors of one rank, for one repetition.
func (s *step) bytes() int {
	n := 0
	for _, count := range s.counts() {
		n += count * widthOf(s.Type)
	}
	return n
}

// sizeClass names the size for the summary.
func (s *step) sizeClass() string {
	n := s.bytes()
	switch {
	case n == 0:
		return "0: 0 B"
	case n <= 64:
		return "1: to 64 B"
	case n <= 64<<10:
		return "2: to 64 KiB"
	case n <= 1<<20:
		return "3: to 1 MiB"
	case n <= 16<<20:
		return "4: to 16 MiB"
	case n <= 64<<20:
		return "5: to 64 MiB"
	}
	return "6: to 256 MiB"
}

// String describes the step in a line.
func (s *step) String() string {
	var words []string
	add := func(when bool, format string, args ...any) {
		if when {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	add(true, "%s", s.Do)
	add(s.Group > 0, "in group %d", s.Group)
	add(s.Times > 1, "%d times", s.Times)
	add(s.several(), "of %v", s.Tensors)
	add(!s.several() && s.Do != barrier, "of %d", s.Count)
	add(s.Do != barrier, "%s", s.Type)
	add(s.reduces(), "(%s)", s.Op)
	add(s.Do == broadcast || s.Do == bytesOp || s.Do == movesOp, "from %d", s.Root)
	add(s.Compress != "", "as %s", s.Compress)
	add(s.Uneven, "uneven")
	add(s.Into, "into")
	add(s.Counts, "counted")
	add(s.Alloc, "allocated")
	add(s.Rough, "rough")
	add(s.Scale, "scaled")
	add(s.Beside, "beside the next")
	add(s.Wrong != nil && s.Wrong.Rank < 0, "invalid on all: %s", s.how())
	add(s.Wrong != nil && s.Wrong.Rank >= 0, "invalid on rank %d: %s", s.badRank(), s.how())
	return strings.Join(words, " ")
}

func (s *step) how() string {
	if s.Wrong == nil {
		return ""
	}
	return s.Wrong.How
}

func (s *step) badRank() int {
	if s.Wrong == nil {
		return -1
	}
	return s.Wrong.Rank
}

// String describes the whole program, a line per step.
func (p *program) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "hosts of %v ranks, %s, %d connections", p.Hosts, p.transport(), max(1, p.Connections))
	for _, x := range []struct {
		when bool
		text string
	}{
		{len(p.Sockets) > 0, fmt.Sprintf("no shared memory on hosts %v", p.Sockets)},
		{p.Algorithm != "", "algorithm " + p.Algorithm},
		{p.Fusion > 0, fmt.Sprintf("fusion up to %d bytes", p.Fusion)},
		{p.Cycle != 0, fmt.Sprintf("cycles of %d µs", p.Cycle)},
		{p.Buffers > 0, fmt.Sprintf("socket buffers of %d bytes", p.Buffers)},
		{p.Busy > 0, fmt.Sprintf("%d busy loops", p.Busy)},
		{p.Procs > 0, fmt.Sprintf("GOMAXPROCS=%d", p.Procs)},
	} {
		if x.when {
			b.WriteString(", " + x.text)
		}
	}
	b.WriteString("\n")
	for i, s := range p.Subsets {
		fmt.Fprintf(&b, "  group %d: ranks %v of group %d\n", i+1, s.Ranks, s.Of)
	}
	for i := range p.Steps {
		fmt.Fprintf(&b, "  step %d: %s\n", i, &p.Steps[i])
	}
	for _, d := range p.Disturbed {
		fmt.Fprintf(&b, "  rank %d: %s", d.Rank, d.Kind)
		if d.For > 0 {
			fmt.Fprintf(&b, " for %d ms", d.For)
		}
		fmt.Fprintf(&b, ", %d µs after the beginning of step %d\n", d.After, d.Step)
	}
	return b.String()
}

// clone returns a deep copy.
func (p *program) clone() *program {
	q := *p
	q.Hosts, q.Sockets, q.Steps = slices.Clone(p.Hosts), slices.Clone(p.Sockets), slices.Clone(p.Steps)
	q.Disturbed, q.Subsets = slices.Clone(p.Disturbed), slices.Clone(p.Subsets)
	for i := range q.Subsets {
		q.Subsets[i].Ranks = slices.Clone(q.Subsets[i].Ranks)
	}
	for i := range q.Steps {
		s := &q.Steps[i]
		s.Tensors = slices.Clone(s.Tensors)
		if s.Wrong != nil {
			w := *s.Wrong
			s.Wrong = &w
		}
	}
	return &q
}

// tidy returns a valid program from one from which ranks, hosts, subsets or steps were removed.
func (p *program) tidy() *program {
	p.Sockets = slices.DeleteFunc(p.Sockets, func(host int) bool { return host >= len(p.Hosts) })
	for i := range p.Subsets {
		s := &p.Subsets[i]
		if s.Of > i {
			s.Of = 0
		}
		size := len(p.members(s.Of))
		s.Ranks = slices.DeleteFunc(s.Ranks, func(r int) bool { return r >= size })
		if len(s.Ranks) == 0 {
			s.Ranks = []int{0}
		}
	}
	p.Disturbed = slices.DeleteFunc(p.Disturbed, func(d disturbance) bool { return d.Rank >= p.ranks() || d.Step >= len(p.Steps) })
	for i := range p.Steps {
		s := &p.Steps[i]
		if s.Group > len(p.Subsets) {
			s.Group = 0
		}
		size := len(p.members(s.Group))
		s.Root %= size
		s.Times = max(1, s.Times)
		if w := s.Wrong; w != nil && w.Rank >= 0 {
			w.Rank %= size
			if size == 1 || i < len(p.Steps)-1 {
				s.Wrong = nil
			} else if i > 0 {
				p.Steps[i-1].Beside = false // no other operation can run when the group ends
			}
		}
		if s.Wrong != nil {
			s.Times, s.Beside = 1, false
		}
	}
	if len(p.Steps) > 0 {
		p.Steps[len(p.Steps)-1].Beside = false
	}
	return p
}

var (
	types = []string{"float32", "float64", "float16", "bfloat16",
		"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
	floating = types[:4]
	widths   = map[string]int{"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2,
		"int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
	reductions = map[string]collective.Op{"sum": collective.Sum, "average": collective.Average, "min": collective.Min,
		"max": collective.Max, "product": collective.Product, "adasum": collective.Adasum}
	compressions = map[string]collective.Compression{"float16": collective.CompressFloat16, "bfloat16": collective.CompressBFloat16}
)

// widthOf returns the size of an element in bytes.
func widthOf(name string) int {
	if w := widths[name]; w > 0 {
		return w
	}
	return 1
}
