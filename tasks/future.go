package tasks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/hvdrun/hvdrun/internal/wire"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// Future is the result of a task that may not be over yet. It is safe for concurrent use.
type Future[R any] struct{ *pending }

// Submit asks for a call of the function with the arguments, and returns at once, unless as many
// tasks of the pool are not over as may be: then it waits for one of them to end. An argument is a
// value of the function's type, or a Future of that type of the same pool; then the task waits for
// it. Submit returns an error where the arguments do not fit the function, ctx ends, or the pool is
// closed.
func (f *Func[R]) Submit(ctx context.Context, p *Pool, args ...any) (*Future[R], error) {
	t, err := p.submit(ctx, f.fn, &f.options, args)
	if err != nil {
		return nil, err
	}
	return &Future[R]{t}, nil
}

// Call is Submit and Get. If ctx ends, the task is cancelled.
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

// waiting is Done; the lock is held.
func (t *pending) waiting() chan struct{} {
	if t.over == nil {
		t.over = make(chan struct{})
		if t.ended() {
			close(t.over)
		}
	}
	return t.over
}

// ended returns whether the task is over; the lock is held.
func (t *pending) ended() bool { return t.result != nil || t.err != nil }

// Cancel ends the task, if it is not over: it ends with ErrCancelled. One that runs has its context
// ended; what it returns then is ignored.
func (t *pending) Cancel() {
	t.pool.mu.Lock()
	defer t.pool.mu.Unlock()
	if !t.ended() {
		t.pool.send(16, func(m *wire.ToTasks) { m.Cancels = append(m.Cancels, &wire.CancelTask{N: t.n, Force: true}) })
	}
}

// Get waits until the task is over, and returns its result. Its error is *FunctionError,
// *DependencyError, or wraps ErrCancelled, ErrWorkerLost, ErrPoison, ErrTimeLimit or ErrClosed; or
// it is that of ctx.
func (f *Future[R]) Get(ctx context.Context) (R, error) {
	var r R
	f.pool.mu.Lock()
	if !f.ended() {
		over := f.waiting()
		f.pool.mu.Unlock()
		select {
		case <-over:
		case <-ctx.Done():
			return r, ctx.Err()
		}
		f.pool.mu.Lock()
	}
	result, err := f.result, f.err
	f.pool.mu.Unlock()
	if err != nil {
		return r, err
	}
	v, err := decode(result.GetInlined(), reflect.TypeFor[R]())
	if err != nil {
		return r, fmt.Errorf("tasks: the result of %s: %w", f.fn.name, err)
	}
	return v.Interface().(R), nil
}

// Err waits as Get does, and returns only the error.
func (t *pending) Err(ctx context.Context) error {
	select {
	case <-t.Done():
	case <-ctx.Done():
		return ctx.Err()
	}
	t.pool.mu.Lock()
	defer t.pool.mu.Unlock()
	return t.err
}

// task makes a Future an argument.
func (t *pending) task() *pending { return t }

// dependency is a Future of any type.
type dependency interface {
	task() *pending
	type_() reflect.Type
}

func (f *Future[R]) type_() reflect.Type { return reflect.TypeFor[R]() }

// input is an argument: encoded, or a task.
type input struct {
	value []byte
	task  *pending
}

// arguments encodes the arguments of a task, and checks their types.
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
		if d, ok := a.(dependency); ok && want != reflect.TypeOf(a) {
			switch {
			case d.type_() != want:
				return nil, fmt.Errorf("tasks: %s: argument %d is a Future of %v, not of %v", f.name, i+1, d.type_(), want)
			case d.task().pool != p:
				return nil, fmt.Errorf("tasks: %s: argument %d is a Future of another pool", f.name, i+1)
			}
			in = append(in, input{task: d.task()})
			continue
		}
		v := reflect.ValueOf(a)
		if !v.IsValid() {
			v = reflect.Zero(want)
		}
		if !v.Type().AssignableTo(want) {
			// A constant of a program is an int where the function has another number type.
			if v.Kind() != reflect.Int || !(reflect.Zero(want).CanInt() || reflect.Zero(want).CanFloat()) || !fitsInto(v, want) {
				return nil, fmt.Errorf("tasks: %s: argument %d is a %v, not a %v", f.name, i+1, v.Type(), want)
			}
			v = v.Convert(want)
		}
		if want.Kind() == reflect.Interface {
			return nil, fmt.Errorf("tasks: %s: argument %d has the interface type %v, which is not encoded", f.name, i+1, want)
		}
		b, err := encode(v.Convert(want))
		if err != nil {
			return nil, fmt.Errorf("tasks: %s: argument %d: %w", f.name, i+1, err)
		}
		in = append(in, input{value: b})
	}
	return in, nil
}

