// Package gradient averages gradients across ranks while a backward pass computes them.
//
// An [Averager] owns the memory of a model's gradients. A backward pass adds to it, from the last
// layer to the first, and reports which tensors are ready. Ready tensors are averaged across the
// ranks, in buckets, while the pass computes the previous layers:
//
//	grads := gradient.NewAverager[float32](w, gradient.Options{}, len(w1), len(b1), len(w2), len(b2))
//	defer grads.Close()
//	…
//	averaged, err := grads.Pass(ctx, func() error {
//		backwardOfLayer2(grads.Tensor(2), grads.Tensor(3))
//		grads.Ready(2, 3)
//		backwardOfLayer1(grads.Tensor(0), grads.Tensor(1))
//		return nil // all other tensors are ready now
//	})
//	if err != nil {
//		return err // as it is: elastic.Run knows what to do
//	}
//
// Overlap helps if a device computes, not if a processor computes and reduces at the same time. The
// last bucket is reduced after the pass. `hvdrun bench --op gradients --bucket 1MiB` shows which
// share of a reduction is hidden on a network. Package elastic's Steps give a result that does not
// depend on the workers.
//
// # Several passes
//
// With [Options].Passes the gradients of several passes are accumulated before they are averaged,
// for batches that do not fit into memory at once. Only the last of these calls of Pass returns
// true, and the optimizer makes its step then. Accumulated gradients are not part of a State, so
// commit only after Pass has returned true.
//
// # Uneven data
//
// A rank without further data calls [Averager.Join] in each step instead. It contributes nothing
// and receives the average of the others, so its weights stay equal to theirs and commits remain
// collective. Join returns false, in the same step on all ranks, when no rank has data left.
//
// # Other worlds
//
// An averager is used for the whole run of the program. In a new world it starts again: it discards
// the unfinished step of the previous world, as [elastic.Run] does.
//
// [elastic.Run]: https://pkg.go.dev/github.com/hvdrun/hvdrun/elastic#Run
package gradient

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Float is the element type of gradients.
type Float interface {
	~float32 | ~float64 | collective.Float16 | collective.BFloat16
}

// Worker provides the group to average with, as *elastic.Worker does. Each call may return another.
type Worker interface{ Group() *collective.Group }

// Options configure an Averager. The zero value averages after each pass. All ranks must use the
// same.
type Options struct {
	// Name distinguishes the averagers of a program. Empty: "gradient".
	Name string
	// Passes is the number of backward passes per step. 0 or less: 1.
	Passes int
	// Bucket is the number of bytes that are sent at once: smaller buckets start earlier, larger
	// ones are more efficient. 0: 4 MiB; negative: one bucket for all tensors.
	Bucket int
	// Compression is the encoding of float32 values on the wire.
	Compression collective.Compression
}

// defaultBucket is a bucket size that takes a few milliseconds on a network of 10 Gbit/s. The last
// bucket adds that time to the backward pass.
const defaultBucket = 4 << 20

// Averager averages the gradients of one model. It must be used by one goroutine at a time, except
// Ready, which backward passes may call concurrently.
type Averager[T Float] struct {
	worker  Worker
	options Options
	flat    []T
	tensors [][]T
	place   []int       // the bucket of each tensor
	buckets []bucket[T] // in the order in which a backward pass completes them

	invalid error // why the averager cannot be used

	group  *collective.Group // of the current or last step
	err    error             // why this group can no longer be used
	passes [1]uint32         // passes of this step on this rank; after the reduction, on all ranks
	handle *collective.Handle

	mu    sync.Mutex // guards the fields that Ready uses
	ctx   context.Context
	open  bool   // reductions may be started
	ready []bool // by tensor, in the current pass
}

// bucket is a range of adjacent tensors that are reduced together.
type bucket[T Float] struct {
	name    string
	data    []T
	tensors int
	missing int // number of its tensors that are not ready
	handle  *collective.Handle
}

