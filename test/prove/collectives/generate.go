package main

import (
	"math/rand/v2"
	"slices"
)

// Bounds on the cost of a case. The bytes are those of the tensors of all ranks, times the
// repetitions: with the copies that operations and checks make, the largest case takes about 8 GiB
// of memory.
const (
	fewBytes   = 96 << 20
	usualBytes = 512 << 20
	mostBytes  = 2 << 30
	mostSteps  = 10
	abortBytes = 256 << 20 // of the step in which a rank ends the groups
)

// dice is a seeded random generator.
type dice struct{ *rand.Rand }

func newDice(seed uint64) dice { return dice{rand.New(rand.NewPCG(seed, 0x70726f7665))} }

// chance returns true with a probability in percent.
func (d dice) chance(percent int) bool { return d.IntN(100) < percent }

// pick returns a random value by weight.
func pick[T any](d dice, weights []int, values ...T) T {
	sum := 0
	for _, w := range weights {
		sum += w
	}
	at := d.IntN(sum)
	for i, w := range weights {
		if at -= w; at < 0 {
			return values[i]
		}
	}
	return values[len(values)-1]
}

// one returns a random value.
func one[T any](d dice, values []T) T { return values[d.IntN(len(values))] }

// generate returns the program of a seed.
func generate(seed uint64) *program {
	d := newDice(seed)
	p := &program{Seed: seed}
	hosts := pick(d, []int{3, 5, 2, 2}, 1, 2, 3, 4)
	each := func() int { return pick(d, []int{3, 5, 2, 3, 2}, 1, 2, 3, 4, 8) }
	usual, uneven := each(), d.chance(20)
	for range hosts {
		if uneven {
			usual = each()
		}
		p.Hosts = append(p.Hosts, usual)
	}
	p.connect(d)
	p.disturb(d)
	p.divide(d)
	p.act(d)
	for range d.IntN(4) {
		if d.chance(60) {
			continue
		}
		x := disturbance{Rank: d.IntN(p.ranks()), Step: d.IntN(len(p.Steps)+1) - 1, Kind: late, For: 1 + d.IntN(400)}
		if x.Step >= 0 && d.chance(60) {
			x.Kind, x.After = stop, d.IntN(1+1<<d.IntN(18))
		}
		p.Disturbed = append(p.Disturbed, x)
	}
	if d.chance(15) {
		p.abort(d)
	}
	return p.tidy()
}

// abort makes a rank end the groups during a step, often one in which ranks of a host reduce
// tensors in place.
func (p *program) abort(d dice) {
	x := disturbance{Rank: d.IntN(p.ranks()), Step: d.IntN(len(p.Steps)), Kind: pick(d, []int{3, 1}, abort, cancel), After: d.IntN(1 + 1<<d.IntN(18))}
	if d.chance(60) {
		s := step{Do: pick(d, []int{3, 1, 1}, allReduce, async, grouped), Type: one(d, types), Op: one(d, []string{"sum", "average", "max"}), Alloc: true,
			Times: 1 + d.IntN(4)}
		s.Count = min(32<<20, abortBytes/p.ranks()/s.Times) / widthOf(s.Type)
		if s.several() {
			s.Tensors, s.Count = []int{s.Count}, 0
		}
		p.Steps[x.Step] = s
	}
	p.Disturbed = append(p.Disturbed, x)
}

// connect draws the connections between ranks.
func (p *program) connect(d dice) {
	switch pick(d, []int{12, 3, 2}, "shared", "sockets", "some") {
	case "sockets":
		for host := range p.Hosts {
			p.Sockets = append(p.Sockets, host)
		}
	case "some":
		p.Sockets = []int{d.IntN(len(p.Hosts))}
	}
	p.Encrypt = d.chance(20)
	if !p.Encrypt && d.chance(30) {
		p.Connections = 4
	}
	if d.chance(15) {
		p.Algorithm = one(d, []string{"strict", "doubling", "rabenseifner", "ring", "direct"})
	}
	p.Fusion = pick(d, []int{6, 1, 1}, 0, 1000, 1<<20)
	p.Cycle = pick(d, []int{6, 1, 1}, 0, -1, 5000)
}

