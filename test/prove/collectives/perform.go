package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// performer runs a step on one rank and checks its results.
type performer struct {
	*actor
	g      *collective.Group
	number int
	step   *step
	digest uint32
}

// perform runs the step with elements of its type.
func (p *performer) perform() error {
	return performers[p.step.Type](p)
}

var performers = map[string]func(*performer) error{
	"":        performOf[uint8],
	"float32": performOf[float32], "float64": performOf[float64],
	"float16": performOf[collective.Float16], "bfloat16": performOf[collective.BFloat16],
	"int8": performOf[int8], "int16": performOf[int16], "int32": performOf[int32], "int64": performOf[int64],
	"uint8": performOf[uint8], "uint16": performOf[uint16], "uint32": performOf[uint32], "uint64": performOf[uint64],
}

var kernelTypes = map[string]kernel.Type{"float32": kernel.Float32, "float64": kernel.Float64, "float16": kernel.Float16,
	"bfloat16": kernel.BFloat16, "int8": kernel.Int8, "int16": kernel.Int16, "int32": kernel.Int32, "int64": kernel.Int64,
	"uint8": kernel.Uint8, "uint16": kernel.Uint16, "uint32": kernel.Uint32, "uint64": kernel.Uint64}

// turnOf is one repetition of a step with elements of a type.
type turnOf[T collective.Element] struct {
	*performer
	ctx  context.Context
	turn int
	op   collective.Op
	room [][]T // memory of each tensor, kept between repetitions
}

func performOf[T collective.Element](p *performer) error {
	s := p.step
	t := &turnOf[T]{performer: p, ctx: p.ctx, op: opOf(s.Op)}
	if s.Wrong != nil {
		return t.refused()
	}
	for _, count := range s.counts() {
		data, err := room[T](count, s.Alloc)
		if err != nil {
			return err
		}
		t.room = append(t.room, data)
	}
	defer func() {
		for _, data := range t.room {
			collective.Free(data)
		}
	}()
	for t.turn = range s.Times {
		if err := t.once(); err != nil {
			spoil(t.room...)
			return fmt.Errorf("turn %d: %w", t.turn, err)
		}
	}
	return nil
}

// spoil overwrites tensors, as the caller of an operation may do once it has returned an error: no
// other rank may use the overwritten values in a result.
func spoil[T collective.Element](tensors ...[]T) {
	for _, data := range tensors {
		if len(data) == 0 {
			continue
		}
		data[0] = fromFloat[T](77)
		for done := 1; done < len(data); done *= 2 {
			copy(data[done:], data[:done])
		}
	}
}

func room[T collective.Element](count int, alloc bool) ([]T, error) {
	if alloc {
		return collective.Alloc[T](count)
	}
	return make([]T, count), nil
}

// opOf returns the operation with that name, or an invalid one.
func opOf(name string) collective.Op {
	if op, known := reductions[name]; known {
		return op
	}
	return 77
}

func compressionOf(name string) collective.Compression {
	if c, known := compressions[name]; known || name == "" {
		return c
	}
	return 9
}

// once runs the step once and checks its result.
func (t *turnOf[T]) once() error {
	g, s := t.g, t.step
	switch s.Do {
	case allReduce, compressed:
		data := t.filled(0)
		err := t.reduce(g, data)
		return t.judge(err, data, 0, s.Compress, everybody(g.Size()))
	case resubset:
		return t.inSubset()
	case broadcast:
		data := t.filled(0)
		if err := collective.Broadcast(t.ctx, g, data, s.Root); err != nil {
			return err
		}
		t.digest = digest(t.digest, data)
		return t.same(data, t.input(0, 0, s.Root), 0, "")
	case bytesOp:
		return t.broadcastBytes()
	case allGather:
		return t.gather()
	case scatter:
		if s.Counts {
			return t.counted()
		}
		data := t.filled(0)
		lo, hi := kernel.Split(len(data), g.Size(), g.Rank())
		part, err := t.scatter(data, hi-lo)
		if err != nil {
			return err
		}
		if len(part) != hi-lo {
			return &wrongResult{fmt.Sprintf("%d elements, not %d", len(part), hi-lo)}
		}
		return errors.Join(t.same(data, t.input(0, 0, g.Rank()), 0, "the input"), t.right(part, lo, 0, "", everybody(g.Size())))
	case tree:
		return t.reduceTree()
	case allToAll:
		return t.exchange()
	case barrier:
		return collective.Barrier(t.ctx, g)
	case async:
		return t.inBackground()
	case grouped:
		data := t.filledAll()
		err := collective.GroupedAllReduce(t.ctx, g, t.name(0), data, t.op)
		return t.judgeAll(err, data, everybody(g.Size()))
	case elsewhere:
		return t.elsewhere()
	case join:
		return t.join()
	case movesOp:
		return t.moves()
	case messagesOp:
		return t.messages()
	}
	return fmt.Errorf("there is no operation %q", s.Do)
}

