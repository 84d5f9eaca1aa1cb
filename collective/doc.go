// Package collective lets the ranks of a group compute together: they reduce, broadcast, gather and
// exchange data, and wait for each other.
//
// A [Group] is the connected ranks of one generation. Groups come from [Endpoint.Connect], between
// worker processes over TCP, or from [Local], in one process. Every rank calls the same operations
// in the same order; each call blocks until its result is complete on this rank. A group runs one
// operation at a time: a second one at the same time gets [ErrBusy] and has no effect. This
// protects a rank only from itself: goroutines that take turns on a group are not noticed, although
// their order can differ between ranks. Calls that look alike (lengths, types, operations) are then
// combined, and the wrong tensor gets the result. Goroutines must call one group's operations in an
// order that the program fixes, use separate groups ([Group.Subset]), or use [AllReduceAsync],
// which matches tensors by name.
//
// # Errors
//
// The loss of any rank ends the current operation, and every later one, on every rank with an
// [*AbortedError] that names the lost rank. The same happens if the context of an operation ends on
// any rank; that rank gets the context's error. Calls that do not match (lengths, element types,
// operations, roots) end on every rank with a [*MismatchError] that names two of them. In each case
// the group is unusable afterwards. The contents of buffers of the failed operation are undefined,
// but nothing accesses them after the call has returned.
//
// # Same bits
//
// The same inputs in the same world give the same bits on every rank and in every run: each element
// is reduced either by one owner and copied, or by all ranks in one canonical order, lower ranks
// first. Only the number of ranks and of bytes determines the algorithm ([Algorithm]). Results of
// worlds of different sizes, or of calls that divide the data differently, may be rounded
// differently; with [Strict], only those of worlds of different sizes.
//
// # In the background
//
// [AllReduceAsync] returns at once. Each group on which it is used has an engine on every rank
// (async_engine.go), with separate connections. In cycles, the engine finds the tensors that all
// ranks have submitted, and reduces them in buckets (async_bucket.go). The contents of a bucket
// depend on when the ranks submit. The results do not, because the engine combines every element in
// one order, wherever it is: first the ranks of each host, then the hosts; under [Strict], or if
// ranks of a host do not share memory, the ranks.
//
// # Between two ranks
//
// [Send] and [Recv] pass messages from one rank to another. Messages of a pair arrive in the order
// in which they are sent, as with NCCL: there are no tags, and separate groups ([Group.Subset])
// keep messages apart. If several goroutines send to one rank at the same time, the order of their
// messages is undefined. The type and length of the data must be what the receiver expects;
// otherwise both ranks, and with them all ranks of the group, get a [*MismatchError]. These
// operations run concurrently with any other operation of the group and with the messages of other
// pairs or of the other direction: none returns [ErrBusy]. Their errors are those of [AllReduce],
// and every rank of the group gets them. A message that is never received is detected like any
// operation that some ranks do not call.
//
// The first message from one rank to another connects the two by separate connections and, on one
// host, by separate shared memory (point_lane.go); later messages use the same connections.
//
// # Memory of the caller
//
// [AllGatherInto], [ReduceScatterInto], [ReduceScatterCounts] and [AllToAllInto] write their
// results to memory of the caller and allocate none for data. Lengths must be equal on all ranks;
// otherwise every rank gets a [*MismatchError]. A result that overlaps with the input is refused on
// every rank: with an error that says so if it overlaps on all ranks, and with a [*MismatchError]
// if it overlaps on some.
//
// # Shared memory
//
// Ranks of a group that are on one host use shared memory (shared_memory.go). If all ranks are on
// one host, all operations run in it except forced algorithms. Otherwise operations have two levels
// (internal/levels): each host's data is sent to each other host once, split among the ranks of the
// host. Large slices of [Alloc] are reduced without a copy.
//
// # Layers
//
// The operations (operations.go) run algorithms on bytes: in memory, by package internal/shm; among
// ranks without shared memory by internal/exchange, whose call sends through the group's transport
// (in one process transport_local.go, over TCP internal/sockets) and receives from one inbox per
// peer (internal/frame), to which transports deliver; and on two levels by internal/levels. What
// ranks call, and which algorithm is the cheapest, is in internal/operation. Over TCP without
// encryption the operation's own goroutine moves the frames while it waits. Frames between two
// ranks keep their order, so a frame is matched by its position alone and checked against its
// header. Package internal/agreement decides which asynchronous operations the ranks perform
// together, and the engine performs them.
package collective
