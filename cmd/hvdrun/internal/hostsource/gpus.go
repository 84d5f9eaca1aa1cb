package hostsource

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/build"
	"github.com/hvdrun/hvdrun/internal/agent"
	"github.com/hvdrun/hvdrun/internal/gpu"
)

// LocalDevices returns the visible devices of this machine, as of its first call.
var LocalDevices = sync.OnceValues(func() ([]gpu.Device, error) {
	devices, err := gpu.Inventory()
	value, narrowed := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	if err != nil || !narrowed {
		return devices, err
	}
	if devices = gpu.Visible(devices, value); len(devices) == 0 {
		return nil, fmt.Errorf("%w: CUDA_VISIBLE_DEVICES=%s hides them", gpu.ErrNoGPU, value)
	}
	return devices, nil
})

// Gpus returns the number of GPUs of this machine: those that the GPU driver reports or, if it
// cannot be queried, the device files.
func Gpus() int {
	devices, err := LocalDevices()
	if err == nil {
		return len(devices)
	}
	if _, narrowed := os.LookupEnv("CUDA_VISIBLE_DEVICES"); narrowed {
		return 0
	}
	const prefix = "/dev/nvidia"
	files, _ := filepath.Glob(prefix + "[0-9]*") // fails only on a malformed pattern
	n := 0
	for _, f := range files {
		if strings.Trim(strings.TrimPrefix(f, prefix), "0123456789") == "" {
			n++
		}
	}
	return n
}

// Facts returns what an agent reports about its host.
func Facts() agent.Facts {
	return agent.Facts{Version: build.Version(), GPUs: func() (int, error) {
		devices, err := LocalDevices()
		if errors.Is(err, gpu.ErrNoGPU) {
			err = nil
		}
		return len(devices), err
	}}
}
