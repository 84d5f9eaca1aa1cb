//go:build linux && !static && cgo

package gpu

import (
	"fmt"
	"slices"
	"sync"
	"unsafe"

	nvmldl "github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// load loads the library at a path, or under a name that the system's linker resolves, through
// go-nvml. Its errors wrap ErrNoGPU.
func load(path string) (*api, error) {
	at := nvmldl.New(path, nvmldl.RTLD_LAZY|nvmldl.RTLD_GLOBAL) // stays loaded
	if err := at.Open(); err != nil {
		return nil, fmt.Errorf("%w: there is no NVIDIA driver", ErrNoGPU)
	}
	b := &binding{lib: nvml.New(nvml.WithLibraryPath(path))}
	a := b.api()
	for _, s := range a.required() { // a call of a missing one would end this process
		if err := at.Lookup(s.Name); err != nil {
			return nil, fmt.Errorf("%w: %s lacks %s: %w", ErrNoGPU, path, s.Name, err)
		}
	}
	for _, s := range a.optional() {
		if at.Lookup(s.Name) != nil {
			a.migMode = nil // see knowsMIG
		}
	}
	return a, nil
}

// binding maps the devices and event sets of go-nvml to numbers, which are the handles.
type binding struct {
	lib nvml.Interface

	mu      sync.Mutex
	devices []nvml.Device
	sets    []nvml.EventSet
}

// number returns the index of a value in a list, plus 1. It appends a new value.
func number[T comparable](mu *sync.Mutex, all *[]T, v T) uintptr {
	mu.Lock()
	defer mu.Unlock()
	i := slices.Index(*all, v)
	if i < 0 {
		i = len(*all)
		*all = append(*all, v)
	}
	return uintptr(i + 1)
}

// numbered returns the value with a number.
func numbered[T any](mu *sync.Mutex, all *[]T, n uintptr) T {
	mu.Lock()
	defer mu.Unlock()
	return (*all)[n-1]
}

func (b *binding) device(h handle) nvml.Device { return numbered(&b.mu, &b.devices, uintptr(h)) }

func (b *binding) handle(d nvml.Device) handle {
	if d == nil {
		return 0
	}
	return handle(number(&b.mu, &b.devices, d))
}

func (b *binding) set(s eventSet) nvml.EventSet { return numbered(&b.mu, &b.sets, uintptr(s)) }

// api returns the functions of the library.
func (b *binding) api() *api {
	return &api{
		start:    func() result { return result(b.lib.Init()) },
		shutdown: func() result { return result(b.lib.Shutdown()) },
		count: func(n *uint32) result {
			all, r := b.lib.DeviceGetCount()
			*n = uint32(all)
			return result(r)
		},
		at: func(index uint32, h *handle) result {
			d, r := b.lib.DeviceGetHandleByIndex(int(index))
			if r == nvml.SUCCESS {
				*h = b.handle(d)
			}
			return result(r)
		},
		uuid: func(h handle, text *byte, size uint32) result {
			uuid, r := b.device(h).GetUUID()
			copy(unsafe.Slice(text, size), uuid)
			return result(r)
		},
		temperature: func(h handle, sensor uint32, degrees *uint32) (r result) {
			var got nvml.Return
			*degrees, got = b.device(h).GetTemperature(nvml.TemperatureSensors(sensor))
			return result(got)
		},
		eventTypes: func(h handle, types *uint64) result {
			all, r := b.device(h).GetSupportedEventTypes()
			*types = all
			return result(r)
		},
		register: func(h handle, types uint64, s eventSet) result {
			return result(b.device(h).RegisterEvents(types, b.set(s)))
		},
		newSet: func(s *eventSet) result {
			set, r := b.lib.EventSetCreate()
			if r == nvml.SUCCESS {
				*s = eventSet(number(&b.mu, &b.sets, set))
			}
			return result(r)
		},
		wait: func(s eventSet, data *eventData, milliseconds uint32) result {
			e, r := b.set(s).Wait(milliseconds)
			if r == nvml.SUCCESS {
				*data = eventData{b.handle(e.Device), e.EventType, e.EventData, e.GpuInstanceId, e.ComputeInstanceId}
			}
			return result(r)
		},
		freeSet: func(s eventSet) result { return result(b.set(s).Free()) },
		migMode: func(h handle, current, pending *uint32) result {
			now, next, r := b.device(h).GetMigMode()
			*current, *pending = uint32(now), uint32(next)
			return result(r)
		},
		migCount: func(h handle, most *uint32) result {
			n, r := b.device(h).GetMaxMigDeviceCount()
			*most = uint32(n)
			return result(r)
		},
		migAt: func(h handle, index uint32, part *handle) result {
			d, r := b.device(h).GetMigDeviceHandleByIndex(int(index))
			if r == nvml.SUCCESS {
				*part = b.handle(d)
			}
			return result(r)
		},
		gpuInstance: func(h handle, id *uint32) result {
			n, r := b.device(h).GetGpuInstanceId()
			*id = uint32(n)
			return result(r)
		},
		computeInstance: func(h handle, id *uint32) result {
			n, r := b.device(h).GetComputeInstanceId()
			*id = uint32(n)
			return result(r)
		},
	}
}
