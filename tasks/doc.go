// Package tasks runs functions on the workers of a job: side work of a training job, such as the
// evaluation of checkpoints, or a job of its own.
//
// A function is registered by name in a program that runs in several processes. Workers offer it
// with [Serve]; a client calls it with [Func.Submit], which returns a [Future]:
//
//	var eval = tasks.Register[float64]("eval/v1", func(ctx context.Context, path string) (float64, error) { … })
//
//	pool, err := tasks.Connect(ctx, tasks.ConnectConfig{})
//	f, err := eval.Submit(ctx, pool, "step-1000.safetensors")
//	loss, err := f.Get(ctx)
//
// An argument may be a Future of another task: the task then waits for it. A task runs at least
// once: it runs again where its worker is lost, unless that happens too often, so functions must
// bear to be called twice. The result of one attempt reaches the caller, once; a late one of an
// earlier attempt is refused.
//
// Values are encoded by their types: bytes, strings and numbers as they are, types with
// MarshalBinary and UnmarshalBinary by these, all others by encoding/gob, which only has exported
// fields.
package tasks
