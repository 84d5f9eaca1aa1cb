// Package shm runs collective operations in memory that the processes of one host share. It is for
// the ranks of one generation on one host, which belong to one user and see each other under /proc.
//
// One process makes a [Segment] and sends its invitation to the others by any means. Each process
// joins as a [Member] with its own index, and from then on all members call the same
// operations in the same order. Every operation begins with the arrival of all members, so none of
// them is done before all have called it.
//
// # The memory
//
// A segment is a memfd: it has no name, and it is gone when the last process that maps it has ended
// in any way. Its size is the address space that it may use; pages are allocated at the first
// access. It begins with a header, followed by one area per member, all on separate pages:
//
//	control   cells, counters, tripwire
//	banks     two, for data that is exchanged at once
//	in        slots for data that other members reduce, and for the results
//	out       slots for data of this member that others read
//
// A word is written by one member only, except for two of the header: abort, which only ever
// becomes 1, and first, which is written once. Counters only grow. Values of another member are
// trusted, but not its indices: nothing that is read from a segment is used as a length or offset
// before its bounds are checked.
//
// Tensors of [Alloc] are in another memfd, one per process, which the members map when they first
// need it. If all data of a reduction is large and in such memory, it is not copied through slots.
//
// # Waiting
//
// A waiting member polls the word for at most a tenth of a millisecond, if every member has a core,
// then yields its core a few times, and then sleeps in the kernel. It checks the header's abort
// word as often. Nothing depends on prompt progress: any thread may be stopped anywhere for any
// time.
//
// # Deaths
//
// The others learn of a member's death before the kernel frees its memory, so in a time that does
// not depend on its size; see [Segment.Join]. Data that it leaves half-written is harmless, since
// all operations are aborted.
//
// # Bits
//
// Reductions combine in the order of the members' indices, 0+1+2+…, whatever the size, so the bits
// of a result depend on nothing but the inputs. One member computes each element and the others
// copy it, or all compute it in this same order.
package shm
