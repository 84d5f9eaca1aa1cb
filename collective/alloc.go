package collective

import (
	"errors"
	"fmt"
	"math"

	"github.com/hvdrun/hvdrun/collective/internal/shm"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

// Alloc returns a slice of n zeros in memory that the other ranks of this host can read: an
// AllReduce of such slices on every rank copies nothing in or out, from 4 MiB on (less on hosts of
// more than 16 ranks); smaller slices stay in the caches, and copying them is faster. Such slices
// outlive groups and are not collected as garbage: [Free] releases them. If the system has no
// shared memory, Alloc returns an ordinary slice, which all operations accept as well.
func Alloc[T Element](n int) ([]T, error) {
	size := typeOf[T]().Size()
	if n < 0 || n > math.MaxInt/size {
		return nil, fmt.Errorf("collective: a slice cannot have %d elements", n)
	}
	if n == 0 {
		return []T{}, nil
	}
	b, err := shm.Alloc(n * size)
	if errors.Is(err, shm.ErrNoArena) {
		return make([]T, n), nil
	}
	if err != nil {
		return nil, fmt.Errorf("collective: %w", err)
	}
	return kernel.Elements[T](b), nil
}

// Free releases a slice that [Alloc] returned; data must begin at the same address. It must not be
// used afterwards. Free leaves ordinary slices to the garbage collector.
func Free[T Element](data []T) {
	if b := kernel.Bytes(data); shm.Owns(b) {
		shm.Free(b)
	}
}
