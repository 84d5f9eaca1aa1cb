// Package shm computes together in memory that the processes of one host share. It is for the ranks of one generation on
// one host, which belong to one user and see each other under /proc.
//
// One process makes a [Segment] and hands its invitation to the others by whatever means they already have. Each process
// joins as a [Member] with an index of its own, and from then on all members call the same operations in the same order.
// Every operation begins with the arrival of all members, so none of them is done before all have called it.
//
// # The memory
//
// A segment is a memfd: it has no name, and it is gone when the last process that maps it is gone, however that ends. Its
// size is that of the address space it may use; pages are taken when they are touched first. It begins with a header,
// followed by one area per member, all on pages of their own:
//
//	control   cells, counters, tripwire
//	banks     two, for data that is exchanged at once
//	in        slots for what other members reduce
//	out       slots for what this member has reduced
//
// A word is written by one member only, the header's abort word apart, which only ever becomes 1. Counters only grow.
// Another member is trusted with values, never with indices: nothing that is read from a segment is used as a length or
// place before it is bounded.
//
// # Bits
//
// Reductions combine in the order of the members' indices, 0+1+2+…, whatever the size, so the bits of a result depend on
// nothing but the inputs. One member computes each element and the others copy it, or all compute it in this same order.
package shm