// NewAverager returns an averager of tensors with the given lengths, in elements and in the order
// of their use in forward passes. It allocates the memory and starts nothing. Ranks on the same
// host average without copies in shared memory, which is not garbage collected: call Close if the
// program drops the averager before it ends. Invalid arguments are an error of the first Pass.
func NewAverager[T Float](w Worker, o Options, lengths ...int) *Averager[T] {
	if o.Name == "" {
		o.Name = "gradient"
	}
	o.Passes = max(o.Passes, 1)
	if o.Bucket == 0 {
		o.Bucket = defaultBucket
	}
	a := &Averager[T]{worker: w, options: o, ready: make([]bool, len(lengths)), place: make([]int, len(lengths))}
	if w == nil {
		a.invalid = errors.New("gradient: the averager's worker is nil")
	}
	total := 0
	for i, n := range lengths {
		if n < 0 {
			a.invalid = fmt.Errorf("gradient: tensor %d has %d elements", i, n)
			return a
		}
		total += n
	}
	var err error
	if a.flat, err = collective.Alloc[T](total); err != nil { // no shared memory is left
		a.flat = make([]T, total)
	}
	rest := a.flat
	for _, n := range lengths {
		a.tensors = append(a.tensors, rest[:n:n])
		rest = rest[n:]
	}
	a.cut()
	return a
}

// cut divides the tensors into buckets, beginning with the last ones.
func (a *Averager[T]) cut() {
	size := int(unsafe.Sizeof(*new(T)))
	end := len(a.flat)
	for i := len(a.tensors) - 1; i >= 0; {
		b := bucket[T]{name: fmt.Sprint(a.options.Name, ".", len(a.buckets))}
		begin := end
		for ; i >= 0 && (b.tensors == 0 || a.options.Bucket < 0 || (end-begin+len(a.tensors[i]))*size <= a.options.Bucket); i-- {
			begin -= len(a.tensors[i])
			a.place[i] = len(a.buckets)
			b.tensors++
		}
		b.data = a.flat[begin:end]
		a.buckets = append(a.buckets, b)
		end = begin
	}
}

// Tensor returns the gradient of tensor i, always as the same slice. It is zero when a step begins.
// Backward passes add to it until they call Ready for it, and must not write to it afterwards.
// After a Pass or Join that returned true it holds the average, until the next call.
func (a *Averager[T]) Tensor(i int) []T { return a.tensors[i] }

// Len returns the number of tensors.
func (a *Averager[T]) Len() int { return len(a.tensors) }

// Ready reports that the current backward pass adds nothing more to these tensors. It does not
// block. Ranks may call it in different orders, or not at all.
func (a *Averager[T]) Ready(tensors ...int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.open {
		return
	}
	for _, i := range tensors {
		if a.ready[i] {
			continue
		}
		a.ready[i] = true
		b := &a.buckets[a.place[i]]
		if b.missing--; b.missing == 0 {
			a.reduce(b)
		}
	}
}

// Pass runs one backward pass of a step: it calls backward, which adds to the tensors. In the last
// pass of the step it waits for the averages and returns true: each tensor is then the mean over
// all passes of all ranks. In earlier passes it returns false without communication. Steps are
// collective: all ranks must make the same number of steps, each either with as many passes as
// Options says or with Join.
//
// After an error of backward or of the collective the contents of the tensors are undefined, and
// every later call returns an error until the worker enters another world.
func (a *Averager[T]) Pass(ctx context.Context, backward func() error) (averaged bool, err error) {
	if err := a.enter(ctx); err != nil {
		return false, err
	}
	a.passes[0]++
	last := int(a.passes[0]) == a.options.Passes
	if last {
		a.begin(ctx)
	}
	if err := backward(); err != nil {
		a.shut()
		a.err = err
		return false, err
	}
	if !last {
		return false, nil
	}
	return a.finish()
}

