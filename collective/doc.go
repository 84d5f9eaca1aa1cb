// Package collective computes together: groups of ranks that reduce, broadcast, gather and wait for
// each other.
//
// A [Group] is the connected ranks of one generation. Groups come from [Endpoint.Connect], between
// worker processes over TCP, or from [Local], in one process. Every rank calls the same operations
// in the same order; each call blocks until its result is complete on this rank. One operation at a
// time runs on a group: a second one at the same time is refused with [ErrBusy] and disturbs
// nothing. That guards one rank against itself alone: goroutines that take turns on a group are not
// noticed, although nothing makes their turns the same on all ranks. What looks alike there
// (lengths, types, operations) is combined, and the wrong tensor gets the result. Goroutines call
// one group's operations in an order that the program fixes, use groups of their own
// ([Group.Subset]), or [AllReduceAsync], which goes by names.
//
// # What goes wrong, and how it is told
//
// The loss of any rank ends the operation under way, and every later one, on every rank with an
// [*AbortedError] that names the rank that was lost; so does the end of the context of an operation
// on any rank, which itself gets the context's error. Calls that do not fit together (lengths,
// element types, operations, roots) end on every rank with a [*MismatchError] that names two of
// them. In each case the group is unusable from then on, and buffers that were given to the failed
// operation have undefined contents, but nothing touches them any more once the call has returned.
//
// # Same bits
//
// The same inputs in the same world give the same bits on every rank and in every run: each element
// is either reduced by one owner and copied, or by all ranks in one canonical order, lower ranks
// first. The algorithm ([Algorithm]) is chosen by the number of ranks and of bytes alone. Worlds of
// different sizes, or calls that cut the data differently, may round differently; with [Strict]
// only the former do.
//
// # In the background
//
// [AllReduceAsync] returns at once. Each group that it is used on has an engine on every rank
// (async_engine.go), with connections of its own, which finds in cycles what all ranks have
// submitted and reduces it in buckets (async_bucket.go). What is in a bucket depends on when the
// ranks submit; the results do not, since the engine's reductions combine every element in one
// order, wherever it lies: that of the ranks of each host, then that of the hosts; under [Strict],
// or where ranks of a host do not share memory, that of the ranks.
//
// # Between two ranks
//
// [Send] and [Recv] pass messages from one rank to another one, in order, beside all other
// operations. Each pair and direction has a group of its own for it (point_lane.go).
//
// # Shared memory
//
// Ranks of a group that are on one host meet in shared memory (shared_memory.go). Where these are
// all ranks, everything but a forced algorithm runs in it; where they are not, the
// same operations have two levels (hierarchy.go): each host's data crosses to each other host once,
// split among the ranks of the host. Slices of [Alloc] are reduced without a copy, if they are
// large.
//
// # Layers
//
// The operations (operations.go) run algorithms on bytes (allreduce_*.go, pairwise.go, tree.go)
// through a call (call.go), which sends through the group's transport (transport.go; in one process
// transport_local.go, over TCP package sockets) and receives from one inbox per peer (package
// frame), to which transports deliver. Over TCP without encryption the operation's own goroutine
// moves the frames while it waits. Frames between two ranks keep their order, so a frame is matched
// by its position alone and checked against its header.
package collective
