package tasks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
	"github.com/hvdrun/hvdrun/tasks/report"
)

// Future is the result of a task, which need not have ended yet. It is safe for concurrent use.
type Future[R any] struct{ *pending }

// Submit requests a call of the function with the arguments. It returns at once, unless the pool
// has the maximum number of unfinished tasks: then it waits for one of them to end. An argument is
// a value of the function's type, a Ref to such a value, or a Future of that type from the same
// pool, for whose task the new task then waits. An argument of more than 100 KiB, or one with which
// the arguments exceed 10 MiB in total, is stored first, and stays stored until the task is over.
// Submit returns an error if the arguments do not fit the function, ctx ends, or the pool is
// closed.
func (f *Func[R]) Submit(ctx context.Context, p *Pool, args ...any) (*Future[R], error) {
	t, err := p.submit(ctx, f.fn, &f.options, args)
	if err != nil {
		return nil, err
	}
	return &Future[R]{t}, nil
}

// Call calls Submit and then Get. If ctx ends, it cancels the task.
func (f *Func[R]) Call(ctx context.Context, p *Pool, args ...any) (R, error) {
	t, err := f.Submit(ctx, p, args...)
	if err != nil {
		var none R
		return none, err
	}
	r, err := t.Get(ctx)
	if err != nil && ctx.Err() != nil {
		t.Cancel()
	}
	return r, err
}

// Done returns a channel that is closed when the task is over.
func (t *pending) Done() <-chan struct{} {
	t.pool.mu.Lock()
	defer t.pool.mu.Unlock()
	return t.waiting()
}

// waiting is like Done. The caller holds the lock.
func (t *pending) waiting() chan struct{} {
	if t.over == nil {
		t.over = make(chan struct{})
		if t.ended() {
			close(t.over)
		}
	}
	return t.over
}

// ended reports whether the task is over. The caller holds the lock.
func (t *pending) ended() bool { return t.result != nil || t.err != nil }

// Cancel ends the task with ErrCancelled if it is not over. The context of a running task ends, and
// its result is ignored.
func (t *pending) Cancel() {
	t.pool.mu.Lock()
	defer t.pool.mu.Unlock()
	if !t.ended() {
		t.cancelled = true
		t.pool.send(nil, t.cancel)
	}
}

func (t *pending) cancel(m *taskspb.ToTasks) {
	m.Cancels = append(m.Cancels, &taskspb.CancelTask{N: t.n})
}

// Get blocks until the task is over, and returns its result. If the function of a task calls Get
// with its own context, other tasks can use the processors of that task in the meantime. The error
// is a *FunctionError or *DependencyError, or wraps ErrCancelled, ErrWorkerLost, ErrPoison,
// ErrTimeLimit or ErrClosed, or is the error of ctx.
func (f *Future[R]) Get(ctx context.Context) (R, error) {
	var r R
	f.pool.mu.Lock()
	if !f.ended() {
		over := f.waiting()
		f.pool.mu.Unlock()
		if _, err := receive(ctx, over); err != nil {
			return r, err
		}
		f.pool.mu.Lock()
	}
	result, err := f.result, f.err
	f.pool.mu.Unlock()
	if err != nil {
		return r, err
	}
	v, err := f.decode(ctx, result, reflect.TypeFor[R]())
	if err != nil {
		return r, err
	}
	return v.Interface().(R), nil
}

// decode decodes a result, which it fetches first if it is stored.
func (t *pending) decode(ctx context.Context, r *taskspb.TaskResult, type_ reflect.Type) (v reflect.Value, err error) {
	if r.GetSize() == 0 {
		v, err = decode(r.GetInlined(), type_)
	} else {
		id, _ := blob.ParseID(r.GetValue())
		var b []byte
		if b, err = t.pool.fetch(ctx, id, int64(r.GetSize())); err == nil {
			v, err = decodeOwn(b, type_)
		}
		runtime.KeepAlive(t)
	}
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("tasks: the result of %s cannot be decoded: %w", t.fn.name, err)
	}
	return v, err
}

// Err blocks like Get, and returns only the error.
func (t *pending) Err(ctx context.Context) error {
	if _, err := receive(ctx, t.Done()); err != nil {
		return err
	}
	t.pool.mu.Lock()
	defer t.pool.mu.Unlock()
	return t.err
}

// receive returns the next value from a channel, or the zero value if the channel is closed. If ctx
// is the context of a task's function, the task lends its processors meanwhile.
func receive[T any](ctx context.Context, from <-chan T) (next T, err error) {
	select {
	case next = <-from:
		return next, nil
	default:
	}
	defer lend(ctx)()
	select {
	case next = <-from:
		return next, nil
	case <-ctx.Done():
		return next, ctx.Err()
	}
}

// task makes Future a dependency.
func (t *pending) task() *pending { return t }

// dependency is a Future of any type.
type dependency interface {
	task() *pending
	type_() reflect.Type
}

func (f *Future[R]) type_() reflect.Type { return reflect.TypeFor[R]() }

// input is an argument: an encoded value, a task, or a stored value.
type input struct {
	value []byte
	parts [][]byte // encoding of a value that is to be stored; ref is set afterwards
	task  *pending
	ref   *ref
	own   bool // ref was stored for this task
}

