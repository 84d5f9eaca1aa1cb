package tasks

import (
	"context"
	"fmt"
	"reflect"
	"runtime"
	"sync/atomic"

	"github.com/hvdrun/hvdrun/internal/blob"
	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
)

// Ref is a reference to a stored value. An argument that is a Ref is not sent with each task: the
// workers of a host copy the value to their host once. A function takes it either as a Ref[T],
// whose Get returns the same value, decoded once, to all tasks of the process, or as a T, which is
// decoded for each task. The zero value refers to nothing. A Ref is safe for concurrent use.
type Ref[T any] struct{ ref *ref }

// ref is the value to which a Ref refers.
type ref struct {
	id   blob.ID
	put  *put // set in the client that has stored it; nil: it is an argument
	load func(ctx context.Context, t reflect.Type) (reflect.Value, error)
}

// put is a stored value that a client needs.
type put struct {
	pool     *Pool
	ref      blob.ID
	released atomic.Bool
}

// release records that the client no longer needs the value.
func (u *put) release() {
	if !u.released.Swap(true) {
		u.pool.mu.Lock()
		defer u.pool.mu.Unlock()
		u.pool.drop(u.ref)
	}
}

// Put stores a value and returns a reference to it. It blocks until the value is stored. The job's
// hvdrun stores the value; hosts copy it from there and from each other. It stays stored until
// Release is called, the Ref is garbage collected or the pool is closed, and until all tasks that
// have it as an argument are finished. The error wraps ErrStoreFull if there is no room.
func Put[T any](ctx context.Context, p *Pool, value T) (Ref[T], error) {
	parts, err := encodeParts(reflect.ValueOf(&value).Elem())
	if err != nil {
		return Ref[T]{}, fmt.Errorf("tasks: %w", err)
	}
	r, err := p.put(ctx, parts)
	if err != nil {
		return Ref[T]{}, err
	}
	return Ref[T]{r}, nil
}

// Get returns the value. In a task it does not block after the first call in the process, and all
// tasks get the same value, which they must not change. In the client that has stored the value,
// each call fetches and decodes it.
func (r Ref[T]) Get(ctx context.Context) (value T, err error) {
	if r.ref == nil {
		return value, fmt.Errorf("%w: the Ref refers to nothing", ErrGone)
	}
	v, err := r.ref.load(ctx, reflect.TypeFor[T]())
	if err != nil {
		return value, err
	}
	return v.Interface().(T), nil
}

// Release declares that only tasks already submitted still need the value. The Ref cannot be used
// afterwards: Submit refuses it.
func (r Ref[T]) Release() {
	if r.ref != nil && r.ref.put != nil {
		r.ref.put.release()
	}
}

// reference is a Ref of any type.
type reference interface {
	refers() *ref
	type_() reflect.Type
}

func (r Ref[T]) refers() *ref { return r.ref }

func (r Ref[T]) type_() reflect.Type { return reflect.TypeFor[T]() }

// bind sets the value to which r refers.
func (r *Ref[T]) bind(to *ref) { r.ref = to }

type binder interface{ bind(to *ref) }

var referenceType = reflect.TypeFor[reference]()

// refOf returns the type T of a Ref[T], or nil if the type is not a Ref.
func refOf(t reflect.Type) reflect.Type {
	if !t.Implements(referenceType) || t.Kind() != reflect.Struct {
		return nil
	}
	return reflect.Zero(t).Interface().(reference).type_()
}

// newRef returns a Ref of type t that refers to the value to.
func newRef(t reflect.Type, to *ref) reflect.Value {
	v := reflect.New(t)
	v.Interface().(binder).bind(to)
	return v.Elem()
}

// put stores a value.
func (p *Pool) put(ctx context.Context, parts [][]byte) (*ref, error) {
	id, err := p.bring(ctx, parts)
	if err != nil {
		return nil, err
	}
	size := int64(lengthOf(parts))
	u := &put{pool: p, ref: id}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed != nil {
		return nil, p.failed
	}
	p.hold(id, size)
	r := &ref{id: id, put: u}
	r.load = func(ctx context.Context, t reflect.Type) (reflect.Value, error) {
		defer runtime.KeepAlive(r)
		b, err := p.fetch(ctx, id, size)
		if err != nil {
			return reflect.Value{}, err
		}
		return decodeOwn(b, t)
	}
	runtime.AddCleanup(r, (*put).release, u)
	return r, nil
}

// holding is a value that this client needs, with the number of its users.
type holding struct {
	size  int64
	users int
}

// hold counts a user of a value. The caller holds the lock.
func (p *Pool) hold(id blob.ID, size int64) {
	h := p.puts[id]
	if h == nil {
		h = &holding{size: size}
		p.puts[id] = h
		v := &taskspb.PutValue{Value: id[:], Size: uint64(size)}
		p.send(v, func(m *taskspb.ToTasks) { m.Puts = append(m.Puts, v) })
	}
	h.users++
}

// drop undoes hold. The caller holds the lock.
func (p *Pool) drop(id blob.ID) {
	h := p.puts[id]
	if h == nil {
		return
	}
	if h.users--; h.users == 0 {
		delete(p.puts, id)
		p.send(nil, func(m *taskspb.ToTasks) { m.Unputs = append(m.Unputs, id[:]) })
	}
}
