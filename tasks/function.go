package tasks

import (
	"context"
	"crypto/sha256"
	"encoding"
	"encoding/gob"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/hvdrun/hvdrun/internal/wire/taskspb"
	"github.com/hvdrun/hvdrun/tasks/internal/queue"
)

// Func is a registered function whose tasks have results of type R. Tasks are submitted with the
// options of With. It is safe for concurrent use.
type Func[R any] struct {
	fn      *function
	options options
}

// function is a registered function with its name.
type function struct {
	name string
	hash [sha256.Size]byte
	call reflect.Value
	in   []reflect.Type // types of the arguments, without the context
	more reflect.Type   // type of all further arguments; nil: the function is not variadic
	out  reflect.Type   // nil: the function returns only an error
}

// functions holds all functions that this program has registered.
var functions struct {
	sync.Mutex
	byName map[string]*function
}

var (
	contextType = reflect.TypeFor[context.Context]()
	errorType   = reflect.TypeFor[error]()
)

// None is the result of a function that returns only an error.
type None struct{}

// Register registers a function under a name, so that tasks can call it in any process of the same
// program:
//
//	func(ctx context.Context, a A, b B, …) (R, error)
//
// with any number of arguments; the last one may be variadic. For a function that returns only an
// error, R is [None]. ctx ends when the task is cancelled or its time is up. The name should have a
// version: a worker runs a task only if its function has the same name and types as the client's.
// Register panics if the function does not have that form, or if the name is already registered or
// longer than 200 bytes. Call it before Serve and Connect, for example to set a variable of a
// package.
func Register[R any](name string, fn any) *Func[R] {
	f, err := newFunction(name, fn, reflect.TypeFor[R]())
	if err != nil {
		panic(fmt.Sprintf("tasks: Register(%q): %v", name, err))
	}
	register(f)
	return &Func[R]{fn: f}
}

// register adds a function to the functions of this program.
func register(f *function) {
	functions.Lock()
	defer functions.Unlock()
	if functions.byName[f.name] != nil {
		panic(fmt.Sprintf("tasks: Register(%q): the name is taken", f.name))
	}
	if functions.byName == nil {
		functions.byName = make(map[string]*function)
	}
	functions.byName[f.name] = f
}

func newFunction(name string, fn any, result reflect.Type) (*function, error) {
	f := &function{name: name, call: reflect.ValueOf(fn)}
	if name == "" || len(name) > 200 || !utf8.ValidString(name) {
		return nil, errors.New("a name must have 1 to 200 bytes of UTF-8")
	}
	t := reflect.TypeOf(fn)
	if t == nil || t.Kind() != reflect.Func || t.NumIn() == 0 || t.In(0) != contextType {
		return nil, fmt.Errorf("%v is not a function whose first argument is a context.Context", t)
	}
	for i := 1; i < t.NumIn(); i++ {
		f.in = append(f.in, t.In(i))
	}
	if t.IsVariadic() {
		f.more = f.in[len(f.in)-1].Elem()
		f.in = f.in[:len(f.in)-1]
	}
	switch n := t.NumOut(); {
	case n == 1 && t.Out(0) == errorType && result == reflect.TypeFor[None]():
	case n == 2 && t.Out(1) == errorType && t.Out(0) == result:
		f.out = result
	default:
		return nil, fmt.Errorf("%v does not return (%v, error)", t, result)
	}
	f.hash = sha256.Sum256([]byte(name + "\x00" + typeNames(f)))
	return f, nil
}

// typeNames returns the types of a function's arguments and its result, with their packages, and
// with the fields of structs that gob sends: a field that only one of two processes has would be
// lost.
func typeNames(f *function) string {
	text := ""
	for _, t := range append(append([]reflect.Type{}, f.in...), f.more, f.out) {
		if t != nil {
			text += t.PkgPath() + "|" + t.String() + shapeOf(t, map[reflect.Type]bool{})
		}
		text += ";"
	}
	return text
}

