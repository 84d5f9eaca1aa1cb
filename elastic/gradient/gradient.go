// Package gradient averages the gradients of data-parallel training while they are computed.
//
// An [Averager] has the memory of a model's gradients. A backward pass adds to it, from the last
// layer to the first, and says which tensors are ready; what is ready goes to the other ranks, in
// buckets, while the pass works on the layers before:
//
//	grads := gradient.NewAverager[float32](w, gradient.Options{}, len(w1), len(b1), len(w2), len(b2))
//	defer grads.Close()
//	…
//	averaged, err := grads.Pass(ctx, func() error {
//		backwardOfLayer2(grads.Tensor(2), grads.Tensor(3))
//		grads.Ready(2, 3)
//		backwardOfLayer1(grads.Tensor(0), grads.Tensor(1))
//		return nil // what has not been said to be ready is ready now
//	})
//	if err != nil {
//		return err // as it is: elastic.Run knows what to do
//	}
//
// # Several passes
//
// With [Options].Passes the gradients of so many passes are added up before they are averaged, for
// batches that do not fit into memory at once; only then Pass returns true, and the optimizer makes
// its step. What passes have added up is in no state: commit where Pass has returned true.
//
// # Uneven data
//
// A rank that has no more data calls [Averager.Join] in each step instead. It contributes nothing
// and gets what the others average, so its weights go on with theirs, and commits stay collective.
// Join returns false when no rank has any data left, in the same step on all.
//
// # Other worlds
//
// An averager lives as long as the program. In another world than that of its last call it begins
// anew: what was under way in the old one is thrown away, as the steps are that [elastic.Run] takes
// back.
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
	"github.com/hvdrun/hvdrun/collective/kernel"
)

// Float is what gradients are made of.
type Float interface {
	~float32 | ~float64 | collective.Float16 | collective.BFloat16
}

// Worker says with whom to average; an *elastic.Worker does. Its group may be another in each call.
type Worker interface{ Group() *collective.Group }

// Options say how gradients are averaged. The zero value averages after each pass. All ranks must
// give the same.
type Options struct {
	// Name tells the averagers of a program apart. Empty: "gradient".
	Name string
	// Passes are the backward passes of a step. 0: 1.
	Passes int
	// Bucket is how many bytes are collected before they are sent: smaller ones begin earlier,
	// larger ones cost less. 0: 4 MiB; negative: everything is sent as one.
	Bucket int
	// Compression is the form in which float32s go from rank to rank.
	Compression collective.Compression
}

// defaultBucket takes a few milliseconds on a network of 10 Gbit/s, which is what stays to be done
// after the backward pass.
const defaultBucket = 4 << 20

// Averager averages the gradients of one model. One goroutine at a time uses it, except that the
// parts of a backward pass may call Ready from several.
type Averager[T Float] struct {
	worker  Worker
	options Options
	flat    []T
	tensors [][]T
	place   []int       // the bucket of each tensor
	buckets []bucket[T] // in the order in which a backward pass comes to their ends

	invalid error // why nothing can be averaged at all

	group  *collective.Group // of the step under way, or the last
	err    error             // why nothing can be averaged in that group any more
	passes [1]uint32         // of this step, made by this rank; after the reduction by all
	handle *collective.Handle

	mu    sync.Mutex // guards what Ready uses
	ctx   context.Context
	open  bool   // reductions may begin
	ready []bool // tensors, in the pass under way
}

// bucket is tensors that lie one after the other and are reduced as one.
type bucket[T Float] struct {
	name    string
	data    []T
	tensors int
	missing int // tensors that are not ready
	handle  *collective.Handle
}

// NewAverager returns an averager of tensors of these lengths, in elements and in the order in
// which forward passes use them, and starts nothing. The memory is taken at once. Ranks that share
// a host average it without copies; that memory is not garbage-collected, so who drops an averager
// long before the program ends calls Close. What is wrong with the arguments is an error of the
// first Pass.
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
	if a.flat, err = collective.Alloc[T](total); err != nil { // there is no room in what is shared
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

// cut puts the tensors into buckets, the last ones first.
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

// Tensor returns the gradient of tensor i, always the same slice. It is zero when a step begins;
// backward passes add to it, and must not once they have said that it is ready. After a Pass or
// Join that has returned true it is the average, until the next Pass.
func (a *Averager[T]) Tensor(i int) []T { return a.tensors[i] }

// Len is the number of tensors.
func (a *Averager[T]) Len() int { return len(a.tensors) }

// Ready says that the backward pass under way adds nothing more to these tensors. It does not
// block. All ranks may say so in orders of their own, or not at all.
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

// Pass makes one backward pass of a step: it calls backward, which adds to the tensors. In the last
// pass of the step it then waits for the averages and returns true: each tensor is now the mean
// over all passes of all ranks. Before that it returns false and has not talked to anybody. It is
// collective: all ranks make equally many steps, each of either as many passes as the options say,
// or a Join.
//
// After an error, of backward or of the collective, the tensors may hold anything, and every later
// call returns one as well until the worker is in another world.
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

// Join is a step without data: the rank contributes nothing but what earlier passes of the step
// have added up, and gets the averages of the others, as Pass does. It returns false when no rank
// had any data, which all ranks see in the same step: then all are through and the tensors are
// zero. It blocks until every rank has come to the end of its step.
func (a *Averager[T]) Join(ctx context.Context) (averaged bool, err error) {
	if err := a.enter(ctx); err != nil {
		return false, err
	}
	a.begin(ctx)
	return a.finish()
}

// Close waits for what is under way, which must not be in a world that goes on, and gives the
// memory back.
func (a *Averager[T]) Close() {
	a.shut()
	a.settle()
	a.invalid = errors.New("gradient: the averager is closed")
	a.tensors, a.buckets = nil, nil
	collective.Free(a.flat)
	a.flat = nil
}

// enter sees to it that there is a step under way in the world that the worker is in.
func (a *Averager[T]) enter(ctx context.Context) error {
	if a.invalid != nil {
		return a.invalid
	}
	if g := a.worker.Group(); g != a.group {
		// Operations of a world that has been left end by themselves; their memory is needed again.
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

// begin lets the reductions of this step begin.
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

// reduce begins the reduction of a bucket. The caller holds mu.
func (a *Averager[T]) reduce(b *bucket[T]) {
	if a.group.Size() == 1 {
		return
	}
	b.handle = collective.AllReduceAsyncWith(a.ctx, a.group, b.name, b.data, collective.Average,
		collective.AsyncOptions{Compression: a.options.Compression, Prescale: 1 / float64(a.options.Passes)})
}

// shut ends the time in which reductions may begin.
func (a *Averager[T]) shut() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open, a.ctx = false, nil
}

// settle waits for the reductions that have begun, and returns the first error.
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

// finish ends the step.
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
	// Where all ranks have made all their passes the reduction has divided by as many.
	divided := 1.
	if n := a.group.Size(); n > 1 {
		divided = float64(n * a.options.Passes)
	}
	if made != divided {
		scale[T]()(bytesOf(a.flat), divided/made)
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

func bytesOf[T Float](data []T) []byte {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(data[0])))
}
