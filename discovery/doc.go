// Package discovery finds the hosts of a job.
//
// A host list comes from a Discoverer: Script runs a command and parses its output, Fixed has a
// constant list, other packages ask a cloud or a cluster; Merge makes one source of several. Poll
// turns the Discoverer into a stream: it asks again and again (or listens to a Watcher), checks
// every list, and passes on each list that differs from the last. It handles failures: the first
// failure is fatal, since the job has no hosts yet; after a later one the last list stays.
//
// The driver interprets the lists: how old each host is, and which slots and hosts are excluded
// because they have failed (driver/decide).
//
//	sh -c discover.sh → Script → Poll → the driver's loop → decide.Machine
//
// Package conformance checks the requirements for every Discoverer, and package discoverytest runs
// these checks as tests. README.md explains how to write a Discoverer.
package discovery

import (
	"context"
	"errors"

	"github.com/hvdrun/hvdrun/plan"
)

// A Discoverer returns the current hosts. It keeps these promises, which discoverytest checks:
//
//   - A list is complete. If only a part can be found, Discover returns an error: a host that is
//     missing from a list is gone, and its workers are stopped. An empty list is valid and means
//     that there are no hosts.
//   - Hosts that are still there keep their order from call to call. Among hosts that appear in one
//     list, the first ones are older, and get the lower ranks.
//   - Each host is in the list once, and the list passes plan.CheckHosts.
//   - Discover returns soon after ctx has ended, with an error or a complete list, and leaves
//     nothing running. It bounds its own time: the caller waits for the answer before it asks
//     again.
//   - The caller owns the list and may change it.
//   - Discover may be called by several goroutines at once.
type Discoverer interface {
	Discover(ctx context.Context) ([]plan.Host, error)
}

// Watcher is an optional interface of a Discoverer that learns of changes without being asked.
//
// Watch calls found with the complete list as soon as it is known, and again whenever it has
// changed, one call at a time and none after Watch has returned; found owns the list. Watch blocks
// until ctx ends or until it can watch no longer, and returns the reason. After a failure it is
// called again, and then starts with the complete list. The promises of Discoverer about lists and
// the end of ctx apply here too. If a Watch cannot push after all, it returns ErrNoWatch, and the
// source is polled instead.
type Watcher interface {
	Watch(ctx context.Context, found func([]plan.Host)) error
}

// ErrNoWatch is returned by a Watch that cannot push, such as the Watch of a plugin that does not
// implement it.
var ErrNoWatch = errors.New("discovery: the source cannot push")

// Scaler is an optional interface of a Discoverer that can create hosts.
//
// Scale asks for slots: as many as the source can get, from least to most. It takes one step
// towards that and returns soon. It is called every few seconds, by one goroutine. The source lists
// new hosts, and lists hosts as draining before it takes them away. If most is 0 the job is over:
// the source gives all hosts back, and returns when it has requested that. If a Scale cannot create
// hosts after all, it returns ErrNoScale.
type Scaler interface {
	Scale(ctx context.Context, least, most int) error
}

// ErrNoScale is returned by a Scale that cannot create hosts.
var ErrNoScale = errors.New("discovery: the source cannot bring hosts")
