// Package foreign offers package collective to callers in other languages: endpoints and groups are
// numbers, tensors are addresses of memory that the caller owns, and operations are calls that a
// group performs one after the other. A blocking call runs on the caller's own goroutine, so that
// it costs no more than the operation; a call that is started runs on a goroutine of the group, and
// its number is a ticket to wait for.
package foreign
