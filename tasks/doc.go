// Package tasks runs functions on the workers of a job: as side work of a training job, such as the
// evaluation of checkpoints, or as a job that only runs functions.
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
// once: if its worker is lost it runs again, up to a limit, so functions must tolerate a second
// call. The caller gets the result of one attempt only; late results of earlier attempts are
// refused.
//
// Values are encoded by their types: bytes, strings and numbers unchanged, types with MarshalBinary
// and UnmarshalBinary by these methods, all others by encoding/gob, which includes only exported
// fields.
package tasks
