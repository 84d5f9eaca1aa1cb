package launch

import (
	"context"
	"time"

	"github.com/hvdrun/hvdrun/stacks"
)

// Router is a Launcher whose workers may run on other machines.
type Router interface {
	Launcher
	// HostAddr returns an address, or a name, at which the job's other hosts reach the host. It may
	// block until ctx ends; then it returns the cause.
	HostAddr(ctx context.Context, host string) (string, error)
}

// Teller is a Launcher that exchanges lines with its workers itself: it calls Spec.Line and
// Spec.Stream instead of Spec.Talk.
type Teller interface {
	Launcher
	// Tell sends a line, followed by tail, to the workers, which are named by incarnation. If the
	// line is a world, ranks are the ranks of the workers; nil: all get the same line. It does not
	// block. A line may be lost; the worker then requests again what it waits for, by a call of
	// Spec.Line. Tell keeps the slices.
	Tell(workers []string, ranks []uint32, text, tail []byte)
}

// Widener is a Router whose workers may all be on this machine at first.
type Widener interface {
	Router
	// Widen sets the function that the Widener calls, at most once, before the first worker on
	// another machine is started. Widen is called before the first Run, and may call it itself.
	Widen(widen func())
}

// Prober is a Launcher that can find out where its workers are, without their help.
type Prober interface {
	Launcher
	// Probe describes the process of an incarnation on a host, and its descendants. It blocks at
	// most until ctx ends.
	Probe(ctx context.Context, host, incarnation string) (stacks.Worker, error)
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
	// that takes over and rises by one with each later driver: agents refuse drivers of earlier
	// terms. last is the time of the journal's last record: if an agent knows of a later record,
	// the Keeper reports it.
	Adopt(incarnations []string, term uint64, last time.Time)
	// Noted reports to the agents that all records of the journal up to the time at are on disk. It
	// does not block.
	Noted(at time.Time)
	// Settle records that the result of Run for the incarnation is in the journal. The agent keeps
	// it until then. Settle does not block.
	Settle(incarnation string)
}
