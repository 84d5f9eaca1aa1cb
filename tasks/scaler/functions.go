package scaler

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// Func is a function that tasks call. Its arguments and its result are bytes in the format of the
// client's serializer. The arguments are shared with other tasks and must not be changed. It should
// return soon after ctx ends, because a task that was taken back occupies its slot until then. It
// may be called again for a task whose result was lost.
type Func func(ctx context.Context, args [][]byte) ([]byte, error)

// Functions are the functions of a worker by name. The name is what the client's serializer
// produces for the function: the name itself, or a JSON string. A Go worker cannot run Python, and
// therefore never runs a serializer.
type Functions map[string]Func

// maxName is the largest length of a function's name in bytes.
const maxName = 255

// CallError is the reason why a task cannot run on this worker. Its client gets it as an exception.
type CallError struct {
	// Class is the class of the exception, in Python's module builtins.
	Class, Text string
}

func (e *CallError) Error() string { return "scaler: " + e.Text }

// find returns the function that an object refers to.
func (c *Config) find(object []byte) (Func, error) {
	if isPickle(object) {
		return nil, &CallError{"NotImplementedError", "the function is pickled Python code, which a worker in Go cannot run: " +
			"the client's serializer must make the name of a registered function of it"}
	}
	name := string(object)
	if bytes.HasPrefix(object, []byte(`"`)) {
		if err := json.Unmarshal(object, &name); err != nil {
			return nil, &CallError{"ValueError", fmt.Sprintf("the function's name is not a JSON string: %v", err)}
		}
	}
	if len(name) > maxName || !utf8.ValidString(name) || name == "" {
		return nil, &CallError{"ValueError", fmt.Sprintf("the function is an object of %d bytes, not a name", len(object))}
	}
	fn := c.Functions[name]
	if fn == nil {
		return nil, &CallError{"LookupError", fmt.Sprintf("no function %q is registered at this worker", name)}
	}
	return fn, nil
}

// JSON returns a Func that calls fn, a function of one argument, for clients with a JSON
// serializer.
func JSON[A, R any](fn func(context.Context, A) (R, error)) Func {
	return func(ctx context.Context, args [][]byte) ([]byte, error) {
		if len(args) != 1 {
			return nil, &CallError{"TypeError", fmt.Sprintf("the function takes 1 argument, not %d", len(args))}
		}
		var arg A
		if err := json.Unmarshal(args[0], &arg); err != nil {
			return nil, &CallError{"TypeError", fmt.Sprintf("the argument: %v", err)}
		}
		result, err := fn(ctx, arg)
		if err != nil {
			return nil, err
		}
		return json.Marshal(result)
	}
}
