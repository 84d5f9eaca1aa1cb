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

// LocalDevices returns the devices of this machine that a person has left visible, as they were
// when it was first asked.
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

// Gpus counts the GPUs of this machine: those that its driver has, or where that cannot be asked
// the files that stand for them.
func Gpus() int {
	devices, err := LocalDevices()
	if err == nil {
		return len(devices)
	}
	if _, narrowed := os.LookupEnv("CUDA_VISIBLE_DEVICES"); narrowed {
		return 0
	}
	const prefix = "/dev/nvidia"
	files, _ := filepath.Glob(prefix + "[0-9]*") // fails on a bad pattern only
	n := 0
	for _, f := range files {
		if strings.Trim(strings.TrimPrefix(f, prefix), "0123456789") == "" {
			n++
		}
	}
	return n
}

// Facts are what an agent reports of its host.
func Facts() agent.Facts {
	return agent.Facts{Version: build.Version(), GPUs: func() (int, error) {
		devices, err := LocalDevices()
		if errors.Is(err, gpu.ErrNoGPU) {
			err = nil
		}
		return len(devices), err
	}}
}