func (p *program) disturb(d dice) {
	p.Busy = pick(d, []int{8, 1, 1, 1}, 0, 2, 4, 8)
	if d.chance(15) {
		p.Procs = 1
	}
	if d.chance(30) {
		p.Buffers = pick(d, []int{1, 1, 1}, 4<<10, 16<<10, 64<<10)
	}
}

func (p *program) divide(d dice) {
	for range pick(d, []int{6, 2, 1}, 0, 1, 2) {
		s := subset{}
		if len(p.Subsets) > 0 && d.chance(30) {
			s.Of = d.IntN(len(p.Subsets) + 1)
		}
		s.Ranks = d.Perm(len(p.members(s.Of)))
		s.Ranks = s.Ranks[:1+d.IntN(len(s.Ranks))]
		if d.chance(50) {
			slices.Sort(s.Ranks)
		}
		p.Subsets = append(p.Subsets, s)
	}
}

func (p *program) act(d dice) {
	budget := pick(d, []int{12, 7, 1}, fewBytes, usualBytes, mostBytes)
	switch {
	case p.Buffers > 0:
		budget = min(budget, 24<<20+3<<10*p.Buffers)
	case p.Busy > 0 || p.Encrypt:
		budget /= 2
	}
	for range 1 + d.IntN(mostSteps) {
		s := step{Group: d.IntN(len(p.Subsets) + 1), Times: 1}
		if d.chance(60) {
			s.Group = 0
		}
		s.Do = pick(d, []int{10, 2, 3, 2, 3, 3, 3, 2, 5, 2, 2, 1, 1, 3, 3, 4}, operations...)
		size := len(p.members(s.Group))
		s.draw(d, size, &budget)
		p.Steps = append(p.Steps, s)
	}
	if d.chance(25) {
		s := step{Group: p.Steps[0].Group, Times: 1}
		s.Do = pick(d, []int{3, 4, 2, 2, 1, 2, 2, 1, 2, 2, 2}, append(slices.Clip(operations[:9]), tree, messagesOp)...)
		size, little := len(p.members(s.Group)), 4<<20
		s.draw(d, size, &little)
		s.spoil(d, size)
		p.Steps = append(p.Steps, s)
	}
	for i := range p.Steps {
		if d.chance(10) {
			p.Steps[i].spoilAll(d)
		}
	}
}