// fitsInto returns whether a number keeps its value in a type.
func fitsInto(v reflect.Value, want reflect.Type) bool {
	return v.Convert(want).Convert(v.Type()).Int() == v.Int()
}

// encodeInputs encodes what a task is sent with, and returns the tasks that it needs; the pool's
// lock is held. Tasks that are over are values.
func (p *Pool) encodeInputs(f *function, in []input) (args []byte, needs []uint64, err error) {
	all := &wire.TaskArgs{Args: make([]*wire.TaskArg, len(in))}
	sum := 0
	for i, a := range in {
		value := a.value
		switch t := a.task; {
		case t == nil:
		case t.err != nil:
			return nil, nil, &DependencyError{f.name, t.err.Error()}
		case t.result != nil:
			value = t.result.GetInlined()
		default:
			all.Args[i] = &wire.TaskArg{Task: t.n}
			needs = append(needs, t.n)
			continue
		}
		all.Args[i] = &wire.TaskArg{Inlined: value}
		if sum += len(value); sum > mostWithTask {
			return nil, nil, fmt.Errorf("%w: %s: the arguments have more than %d bytes", ErrTooLarge, f.name, mostWithTask)
		}
	}
	args, err = proto.Marshal(all)
	return args, needs, err
}

// Map calls a function for each of the items, as one task each, and returns the results in their
// order. At the first error it cancels the others, and returns it.
func Map[A, R any](ctx context.Context, p *Pool, f *Func[R], items []A) ([]R, error) {
	futures := make([]*Future[R], 0, len(items))
	cancel := func() {
		for _, t := range futures {
			t.Cancel()
		}
	}
	for _, item := range items {
		t, err := f.Submit(ctx, p, item)
		if err != nil {
			cancel()
			return nil, err
		}
		futures = append(futures, t)
	}
	results := make([]R, len(items))
	index := make(map[*Future[R]]int, len(items))
	for i, t := range futures {
		index[t] = i
	}
	for t, err := range AsCompleted(ctx, futures) {
		if err == nil {
			results[index[t]], err = t.Get(ctx)
		}
		if err != nil {
			cancel()
			return nil, err
		}
	}
	return results, nil
}

// RunAll calls the function once on each worker that serves tasks now, and returns the results in
// the order of the workers' ranks. A call whose worker is lost is not repeated. The error is the
// first of a call; the others go on.
func RunAll[R any](ctx context.Context, p *Pool, f *Func[R], args ...any) ([]R, error) {
	s, err := p.Status(ctx)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(s.Workers, func(a, b queue.WorkerStatus) int {
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

// AsCompleted returns the futures in the order in which their tasks end, each with the error of its
// task. If ctx ends, it returns nil with that error, and no more.
func AsCompleted[R any](ctx context.Context, futures []*Future[R]) iter.Seq2[*Future[R], error] {
	return func(yield func(*Future[R], error) bool) {
		ended := make(chan *Future[R], len(futures))
		for _, t := range futures {
			t.whenOver(func() { ended <- t })
		}
		for range futures {
			select {
			case t := <-ended:
				if !yield(t, t.Err(ctx)) {
					return
				}
			case <-ctx.Done():
				yield(nil, ctx.Err())
				return
			}
		}
	}
}

// whenOver calls f once the task is over. f must not block.
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

var errNotDriven = errors.New("tasks: this process is not a worker of a job, and was not started by hvdrun tasks run")
