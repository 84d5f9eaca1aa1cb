package shm

// storeRelease stores value so that all earlier stores are seen by any thread that sees it, without
// waiting until it is seen itself as an atomic store does, and asks for the line of next, which is
// to be written soon.
//
//go:noescape
func storeRelease(word *uint64, value uint64, next *cell)
