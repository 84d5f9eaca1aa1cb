// Package discovery answers which hosts there are.
//
// A host list comes from a Discoverer: Script runs a command and parses what it prints, Fixed knows
// its hosts already, other packages ask a cloud or a cluster; Merge makes one of several. Poll
// turns the Discoverer into a stream: it asks again and again (or, of a Watcher, listens), checks
// every list, and hands on each that differs from the last. It decides what a failure means: the
// first is fatal, since a job that never saw its hosts has nothing to run on; after a later one the
// last list stays.
//
// The driver decides what the lists mean: how old each host is, and which slots and hosts stay out
// because they have failed (driver/decide).
//
//	sh -c discover.sh → Script → Poll → the driver's loop → decide.Machine
//
// Package promise holds what every Discoverer promises, package discoverytest the same as tests.
// README.md is for those who write one.
package discovery

import (
	"context"
	"errors"

	"github.com/hvdrun/hvdrun/plan"
)

// A Discoverer returns the hosts that there are now. It keeps these promises, which discoverytest
// checks:
//
//   - A list is whole. If only a part can be found, Discover returns an error: a host that is
//     missing from a list is gone, and its workers are stopped. An empty list is legal and means
//     that there are no hosts.
//   - Hosts that are still there keep their order from call to call. Among hosts that appear in one
//     list, the first ones are older, and get the lower ranks.
//   - Each host stands in the list once, and the list passes plan.CheckHosts.
//   - Discover returns soon after ctx has ended, with an error or a whole list, and leaves nothing
//     running. It bounds its own time: the caller waits for the answer, and will not ask again
//     before.
//   - The list is the caller's, who may change it.
//   - Discover may be called by several goroutines at once.
type Discoverer interface {
	Discover(ctx context.Context) ([]plan.Host, error)
}

// Watcher is an optional interface of a Discoverer that learns of changes by itself and need not be
// asked.
//
// Watch calls found with the whole list as soon as it is known, and again whenever it has changed,
// never twice at once and not after it has returned; the list is found's. It blocks until ctx ends
// or it can watch no longer, and says why. It is called again after a failure, and then starts with
// the whole list once more. What Discoverer promises of lists and of the end of ctx holds here too.
// One that finds out only then that it cannot push returns ErrNoWatch and is asked instead.
type Watcher interface {
	Watch(ctx context.Context, found func([]plan.Host)) error
}

// ErrNoWatch is returned by a Watch that cannot push, such as that of a plugin which does not
// implement it.
var ErrNoWatch = errors.New("discovery: the source cannot push")

// Scaler is what a Discoverer may be besides: one that can bring hosts into being.
//
// Scale asks for slots, from least to most, as many as the source can get. It takes a step
// towards that and returns soon; it is called every few seconds, by one goroutine. What it
// brings the source lists, as hosts, and what it takes away it lists as draining first. Where
// most is 0 the job is over: the source gives all back, and returns once that is asked for. One
// that finds out only then that it cannot bring hosts returns ErrNoScale.
type Scaler interface {
	Scale(ctx context.Context, least, most int) error
}

// ErrNoScale is returned by a Scale that cannot bring hosts.
var ErrNoScale = errors.New("discovery: the source cannot bring hosts")
