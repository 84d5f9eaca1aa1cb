package launch

import (
	"context"
	"time"

	"github.com/hvdrun/hvdrun/stacks"
)

// Router is a Launcher whose workers reach the driver through their agents, and may run on other
// machines.
type Router interface {
	Launcher
	// ListenAddr returns the address on which the driver has to listen for its workers, as
	// net.Listen takes it.
	ListenAddr() string
	// Listening sets the port on which the driver listens. It is called before the first Run.
	Listening(port int)
	// HostAddr returns an address, or a name, at which the job's other hosts reach the host. It may
	// block until ctx ends; then it returns the cause.
	HostAddr(ctx context.Context, host string) (string, error)
}

// Widener is a Router whose workers may all be on this machine at first: ListenAddr is a loopback
// address then.
type Widener interface {
	Router
	// Widen sets the function that the Widener calls, at most once, before a worker on another
	// machine has to reach the driver: it makes the driver listen on other addresses too, and
	// returns the port there. Widen is called before the first Run, and may call open itself.
	Widen(open func() (port int, err error))
}

// Prober is a Launcher that can find out where its workers are, without their help.
type Prober interface {
	Launcher
	// Probe describes the process of an incarnation on a host, and its descendants. With goroutines
	// it also reads the goroutines of a Go program from its memory. It blocks at most until ctx
	// ends, and may return a part of the answer with an error.
	Probe(ctx context.Context, host, incarnation string, goroutines bool) (stacks.Worker, error)
}

// Keeper is a Launcher whose workers outlive the process that uses it: agents keep them, with their
// events, until another driver of the run comes. That driver calls Run again for each worker whose
// end is not in the journal; the Keeper then takes over the running worker, and does not start
// another.
type Keeper interface {
	Launcher
	// Adopt names the workers, by incarnation, for which Run will be called because an earlier
	// driver may have started them. It is called before the first Run; the first driver does not
	// call it. Agents may forget the events of other workers. The term is 1 for the first driver
	// that takes over, and one more for each later one: agents refuse drivers of earlier terms. The
	// journal ends with a record of the time last: where an agent knows of a later one, the Keeper
	// reports it.
	Adopt(incarnations []string, term uint64, last time.Time)
	// Noted tells agents that the journal has all records up to the time at, on the disk. It does
	// not block.
	Noted(at time.Time)
	// Settle records that the result of Run for the incarnation is in the journal. The agent keeps
	// it until then. Settle does not block.
	Settle(incarnation string)
}