// Join makes a step without data: this rank contributes only what earlier passes of the step have
// accumulated, and receives the averages as from Pass. If no rank had data, Join returns false in
// the same step on all ranks, and the tensors are zero. It blocks until every rank has finished its
// step.
func (a *Averager[T]) Join(ctx context.Context) (averaged bool, err error) {
	if err := a.enter(ctx); err != nil {
		return false, err
	}
	a.begin(ctx)
	return a.finish()
}

// Close waits for pending reductions and frees the memory. It must not be called in the middle of a
// step in a world that continues.
func (a *Averager[T]) Close() {
	a.shut()
	a.settle()
	a.invalid = errors.New("gradient: the averager is closed")
	a.tensors, a.buckets = nil, nil
	collective.Free(a.flat)
	a.flat = nil
}

// enter prepares a step in the worker's current world.
func (a *Averager[T]) enter(ctx context.Context) error {
	if a.invalid != nil {
		return a.invalid
	}
	if g := a.worker.Group(); g != a.group {
		// Operations of the previous world end by themselves. Their memory is about to be reused.
		a.settle()
		a.group, a.err, a.passes[0] = g, nil, 0
	}
	if a.err != nil {
		return fmt.Errorf("gradient: an earlier pass in this world has failed: %w", a.err)
	}
	if a.passes[0] == 0 {
		clear(a.flat)
	}
	return ctx.Err()
}

// begin allows reductions for this step.
func (a *Averager[T]) begin(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.ready)
	for i := range a.buckets {
		b := &a.buckets[i]
		b.missing = b.tensors
	}
	a.ctx, a.open = ctx, true
	if a.group.Size() > 1 {
		a.handle = collective.AllReduceAsync(ctx, a.group, a.options.Name+".passes", a.passes[:], collective.Sum)
	}
}

// reduce starts the reduction of a bucket. The caller holds mu.
func (a *Averager[T]) reduce(b *bucket[T]) {
	if a.group.Size() == 1 {
		return
	}
	b.handle = collective.AllReduceAsyncWith(a.ctx, a.group, b.name, b.data, collective.Average,
		collective.AsyncOptions{Compression: a.options.Compression, Prescale: 1 / float64(a.options.Passes)})
}

// shut prevents further reductions.
func (a *Averager[T]) shut() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open, a.ctx = false, nil
}

// settle waits for the started reductions and returns the first error.
func (a *Averager[T]) settle() (err error) {
	for i := range a.buckets {
		b := &a.buckets[i]
		if b.handle == nil {
			continue
		}
		if e := b.handle.Wait(); err == nil {
			err = e
		}
		b.handle = nil
	}
	if a.handle != nil {
		if e := a.handle.Wait(); err == nil {
			err = e
		}
		a.handle = nil
	}
	return err
}

// finish reduces the remaining buckets and waits for the averages.
func (a *Averager[T]) finish() (averaged bool, err error) {
	a.mu.Lock()
	for i := range a.buckets {
		if b := &a.buckets[i]; b.missing > 0 {
			b.missing = 0
			a.reduce(b)
		}
	}
	a.mu.Unlock()
	a.shut()
	if err := a.settle(); err != nil {
		a.err = err
		return false, err
	}
	made := float64(a.passes[0])
	a.passes[0] = 0
	if made == 0 {
		return false, nil
	}
	// The reduction has divided by the number of passes that all ranks can make.
	divided := 1.
	if n := a.group.Size(); n > 1 {
		divided = float64(n * a.options.Passes)
	}
	if made != divided {
		scale[T]()(kernel.Bytes(a.flat), divided/made)
	}
	return true, nil
}

// scale returns the function that multiplies elements by a factor.
func scale[T Float]() func([]byte, float64) {
	var zero T
	switch any(zero).(type) {
	case collective.Float16:
		return kernel.Scale(kernel.Float16)
	case collective.BFloat16:
		return kernel.Scale(kernel.BFloat16)
	}
	if unsafe.Sizeof(zero) == 4 {
		return kernel.Scale(kernel.Float32)
	}
	return kernel.Scale(kernel.Float64)
}