// size returns the size of the value in parts, in bytes.
func (in *input) size() int { return max(lengthOf(in.parts)-1, 0) }

// arguments encodes the arguments of a task and checks their types.
func (p *Pool) arguments(f *function, args []any) ([]input, error) {
	if len(args) < len(f.in) {
		return nil, fmt.Errorf("tasks: %s takes %d arguments, not %d", f.name, len(f.in), len(args))
	}
	in := make([]input, 0, len(args))
	for i, a := range args {
		want, err := f.arg(i)
		if err != nil {
			return nil, fmt.Errorf("tasks: %s takes %d arguments, not %d", f.name, len(f.in), len(args))
		}
		one, err := p.argument(a, want)
		if err != nil {
			return nil, fmt.Errorf("tasks: %s: argument %d %w", f.name, i+1, err)
		}
		in = append(in, one)
	}
	return in, nil
}

// argument encodes an argument for a parameter of type want.
func (p *Pool) argument(a any, want reflect.Type) (in input, err error) {
	below := refOf(want)
	if d, ok := a.(dependency); ok && want != reflect.TypeOf(a) {
		switch {
		case d.type_() != want && d.type_() != below:
			return in, fmt.Errorf("is a Future of %v, not of %v", d.type_(), want)
		case d.task().pool != p:
			return in, errors.New("is a Future of another pool")
		}
		return input{task: d.task()}, nil
	}
	if r, ok := a.(reference); ok {
		switch {
		case r.type_() != want && r.type_() != below:
			return in, fmt.Errorf("is a Ref of %v, not of %v", r.type_(), want)
		case r.refers() == nil || r.refers().id == blob.ID{}:
			return in, errors.New("is a Ref that refers to no stored value")
		case r.refers().put != nil && r.refers().put.released.Load():
			return in, errors.New("is a Ref that was released")
		}
		return input{ref: r.refers()}, nil
	}
	if below != nil {
		return in, fmt.Errorf("is a %T, not a %v", a, want)
	}
	v := reflect.ValueOf(a)
	if !v.IsValid() {
		v = reflect.Zero(want)
	}
	if !v.Type().AssignableTo(want) {
		// An untyped constant arrives as an int, although the parameter may have another numeric
		// type.
		if v.Kind() != reflect.Int || !(reflect.Zero(want).CanInt() || reflect.Zero(want).CanFloat()) || !fitsInto(v, want) {
			return in, fmt.Errorf("is a %v, not a %v", v.Type(), want)
		}
		v = v.Convert(want)
	}
	if want.Kind() == reflect.Interface {
		return in, fmt.Errorf("has the interface type %v, which is not encoded", want)
	}
	if in.parts, err = encodeParts(v.Convert(want)); err == nil && in.size() <= inlineLimit {
		if in.value = in.parts[0]; len(in.parts) > 1 {
			in.value = slices.Concat(in.parts...)
		}
	}
	return in, err
}

// fitsInto reports whether a number keeps its value in type t.
func fitsInto(v reflect.Value, want reflect.Type) bool {
	return v.Convert(want).Convert(v.Type()).Int() == v.Int()
}

// spillError means that an argument must be stored before its task is sent.
type spillError struct{ arg int }

// Error describes the argument. Users never see it.
func (e *spillError) Error() string { return fmt.Sprintf("argument %d is large", e.arg+1) }

// encoded has the encoded arguments of a task, and what they refer to.
type encoded struct {
	args   []byte
	needs  []uint64  // numbers of tasks
	values [][]byte  // IDs of stored values
	keep   []any     // what must be kept until the task is over
	spills []blob.ID // IDs of the values that were stored for this task
}

// encodeInputs encodes the arguments of a task. Results of tasks that are over are sent as values.
// The error is a *spillError if an argument is too large to be sent. The caller holds the pool's
// lock.
func (p *Pool) encodeInputs(f *function, in []input) (e encoded, err error) {
	all := &taskspb.TaskArgs{Args: make([]*taskspb.TaskArg, len(in))}
	sum := 0
	for i, a := range in {
		value, parts := a.value, a.parts
		if t := a.task; t != nil && a.ref == nil {
			switch {
			case t.err != nil:
				return e, &DependencyError{f.name, t.dependsOn()}
			case t.result == nil || t.result.GetSize() > 0:
				all.Args[i] = &taskspb.TaskArg{Task: t.n}
				e.needs = append(e.needs, t.n)
				e.keep = append(e.keep, t)
				continue
			}
			value = t.result.GetInlined()
			parts = [][]byte{value}
		}
		if a.ref != nil {
			all.Args[i] = &taskspb.TaskArg{Value: a.ref.id[:]}
			e.values = append(e.values, a.ref.id[:])
			e.keep = append(e.keep, a.ref)
			if a.own {
				e.spills = append(e.spills, a.ref.id)
			}
			continue
		}
		size := max(lengthOf(parts)-1, 0)
		if size > inlineLimit || sum+size > messageLimit {
			return e, &spillError{i}
		}
		sum += size
		all.Args[i] = &taskspb.TaskArg{Inlined: value}
	}
	e.args, err = proto.Marshal(all)
	return e, err
}

