package bridge

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"

	"github.com/hvdrun/hvdrun/tasks"
)

// familyName is the family of functions that workers of Scaler offer to a pool.
const familyName = "scaler"

// remoteCall is the type of its functions.
type remoteCall = func(ctx context.Context, name string, serializer, code []byte, args ...[]byte) ([]byte, error)

// Label returns the name of a resource that only workers of Scaler with a name offer, for tasks
// that others cannot run: scaler_cluster calls it --worker-names, Config calls it Name.
func Label(worker string) string { return "scaler:" + worker }

// Function is a function that workers of Scaler run, which have joined a pool by Serve. It is safe
// for concurrent use, and is not changed.
type Function struct {
	fn               *tasks.Func[[]byte]
	name             string
	serializer, code []byte
	json             bool
}

// Python returns a function in Python from its source, a module that defines a function of that
// name. Its arguments and its result are JSON. Workers need no packages but those that the source
// imports.
func Python(name, source string) (*Function, error) {
	text, err := json.Marshal([]string{name, source})
	if err != nil {
		return nil, err
	}
	return newFunction(name, serializerOfJSON(), append([]byte{0}, text...), true)
}

// Pickled returns a function of which the program has the bytes: code, as the serializer reads
// them, and the serializer, a class as Scaler's clients pickle it with cloudpickle. A nil
// serializer is Scaler's own, for which code, arguments and results are pickles. Workers run
// whatever the bytes say.
func Pickled(name string, serializer, code []byte) (*Function, error) {
	if serializer == nil {
		serializer = []byte("\x80\x03cscaler.client.serializer.default\nDefaultSerializer\n.")
	}
	return newFunction(name, serializer, code, false)
}

// Named returns a function that workers in Go have registered, by Work. Its arguments and its
// result are JSON.
func Named(name string) (*Function, error) {
	text, err := json.Marshal(name)
	if err != nil {
		return nil, err
	}
	return newFunction(name, serializerOfJSON(), text, true)
}

func newFunction(name string, serializer, code []byte, isJSON bool) (*Function, error) {
	fn, err := tasks.Foreign[[]byte](familyName, name, remoteCall(nil))
	if err != nil {
		return nil, err
	}
	return &Function{fn, name, serializer, code, isJSON}, nil
}

// With returns the function with options, besides those that it has. By Label, a task runs on
// workers of a name.
func (f *Function) With(all ...tasks.Option) *Function {
	g := *f
	g.fn = f.fn.With(all...)
	return &g
}

// Submit submits a call, as tasks.Func.Submit does. An argument is a Future of another Function's
// result, or a value: bytes for Pickled, and what encoding/json can write for the others.
func (f *Function) Submit(ctx context.Context, p *tasks.Pool, args ...any) (*tasks.Future[[]byte], error) {
	all := []any{f.name, f.serializer, f.code}
	for i, a := range args {
		if _, ok := a.(*tasks.Future[[]byte]); !ok {
			b, err := f.encode(a)
			if err != nil {
				return nil, fmt.Errorf("scaler: %s: argument %d: %w", f.name, i+1, err)
			}
			a = b
		}
		all = append(all, a)
	}
	return f.fn.Submit(ctx, p, all...)
}

func (f *Function) encode(a any) ([]byte, error) {
	if f.json {
		return json.Marshal(a)
	}
	b, ok := a.([]byte)
	if !ok {
		return nil, fmt.Errorf("it is a %T, not bytes", a)
	}
	return b, nil
}

// Call submits a call and waits for its result: bytes for Pickled, of which result is a *[]byte,
// and JSON for the others. If ctx ends, the task is cancelled.
func (f *Function) Call(ctx context.Context, p *tasks.Pool, result any, args ...any) error {
	t, err := f.Submit(ctx, p, args...)
	if err != nil {
		return err
	}
	b, err := t.Get(ctx)
	if err != nil {
		if ctx.Err() != nil {
			t.Cancel()
		}
		return err
	}
	if f.json {
		return json.Unmarshal(b, result)
	}
	out, ok := result.(*[]byte)
	if !ok {
		return fmt.Errorf("scaler: %s: the result is bytes, not a %T", f.name, result)
	}
	*out = b
	return nil
}

// jsonSerializer is the serializer of Python and of Named: what begins with a zero byte is a
// function's name and source. One that cannot be compiled raises its error where it is called.
// Exceptions of classes that the source defines cannot be pickled, which would end the process.
const jsonSerializer = `import json
class Serializer:
    @staticmethod
    def serialize(obj):
        return json.dumps(obj).encode()
    @staticmethod
    def deserialize(payload):
        if payload[:1] != b"\0":
            return json.loads(payload)
        name, source = json.loads(payload[1:])
        scope = {"__name__": "hvdrun_tasks"}
        try:
            exec(compile(source, "<" + name + ">", "exec"), scope)
            function = scope[name]
        except Exception as e:
            problem = e
            def function(*args):
                raise problem
        def call(*args):
            try:
                return function(*args)
            except Exception as e:
                if type(e).__module__ != scope["__name__"]:
                    raise
                raise RuntimeError(type(e).__name__ + ": " + str(e)) from None
        return call
`

// serializerOfJSON returns the serializer as a pickle: a call of eval with the text of an
// expression, which runs the module.
func serializerOfJSON() []byte {
	module, _ := json.Marshal(jsonSerializer) // a literal of Python too
	text := fmt.Sprintf("(lambda scope: exec(%s, scope) or scope['Serializer'])({})", module)
	p := binary.LittleEndian.AppendUint32([]byte("\x80\x03cbuiltins\neval\nX"), uint32(len(text)))
	return append(append(p, text...), "\x85R."...)
}
