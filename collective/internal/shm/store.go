package shm

// storeRelease stores value so that a thread that sees it also sees all earlier stores. Unlike an
// atomic store it does not wait until the value is visible. It also prefetches the line of next, to
// which this member soon writes.
//
//go:noescape
func storeRelease(word *uint64, value uint64, next *cell)