// draw draws the parameters of the step for a group of this size.
func (s *step) draw(d dice, size int, budget *int) {
	s.Type = pick(d, []int{5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, types...)
	s.Op = pick(d, []int{5, 3, 1, 1, 1}, "sum", "average", "min", "max", "product")
	s.Root = d.IntN(size)
	s.Uneven = d.chance(30)
	s.Alloc = d.chance(25)
	s.Beside = d.chance(30)
	switch s.Do {
	case compressed:
		s.Type, s.Compress = "float32", one(d, []string{"float16", "bfloat16"})
	case allReduce, async, grouped:
		if d.chance(7) {
			s.Op, s.Type = "adasum", one(d, floating)
		}
	case bytesOp:
		s.Type = "uint8"
	case tree:
		s.Op = pick(d, []int{4, 2, 1, 1}, "sum", "average", "min", "max")
	case scatter:
		s.Into = d.chance(50)
		s.Counts = d.chance(30)
	case allGather, allToAll:
		s.Into = !s.Uneven && d.chance(70)
	}
	if s.Do == async && s.Op != "adasum" {
		if s.Type == "float32" && d.chance(20) {
			s.Compress = one(d, []string{"float16", "bfloat16"})
		}
		s.Scale = slices.Contains(floating, s.Type) && d.chance(20) && s.Op != "product"
	}
	if (s.Op == "sum" && s.Compress == "" || s.Op == "average") && !s.Scale {
		s.Rough = slices.Contains(floating, s.Type) && d.chance(30)
	}
	if s.Do == barrier {
		s.Times = 1 + d.IntN(20)
		return
	}
	tensors := 1
	if s.several() {
		tensors = 1 + d.IntN(pick(d, []int{2, 2, 1}, 1, 8, 40))
	}
	left := *budget
	for range tensors {
		bytes := s.size(d)
		for bytes > 64 && bytes*size > left {
			bytes /= 2
		}
		left -= bytes * size
		s.Tensors = append(s.Tensors, bytes/widthOf(s.Type))
	}
	if !s.several() {
		s.Count, s.Tensors = s.Tensors[0], nil
		if s.Do == allGather || s.Do == allToAll {
			s.Count /= size // each rank receives the data of all
		}
		if s.Do == tree {
			s.Count /= 4 // a rank has several parts
		}
	}
	for d.chance(40) && s.Times < 20 && (s.Times+1)*max(1, s.bytes())*size*3/2 < *budget {
		s.Times += max(1, s.Times/2)
	}
	*budget -= s.bytes() * size * s.Times
}

// size draws the size of a tensor in bytes.
func (s *step) size(d dice) int {
	bytes := pick(d, []int{4, 5, 12, 10, 8, 5, 4, 1}, 0, 4, 1+d.IntN(1<<d.IntN(22)), 64<<10, 1<<20, 16<<20, 64<<20, 256<<20)
	switch {
	case s.Op == "adasum":
		return min(bytes, 16<<20)
	case s.background() && d.chance(70):
		return min(bytes, 1<<20)
	}
	return bytes
}

// spoil makes one rank's call of the step differ from the others'.
func (s *step) spoil(d dice, size int) {
	if ways := waysWrong[s.Do]; len(ways) > 0 && size > 1 {
		s.Wrong = &wrong{Rank: d.IntN(size), How: one(d, ways)}
		if s.several() {
			s.Tensors = s.Tensors[:1]
		}
		if s.Wrong.How == noCompression && d.chance(60) {
			s.Compress = "" // an uncompressed call matches the invalid one otherwise
		}
	}
}

// spoilAll makes the calls of all ranks invalid in the same way.
func (s *step) spoilAll(d dice) {
	if ways := waysInvalid[s.Do]; len(ways) > 0 && s.Wrong == nil {
		s.Wrong = &wrong{Rank: -1, How: one(d, ways)}
	}
}

// The errors in the call of one rank, and in those of all.
const (
	wrongCount       = "count"
	wrongType        = "type"
	wrongOp          = "operation"
	wrongRoot        = "root"
	wrongCall        = "another call"
	wrongCompression = "another compression"
	noOp             = "no operation"
	noRoot           = "no such root"
	noCompression    = "no compression"
	noParts          = "number of parts"
)

var waysWrong = map[string][]string{
	allReduce:  {wrongCount, wrongType, wrongOp, wrongCall, noOp},
	compressed: {wrongCount, wrongOp, wrongCompression, wrongCall, noOp, noCompression, noCompression, noCompression},
	broadcast:  {wrongCount, wrongType, wrongRoot, wrongCall, noRoot},
	bytesOp:    {wrongRoot, wrongCall, noRoot},
	allGather:  {wrongType, wrongCall},
	scatter:    {wrongCount, wrongType, wrongOp, wrongCall, noOp},
	tree:       {wrongCount, wrongType, wrongOp, wrongCall, noOp},
	allToAll:   {wrongType, wrongCall, noParts},
	barrier:    {wrongCall},
	async:      {wrongCount, wrongType, wrongOp},
	messagesOp: {wrongCount, wrongType},
}

var waysInvalid = map[string][]string{
	allReduce:  {noOp},
	compressed: {noOp, noCompression},
	broadcast:  {noRoot},
	bytesOp:    {noRoot},
	scatter:    {noOp},
	tree:       {noOp},
	allToAll:   {noParts},
	async:      {noOp},
}
