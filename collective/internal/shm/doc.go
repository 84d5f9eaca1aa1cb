// Package shm computes together in memory that the processes of one host share. It is for the ranks
// of one generation on one host, which belong to one user and see each other under /proc.
//
// One process makes a [Segment] and hands its invitation to the others by whatever means they
// already have. Each process joins as a [Member] with an index of its own, and from then on all
// members call the same operations in the same order. Every operation begins with the arrival of
// all members, so none of them is done before all have called it.
//
// # The memory
//
// A segment is a memfd: it has no name, and it is gone when the last process that maps it is gone,
// however that ends. Its size is that of the address space it may use; pages are taken when they
// are touched first. It begins with a header, followed by one area per member, all on pages of
// their own:
//
//	control   cells, counters, tripwire
//	banks     two, for data that is exchanged at once
//	in        slots for what other members reduce, and for what comes of it
//	out       slots for what this member has, and others want
//
// A word is written by one member only, except for two of the header: abort, which only ever
// becomes 1, and first, which is written once. Counters only grow. Another member is trusted with
// values, never with indices: nothing that is read from a segment is used as a length or place
// before it is bounded.
//
// Tensors of [Alloc] lie in another memfd, one per process, which the members map as they meet it.
// If all data of a reduction lies in such memory, and is large, it is not copied into slots and out
// of them.
//
// # Waiting
//
// A member that waits looks at the word for a tenth of a millisecond at most, if every member has a
// core, then gives its core away some times, then sleeps in the kernel. It looks at the header's
// abort word as often as at its own. Nothing depends on prompt progress: any thread may be stopped
// anywhere for any time.
//
// # Deaths
//
// A member that dies is known to the others before its memory is taken down, so in a time that does
// not depend on its size; see [Segment.Join]. What it leaves half-written is of no harm, since all
// operations are aborted.
//
// # Bits
//
// Reductions combine in the order of the members' indices, 0+1+2+…, whatever the size, so the bits
// of a result depend on nothing but the inputs. One member computes each element and the others
// copy it, or all compute it in this same order.
package shm
