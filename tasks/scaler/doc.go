// Package scaler makes a Go program a worker of a cluster of Scaler, a task scheduler written in
// Python that uses ZeroMQ. Work speaks the protocol of the workers of Scaler 1.7.14:
//
//	err := scaler.Work(ctx, scaler.Config{
//		Address: "tcp://127.0.0.1:6378",
//		Slots:   4,
//		Functions: scaler.Functions{
//			"norm": scaler.JSON(func(_ context.Context, p point) (float64, error) {
//				return p.X*p.X + p.Y*p.Y, nil
//			}),
//		},
//	})
//
// A worker in Go cannot run Python. Its functions are registered by name. The client needs a
// serializer that encodes a function as its name and everything else as JSON:
//
//	class Names(Serializer):
//	    @staticmethod
//	    def serialize(obj):
//	        return json.dumps(obj.__name__ if callable(obj) else obj).encode()
//
//	    @staticmethod
//	    def deserialize(payload):
//	        return json.loads(payload)
//
// # Guarantees
//
// If the function of a task is pickled code or is not registered, the task fails: the client gets a
// NotImplementedError or a LookupError. If a function returns an error or panics, the client gets a
// RuntimeError with the text.
//
// A task can run more than once, as in Scaler, and its function must tolerate that. When the
// connection breaks, or the scheduler is silent for 30 s, the worker reconnects and resends
// results; after five minutes [Work] returns [ErrNoScheduler]. When the scheduler takes a task
// back, or the client cancels it, the task's context ends. When a task ends its process (os.Exit, a
// panic in a goroutine), Scaler sends it to the next worker, and so on: one such function ends all
// Go workers of a cluster.
//
// The worker keeps objects for later tasks, up to 256 MiB. It drops a message of more than 256 MiB,
// and the task that needs it fails with a MemoryError.
//
// The connection to the scheduler is neither encrypted nor authenticated. Anyone on the network in
// between can choose which registered functions are called, and with which arguments.
//
// # Versions
//
// Versions 1.8 and later speak other protocols. Do not give [Work], or a stock worker of 1.7.14,
// the address of a scheduler of 1.8 or 1.9: the scheduler ends at the first message of another
// version, and its cluster ends with it.
package scaler