// dependsOn returns the error text for a task that depends on this one, which has failed.
func (t *pending) dependsOn() string {
	var chain *DependencyError
	var own *FunctionError
	text := t.err.Error()
	switch {
	case errors.As(t.err, &chain):
		return chain.Text
	case errors.Is(t.err, ErrCancelled):
		return queue.DependsOn(t.fn.name, t.n, queue.Cancelled, "")
	case errors.As(t.err, &own):
		text = own.Text
	}
	return queue.DependsOn(t.fn.name, t.n, queue.Failed, text)
}

// spill stores argument i.
func (p *Pool) spill(ctx context.Context, in []input, i int) error {
	a := &in[i]
	parts := a.parts
	if a.task != nil {
		p.mu.Lock()
		parts = [][]byte{a.task.result.GetInlined()}
		p.mu.Unlock()
	}
	id, err := p.bring(ctx, parts)
	if err != nil {
		return fmt.Errorf("argument %d: %w", i+1, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold(id, int64(lengthOf(parts)))
	a.ref, a.own, a.parts = &ref{id: id}, true, nil
	return nil
}

// dropAll releases what was stored for a task that is not sent. The caller holds the lock.
func (p *Pool) dropAll(in []input) {
	for _, a := range in {
		if a.own {
			p.drop(a.ref.id)
		}
	}
}

// Map calls a function for each of the items, as one task each, and returns the results in their
// order. At the first error, including one of Submit, it cancels the other tasks and returns that
// error.
func Map[A, R any](ctx context.Context, p *Pool, f *Func[R], items []A) ([]R, error) {
	live, stop := context.WithCancel(ctx)
	defer stop()
	futures, ended := make([]*Future[R], len(items)), make(chan int, len(items))
	var submitting sync.WaitGroup
	var refused error // error of Submit
	submitting.Go(func() {
		for i, item := range items {
			if futures[i], refused = f.Submit(live, p, item); refused != nil {
				stop()
				return
			}
			futures[i].whenOver(func() { ended <- i })
		}
	})
	results := make([]R, len(items))
	next := func() error {
		i, err := receive(live, ended)
		if err == nil {
			results[i], err = futures[i].Get(ctx)
		}
		return err
	}
	var err error
	for n := 0; n < len(items) && err == nil; n++ {
		err = next()
	}
	stop()
	submitting.Wait()
	switch {
	case err == nil:
		return results, nil
	case errors.Is(err, live.Err()) && refused != nil:
		err = refused
	}
	for _, t := range futures {
		if t != nil {
			t.Cancel()
		}
	}
	return nil, err
}

// RunAll calls the function once on each worker that currently serves tasks, and returns the
// results in the order of the workers' ranks. It skips workers that are leaving, and workers that
// train unless they have set Beside. A call is not repeated if its worker is lost, or becomes a
// member of a world before it has run the call. It fails on a worker that lacks the function or
// offers fewer resources. RunAll returns the first error of a call; the other calls continue.
func RunAll[R any](ctx context.Context, p *Pool, f *Func[R], args ...any) ([]R, error) {
	s, err := p.Status(ctx)
	if err != nil {
		return nil, err
	}
	s.Workers = slices.DeleteFunc(s.Workers, func(w report.WorkerStatus) bool { return w.Trains || w.Leaving })
	slices.SortFunc(s.Workers, func(a, b report.WorkerStatus) int {
		return cmp.Or(cmp.Compare(a.Rank, b.Rank), strings.Compare(a.Host, b.Host), cmp.Compare(a.ID, b.ID))
	})
	var futures []*Future[R]
	for _, w := range s.Workers {
		t, err := f.With(Retries(0), func(o *options) { o.pin = w.ID }).Submit(ctx, p, args...)
		if err != nil {
			return nil, err
		}
		futures = append(futures, t)
	}
	results := make([]R, len(futures))
	for i, t := range futures {
		if results[i], err = t.Get(ctx); err != nil {
			return nil, fmt.Errorf("worker %s: %w", s.Workers[i].Name, err)
		}
	}
	return results, nil
}

// AsCompleted yields the futures in the order in which their tasks end, each with the error of its
// task. If ctx ends, it yields nil with ctx's error and stops.
func AsCompleted[R any](ctx context.Context, futures []*Future[R]) iter.Seq2[*Future[R], error] {
	return func(yield func(*Future[R], error) bool) {
		ended := make(chan *Future[R], len(futures))
		for _, t := range futures {
			t.whenOver(func() { ended <- t })
		}
		for range futures {
			t, err := receive(ctx, ended)
			if err != nil {
				yield(nil, err)
				return
			}
			if !yield(t, t.Err(ctx)) {
				return
			}
		}
	}
}

// whenOver calls f once the task is over, at once if it already is. f must not block.
func (t *pending) whenOver(f func()) {
	t.pool.mu.Lock()
	if !t.ended() {
		t.after = append(t.after, f)
		t.pool.mu.Unlock()
		return
	}
	t.pool.mu.Unlock()
	f()
}
