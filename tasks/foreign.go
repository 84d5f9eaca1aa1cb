package tasks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// ErrAttemptLost is for functions of a Family: an error that wraps it says that the program that
// ran the task was lost. The task runs again, which counts as the loss of a worker.
var ErrAttemptLost = errors.New("tasks: what ran the task was lost")

// Causes with which the context of Serve may end.
var (
	// ErrVanished says that the program that runs the tasks is gone: Serve returns at once, and its
	// worker counts as lost.
	ErrVanished = errors.New("tasks: what runs the tasks is gone")
	// ErrReturned returns running tasks at once; this does not count as a loss.
	ErrReturned = errors.New("tasks: what runs is given back")
)

// Family is a set of functions that a worker offers without naming them: all functions whose names
// begin with the name of the family. Foreign names them for clients.
type Family struct {
	name string
	fn   *function
}

// NewFamily returns a family; fn is called for each of its functions: see Register. The name has 1
// to 50 bytes and no colon.
func NewFamily[R any](name string, fn any) (*Family, error) {
	f, err := familyOf(name, fn, reflect.TypeFor[R]())
	if err != nil {
		return nil, fmt.Errorf("tasks: family %q: %w", name, err)
	}
	return &Family{name, f}, nil
}

// familyOf returns a function whose hash is that of all functions of a family with the same types.
func familyOf(name string, fn any, result reflect.Type) (*function, error) {
	if name == "" || len(name) > 50 || strings.ContainsAny(name, ":@") {
		return nil, errors.New("the name of a family has 1 to 50 bytes, without : and @")
	}
	return newFunction(name+":*", fn, result)
}

// Foreign returns a function that this program does not have, so that it can submit tasks of it.
// like is a value of the function's type, and may be nil. Workers that offer the family run it. In
// the family "json", workers that have exported it run it: see Export. The name has 1 to 100 bytes.
func Foreign[R any](family, name string, like any) (*Func[R], error) {
	f, err := familyOf(family, like, reflect.TypeFor[R]())
	switch {
	case err != nil:
		return nil, fmt.Errorf("tasks: function %q: %w", name, err)
	case name == "" || len(name) > maxForeign || !utf8.ValidString(name):
		return nil, fmt.Errorf("tasks: a function of the family %s: a name has 1 to %d bytes, and is UTF-8", family, maxForeign)
	}
	f.name = family + ":" + name
	return &Func[R]{fn: f}, nil
}

// maxForeign bounds the name of a function of a family.
const maxForeign = 100

// jsonFamily has functions whose arguments and results are JSON.
const jsonFamily = "json"

// jsonCall is the type of its functions.
type jsonCall = func(ctx context.Context, args ...[]byte) ([]byte, error)

// ForeignJSON returns an exported function, so that a program that does not know its types can
// submit tasks.
func ForeignJSON(name string) (*Func[[]byte], error) {
	return Foreign[[]byte](jsonFamily, name, jsonCall(nil))
}

// ExportedName returns the name of an exported function, as a worker sends it to the scheduler; ""
// if the function is not exported.
func ExportedName(offered string) string {
	name, ok := strings.CutPrefix(offered, jsonFamily+":")
	if !ok {
		return ""
	}
	return name
}

// Export lets programs that do not know the types of a registered function call it: its arguments
// and its result are then JSON. Workers of Scaler use it: see hvdrun tasks scaler-worker. Anyone
// who reaches such a worker can call the function, with any values. Export panics if the function
// is not registered in this program, or has already been exported. Call it before Serve, for
// example to set a variable of a package; it returns the function.
func Export[R any](f *Func[R]) *Func[R] {
	functions.Lock()
	known := functions.byName[f.fn.name] == f.fn
	functions.Unlock()
	switch {
	case !known:
		panic(fmt.Sprintf("tasks: Export of %q, which is not registered", f.fn.name))
	case len(f.fn.name) > maxForeign:
		panic(fmt.Sprintf("tasks: Export of %q: an exported name has at most %d bytes", f.fn.name, maxForeign))
	}
	e, err := familyOf(jsonFamily, f.fn.byJSON, reflect.TypeFor[[]byte]())
	if err != nil {
		panic(fmt.Sprintf("tasks: Export(%q): %v", f.fn.name, err))
	}
	e.name = jsonFamily + ":" + f.fn.name
	register(e)
	return f
}

// byJSON calls the function with arguments that are JSON, and returns JSON.
func (f *function) byJSON(ctx context.Context, texts ...[]byte) ([]byte, error) {
	if len(texts) < len(f.in) || len(texts) > len(f.in) && f.more == nil {
		return nil, fmt.Errorf("%s takes %d arguments, not %d", f.name, len(f.in), len(texts))
	}
	args := make([]reflect.Value, len(texts))
	for i, text := range texts {
		t, err := f.arg(i)
		if err != nil {
			return nil, err
		}
		if args[i], err = fromJSON(text, t); err != nil {
			return nil, fmt.Errorf("argument %d is no JSON of a %v: %w", i+1, t, err)
		}
	}
	return f.toJSON(f.call.Call(append([]reflect.Value{reflect.ValueOf(ctx)}, args...)))
}

func fromJSON(text []byte, t reflect.Type) (reflect.Value, error) {
	v := reflect.New(t)
	err := json.Unmarshal(text, v.Interface())
	return v.Elem(), err
}

// toJSON returns the result of a call.
func (f *function) toJSON(out []reflect.Value) ([]byte, error) {
	if e := out[len(out)-1]; !e.IsNil() {
		return nil, e.Interface().(error)
	}
	if f.out == nil {
		return []byte("null"), nil
	}
	return json.Marshal(out[0].Interface())
}
