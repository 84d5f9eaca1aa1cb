//go:build linux && !static && !cgo

package gpu

import (
	"fmt"

	"github.com/hvdrun/hvdrun/internal/dlopen"
)

// load loads the library at a path, or under a name that the system's linker resolves. Its errors
// wrap ErrNoGPU.
func load(path string) (*api, error) {
	at, err := dlopen.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: there is no NVIDIA driver", ErrNoGPU)
	}
	a := &api{}
	if missing, reason := dlopen.Bind(at, a.required()); len(missing) > 0 {
		return nil, fmt.Errorf("%w: %s lacks %s: %w", ErrNoGPU, path, missing[0], reason)
	}
	dlopen.Bind(at, a.optional())
	return a, nil
}