// shapeOf returns the names and types of the fields of the structs in a type, in the order of the
// names. Types that encode themselves, and types in seen, are left out. shapeOf adds t to seen.
func shapeOf(t reflect.Type, seen map[reflect.Type]bool) (text string) {
	if below := refOf(t); below != nil {
		t = below
	}
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		return shapeOf(t.Elem(), seen)
	case reflect.Map:
		return shapeOf(t.Key(), seen) + shapeOf(t.Elem(), seen)
	case reflect.Struct:
	default:
		return ""
	}
	if seen[t] || encodesItself(t) {
		return ""
	}
	seen[t] = true
	fields := slices.DeleteFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool { return len(f.Index) > 1 || !f.IsExported() })
	slices.SortFunc(fields, func(a, b reflect.StructField) int { return strings.Compare(a.Name, b.Name) })
	for _, f := range fields {
		text += f.Name + " " + f.Type.String() + shapeOf(f.Type, seen) + ","
	}
	return "{" + text + "}"
}

// encodesItself reports whether values of a struct type, or pointers to them, have methods that
// encode them.
func encodesItself(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return p.Implements(reflect.TypeFor[encoding.BinaryMarshaler]()) || p.Implements(reflect.TypeFor[gob.GobEncoder]())
}

// wire returns the message that identifies the function to the scheduler.
func (f *function) wire() *taskspb.TaskFunction {
	return &taskspb.TaskFunction{Name: f.name, Hash: f.hash[:8]}
}

// arg returns the type of argument i.
func (f *function) arg(i int) (reflect.Type, error) {
	switch {
	case i < len(f.in):
		return f.in[i], nil
	case f.more != nil:
		return f.more, nil
	}
	return nil, fmt.Errorf("tasks: %s takes %d arguments, not %d", f.name, len(f.in), i+1)
}

// options are the options of a task.
type options struct {
	demand   map[string]int64
	priority int32
	prefer   string
	retries  int // in addition to the default
	again    bool
	limit    time.Duration
	pin      uint64
}

// Option is an option of tasks.
type Option func(*options)

// Priority makes tasks run before those of lower priority; 0 is the default.
func Priority(n int32) Option { return func(o *options) { o.priority = n } }

// Prefer runs a task on the given host, unless workers of other hosts are idle.
func Prefer(host string) Option { return func(o *options) { o.prefer = host } }

// CPU sets how many processors of its worker a task uses. Default: 1.
func CPU(n float64) Option { return Resource(queue.CPU, n) }

// GPU sets how many GPUs of its worker a task uses. Fractions are allowed.
func GPU(n float64) Option { return Resource("gpu", n) }

// Resource sets how much a task uses of a resource that workers offer under a name, in steps of a
// thousandth.
func Resource(name string, n float64) Option {
	return func(o *options) {
		demand := map[string]int64{name: int64(n*queue.Unit + 0.5)}
		for k, v := range o.demand {
			if k != name {
				demand[k] = v
			}
		}
		o.demand = demand
	}
}

// Retries sets how often a task runs again after its worker was lost. Default: 3; at most 200.
func Retries(n int) Option {
	return func(o *options) { o.retries = min(max(n, 0), 200) - queue.DefaultRetries }
}

// RetryErrors also runs a task again, equally often, after its function has returned an error.
func RetryErrors() Option { return func(o *options) { o.again = true } }

// TimeLimit sets how long a task may run. After that its context ends, and the task fails.
func TimeLimit(d time.Duration) Option { return func(o *options) { o.limit = d } }

// With returns the function with additional options.
func (f *Func[R]) With(all ...Option) *Func[R] {
	g := &Func[R]{fn: f.fn, options: f.options}
	for _, o := range all {
		o(&g.options)
	}
	return g
}

// Name returns the name of the function.
func (f *Func[R]) Name() string { return f.fn.name }