func everybody(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// name returns the name of a tensor, which is unique to the step.
func (t *turnOf[T]) name(tensor int) string { return fmt.Sprintf("%d.%d", t.number, tensor) }

func (t *turnOf[T]) place(tensor, to, rank int) place {
	return place{t.Program.Seed, t.number, t.turn, tensor, to, rank}
}

// input returns one period of a rank's input; to is the rank that it is sent to.
func (t *turnOf[T]) input(tensor, to, rank int) []T {
	return pattern[T](t.place(tensor, to, rank), kindOf[T](t.step))
}

// filled returns a tensor of this rank with its input.
func (t *turnOf[T]) filled(tensor int) []T {
	fill(t.room[tensor], t.input(tensor, 0, t.g.Rank()))
	return t.room[tensor]
}

func (t *turnOf[T]) filledAll() [][]T {
	for i := range t.room {
		t.filled(i)
	}
	return t.room
}

// reduce calls AllReduce, compressed or not.
func (t *turnOf[T]) reduce(g *collective.Group, data []T) error {
	if floats, is := any(data).([]float32); is && t.step.Do == compressed {
		return collective.AllReduceCompressed(t.ctx, g, floats, t.op, compressionOf(t.step.Compress))
	}
	return collective.AllReduce(t.ctx, g, data, t.op)
}

// judge checks a reduction among some ranks of the group.
func (t *turnOf[T]) judge(err error, data []T, tensor int, compress string, ranks []int) error {
	if err != nil {
		return err
	}
	t.digest = digest(t.digest, data)
	return t.right(data, 0, tensor, compress, ranks)
}

func (t *turnOf[T]) judgeAll(err error, data [][]T, ranks []int) error {
	for i := range data {
		if err = t.judge(err, data[i], i, t.step.Compress, ranks); err != nil {
			return fmt.Errorf("tensor %d: %w", i, err)
		}
	}
	return err
}

// right compares the result of a reduction with the reference; data begins at the given element of
// the whole.
func (t *turnOf[T]) right(data []T, at, tensor int, compress string, ranks []int) error {
	inputs := make([][]T, len(ranks))
	for i, rank := range ranks {
		inputs[i] = t.input(tensor, 0, rank)
	}
	switch {
	case len(ranks) == 0:
		return nil
	case t.op == collective.Adasum:
		return t.nearAdasum(data, inputs)
	case kindOf[T](t.step).rough && !t.inOrder():
		n := float64(len(ranks))
		one := sumAll(inputs, t.op == collective.Average)
		if i := far(data, turned(one, at), 2*n*max(precision[T](), precisions[compress]), n/2); i >= 0 {
			return &wrongResult{fmt.Sprintf("element %d is %v, not about %v", i, toFloat(data[i]), one[(at+i)%period])}
		}
		return nil
	}
	return t.same(data, t.expected(inputs, t.seats(ranks), compress), at, "")
}

// inOrder reports whether sums are computed in the order of ranks, or of ranks and hosts.
func (t *turnOf[T]) inOrder() bool {
	return means[T](t.op) || t.op == collective.Average && t.step.Compress != "" || t.step.background() || t.Program.Algorithm == "strict" && t.step.reducesInPlace()
}

// seats returns where some ranks of the step's group are, with hosts numbered in the order of their
// first ranks there. It returns nil if the group's operations do not combine host by host.
func (t *turnOf[T]) seats(ranks []int) []seat {
	scatters := t.step.Do == scatter || t.step.Do == movesOp // algorithms are about AllReduce, in the background too
	switch t.Program.Algorithm {
	case "", "auto":
	case "strict":
		if t.step.reducesInPlace() || t.step.background() && !scatters {
			return nil
		}
	default:
		if !scatters {
			return nil
		}
	}
	numbers, of, here := map[int]int{}, []int{}, map[int]int{}
	for _, member := range t.Program.members(t.step.Group) {
		host := t.Program.hostOf(member)
		if _, known := numbers[host]; !known {
			numbers[host] = len(numbers)
		}
		of = append(of, numbers[host])
		here[host]++
	}
	for host, n := range here {
		if n > 1 && t.Program.apart(host) {
			return nil
		}
	}
	if len(of) == len(numbers) {
		return nil // no two ranks share memory
	}
	out := make([]seat, len(ranks))
	for i, rank := range ranks {
		out[i] = seat{of[rank], here[t.Program.hostOf(t.Program.members(t.step.Group)[rank])], len(numbers)}
	}
	return out
}

// expected returns one period of the expected result.
func (t *turnOf[T]) expected(inputs [][]T, seats []seat, compress string) []T {
	before, after := t.scales()
	for _, in := range inputs {
		scale(in, before)
	}
	var out []T
	switch compress {
	case "float16":
		out = through[collective.Float16](t.op, inputs, seats)
	case "bfloat16":
		out = through[collective.BFloat16](t.op, inputs, seats)
	default:
		out = combineAll(t.op, inputs, seats)
	}
	scale(out, after)
	return out
}

// through combines elements in another type, as compressed operations do.
func through[W, T collective.Element](op collective.Op, inputs [][]T, seats []seat) []T {
	narrow := make([][]W, len(inputs))
	for i, in := range inputs {
		for _, v := range in {
			narrow[i] = append(narrow[i], fromFloat[W](toFloat(v)))
		}
	}
	var out []T
	for _, v := range combineAll(op, narrow, seats) {
		out = append(out, fromFloat[T](toFloat(v)))
	}
	return out
}

// scales returns the scale factors of the step.
func (t *turnOf[T]) scales() (before, after float64) {
	if t.step.Scale {
		return 2, 0.25
	}
	return 1, 1
}

func scale[T collective.Element](data []T, by float64) {
	if by == 1 {
		return
	}
	for i, v := range data {
		data[i] = fromFloat[T](toFloat(v) * by)
	}
}

// turned returns one period from another start.
func turned(one []float64, at int) []float64 {
	at %= len(one)
	return append(slices.Clone(one[at:]), one[:at]...)
}

// same compares data, which begins at the given element of the whole, with the repeated period.
func (t *turnOf[T]) same(data, one []T, at int, what string) error {
	i := differs(data, one, at)
	if i < 0 {
		return nil
	}
	if what != "" {
		what += ": "
	}
	return &wrongResult{fmt.Sprintf("%selement %d of %d is %v, not %v", what, i, len(data), toFloat(data[i]), toFloat(one[(at+i)%period]))}
}

const mostAdasum = 1 << 19 // largest number of elements compared with the formula

func (t *turnOf[T]) nearAdasum(data []T, inputs [][]T) error {
	if len(data)*len(inputs) > mostAdasum {
		return nil // the digests verify that all ranks have the same bits
	}
	vectors := make([][]float64, len(inputs))
	for i, in := range inputs {
		for j := range data {
			vectors[i] = append(vectors[i], toFloat(in[j%period]))
		}
	}
	if want := adasumAll(vectors); len(want) > 0 {
		if i := far(data, want, max(32*precision[T](), 1e-11), 1); i >= 0 {
			return &wrongResult{fmt.Sprintf("element %d is %v, not about %v", i, toFloat(data[i]), want[i])}
		}
	}
	return nil
}

// inSubset creates a subset of all ranks in reverse order, reduces in it, and closes it.
func (t *turnOf[T]) inSubset() error {
	ranks := everybody(t.g.Size())
	slices.Reverse(ranks)
	g, err := t.g.Subset(t.ctx, ranks)
	if err != nil {
		return err
	}
	data := t.filled(0)
	err = collective.AllReduce(t.ctx, g, data, t.op)
	slices.Reverse(ranks)
	return errors.Join(t.judge(err, data, 0, "", ranks), g.Close())
}

func (t *turnOf[T]) broadcastBytes() error {
	s := t.step
	one := pattern[uint8](t.place(0, 0, s.Root), kind{})
	var own []byte
	if t.g.Rank() == s.Root {
		own = make([]byte, s.Count)
		fill(own, one)
	}
	got, err := collective.BroadcastBytes(t.ctx, t.g, own, s.Root)
	if err != nil {
		return err
	}
	t.digest = digest(t.digest, got)
	if i := differs(got, one, 0); i >= 0 || len(got) != s.Count {
		return &wrongResult{fmt.Sprintf("%d bytes, not %d; byte %d differs", len(got), s.Count, i)}
	}
	return nil
}

// length returns the number of elements that one rank sends another one.
func (s *step) length(from, to int) int {
	if s.Uneven {
		return s.Count * ((from + to) % 3) / 2
	}
	return s.Count
}

// scatter runs the step's ReduceScatter, whose part has count elements.
func (t *turnOf[T]) scatter(data []T, count int) ([]T, error) {
	if !t.step.Into {
		return collective.ReduceScatter(t.ctx, t.g, data, t.op)
	}
	part, err := room[T](count, t.step.Alloc)
	if err != nil {
		return nil, err
	}
	defer collective.Free(part)
	err = collective.ReduceScatterInto(t.ctx, t.g, data, part, t.op)
	return slices.Clone(part), err
}

// gatherInto runs an AllGather of equal parts into memory of the caller, and returns the parts. In
// every other turn this rank's part is already in its place there.
func (t *turnOf[T]) gatherInto() ([][]T, error) {
	g, n := t.g, t.step.Count
	all, err := room[T](n*g.Size(), t.step.Alloc)
	if err != nil {
		return nil, err
	}
	defer collective.Free(all)
	data := all[g.Rank()*n : (g.Rank()+1)*n]
	if t.turn%2 == 1 {
		data = make([]T, n)
	}
	fill(data, t.input(0, 0, g.Rank()))
	err = collective.AllGatherInto(t.ctx, g, data, all)
	return split(slices.Clone(all), g.Size()), err
}

// exchangeInto runs an AllToAll of equal parts into memory of the caller, and returns the parts.
func (t *turnOf[T]) exchangeInto(parts [][]T) ([][]T, error) {
	result, err := room[T](t.step.Count*len(parts), t.step.Alloc)
	if err != nil {
		return nil, err
	}
	defer collective.Free(result)
	err = collective.AllToAllInto(t.ctx, t.g, slices.Concat(parts...), result)
	return split(slices.Clone(result), len(parts)), err
}

// split returns n parts of equal length.
func split[T any](all []T, n int) [][]T {
	parts := make([][]T, n)
	for i := range parts {
		parts[i] = all[i*len(all)/n : (i+1)*len(all)/n]
	}
	return parts
}

func (t *turnOf[T]) gatherPlain() ([][]T, error) {
	data, err := room[T](t.step.length(t.g.Rank(), 0), t.step.Alloc)
	if err != nil {
		return nil, err
	}
	defer collective.Free(data)
	fill(data, t.input(0, 0, t.g.Rank()))
	return collective.AllGather(t.ctx, t.g, data)
}

func (t *turnOf[T]) gather() error {
	s, gather := t.step, t.gatherPlain
	if s.Into {
		gather = t.gatherInto
	}
	all, err := gather()
	if err != nil {
		return err
	}
	for rank, part := range all {
		t.digest = digest(t.digest, part)
		if len(part) != s.length(rank, 0) {
			return &wrongResult{fmt.Sprintf("%d elements of rank %d, not %d", len(part), rank, s.length(rank, 0))}
		}
		if err := t.same(part, t.input(0, 0, rank), 0, fmt.Sprintf("of rank %d", rank)); err != nil {
			return err
		}
	}
	return nil
}

func (t *turnOf[T]) exchange() error {
	g, s := t.g, t.step
	parts := make([][]T, g.Size())
	for to := range parts {
		parts[to] = make([]T, s.length(g.Rank(), to))
		fill(parts[to], t.input(0, to, g.Rank()))
	}
	exchange := func(parts [][]T) ([][]T, error) { return collective.AllToAll(t.ctx, g, parts) }
	if s.Into {
		exchange = t.exchangeInto
	}
	all, err := exchange(parts)
	if err != nil {
		return err
	}
	for from, part := range all {
		if n := s.length(from, g.Rank()); len(part) != n {
			return &wrongResult{fmt.Sprintf("%d elements of rank %d, not %d", len(part), from, n)}
		}
		if err := t.same(part, t.input(0, g.Rank(), from), 0, fmt.Sprintf("of rank %d", from)); err != nil {
			return err
		}
	}
	return nil
}

// order returns a random order of the tensors, different on each rank.
func (t *turnOf[T]) order() []int {
	return rand.New(rand.NewPCG(t.Program.Seed, t.place(0, 0, t.g.Rank()).bits(0))).Perm(len(t.room))
}

func (t *turnOf[T]) inBackground() error {
	data := t.filledAll()
	handles := make([]*collective.Handle, len(data))
	o := collective.AsyncOptions{Compression: compressionOf(t.step.Compress)}
	if t.step.Scale {
		o.Prescale, o.Postscale = t.scales()
	}
	order := t.order()
	for _, i := range order {
		handles[i] = collective.AllReduceAsyncWith(t.ctx, t.g, t.name(i), data[i], t.op, o)
	}
	return t.settle(handles, data, everybody(t.g.Size()))
}

// settle waits for operations in the background, and checks the results of the successful ones even
// if others fail.
func (t *turnOf[T]) settle(handles []*collective.Handle, data [][]T, ranks []int) error {
	errs := make([]error, len(handles))
	for i, h := range handles {
		if errs[i] = h.Wait(); errs[i] != nil {
			spoil(data[i])
		}
	}
	var first error
	for i, err := range errs {
		if err = t.judge(err, data[i], i, t.step.Compress, ranks); err == nil {
			continue
		}
		if first == nil || classOf(err) == classWrong && classOf(first) != classWrong {
			first = fmt.Errorf("tensor %d: %w", i, err)
		}
	}
	return first
}

// remote is a vector that only its own methods can access.
type remote[T collective.Element] struct {
	data []T
	op   collective.Op
}

// Reduce reduces the bucket as one tensor.
func (r *remote[T]) Reduce(ctx context.Context, lane *collective.Group, bucket []collective.Work) error {
	if len(bucket) == 1 {
		return collective.AllReduce(ctx, lane, r.data, r.op)
	}
	var all []T
	for _, w := range bucket {
		all = append(all, w.(*remote[T]).data...)
	}
	if err := collective.AllReduce(ctx, lane, all, r.op); err != nil {
		return err
	}
	for _, w := range bucket {
		all = all[copy(w.(*remote[T]).data, all):]
	}
	return nil
}

// Ended does nothing.
func (r *remote[T]) Ended(error) {}

func (t *turnOf[T]) elsewhere() error {
	data := t.filledAll()
	vectors := make([]collective.Elsewhere, len(data))
	for i := range data {
		vectors[i] = collective.Elsewhere{Name: t.name(i), Type: kernelTypes[t.step.Type], Count: len(data[i]), Work: &remote[T]{data[i], t.op}}
	}
	return t.settle(collective.AllReduceElsewhere(t.ctx, t.g, t.op, vectors...), data, everybody(t.g.Size()))
}

// join makes some ranks join while the others still reduce.
func (t *turnOf[T]) join() error {
	var working []int
	for rank := range t.g.Size() {
		if t.place(0, 0, rank).bits(0)%3 > 0 {
			working = append(working, rank)
		}
	}
	if slices.Contains(working, t.g.Rank()) {
		data := t.filledAll()
		handles := make([]*collective.Handle, len(data))
		for _, i := range t.order() {
			handles[i] = collective.AllReduceAsync(t.ctx, t.g, t.name(i), data[i], t.op)
		}
		if err := t.settle(handles, data, working); err != nil {
			return err
		}
	}
	last, err := collective.Join(t.ctx, t.g)
	t.digest = digest(0, []int64{int64(t.turn), int64(last)}) // instead of the digest of results, which only some ranks have
	return err
}
