// Package wake tells a goroutine that there is something for it to do, without blocking.
package wake

// Flag is a channel on which a goroutine waits for something to do. It holds at most one value,
// which stands for all calls of Set since the last value was received: the receiver looks for
// everything there is to do. Setting a nil Flag does nothing, and receiving from it blocks forever.
type Flag chan struct{}

// New returns a Flag that is not set.
func New() Flag { return make(Flag, 1) }

// Set sets the flag. It does not block, and any goroutine may call it.
func (f Flag) Set() {
	select {
	case f <- struct{}{}:
	default: // it is set
	}
}
