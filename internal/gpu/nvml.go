//go:build cgo && linux

package gpu

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

const (
	// waitTime is how long one wait for events lasts, and so how long Watch may go on after its
	// context has ended.
	waitTime = 500 * time.Millisecond
	// lookTime is how often a silent GPU is asked whether it is there.
	lookTime     = 2 * time.Second
	allInstances = ^uint32(0)
)

// driver is this machine's NVML.
var driver = &library{nvml: nvml.New()}

// Inventory returns the devices of this machine. It blocks as long as the driver takes, which can
// be seconds where it is not kept loaded. A device that the driver knows and that cannot be used is
// listed with its Fault. The error is ErrNoGPU, wrapped, where there is no driver or no device.
func Inventory() ([]Device, error) { return driver.inventory() }

// Watch calls found with all that goes wrong with a device, from one goroutine at a time, until ctx
// ends, and then returns ctx's cause half a second later at most. A device that is lost is told
// once. It returns ErrNoGPU, wrapped, where there is nothing to watch, or what keeps it from
// watching.
func Watch(ctx context.Context, found func(Event)) error { return driver.watch(ctx, found) }

// library is NVML, loaded as long as it is used.
type library struct {
	nvml  nvml.Interface
	mu    sync.Mutex
	users int
}

// open loads the library where it is not. Each open that succeeds must be followed by a close.
func (l *library) open() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users == 0 {
		if ret := l.nvml.Init(); ret != nvml.SUCCESS {
			if ret == nvml.ERROR_LIBRARY_NOT_FOUND {
				return fmt.Errorf("%w: there is no NVIDIA driver", ErrNoGPU)
			}
			return fmt.Errorf("%w: the NVIDIA driver: %v", ErrNoGPU, ret)
		}
	}
	l.users++
	return nil
}

func (l *library) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users == 0 {
		l.nvml.Shutdown()
	}
}

func (l *library) inventory() ([]Device, error) {
	if err := l.open(); err != nil {
		return nil, err
	}
	defer l.close()
	boards, err := l.boards()
	if err != nil {
		return nil, err
	}
	var devices []Device
	for _, b := range boards {
		devices = append(devices, b.devices...)
	}
	if len(devices) == 0 {
		return nil, fmt.Errorf("%w: the NVIDIA driver has none", ErrNoGPU)
	}
	return devices, nil
}

// board is a whole GPU.
type board struct {
	handle  nvml.Device // nil where it is lost
	uuid    string
	devices []Device // itself, or its MIG instances
	lost    bool
}

func (l *library) boards() ([]*board, error) {
	n, ret := l.nvml.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("gpu: counting GPUs: %v", ret)
	}
	boards := make([]*board, n)
	index := 0
	for i := range boards {
		b := &board{}
		handle, ret := l.nvml.DeviceGetHandleByIndex(i)
		if ret == nvml.SUCCESS {
			b.handle = handle
			b.uuid, _ = handle.GetUUID()
			b.devices = l.devices(handle, i)
		} else {
			b.lost = true
			b.devices = []Device{{GPU: i, Fault: ret.Error()}}
		}
		for j := range b.devices {
			b.devices[j].Index = index
			index++
		}
		boards[i] = b
	}
	return boards, nil
}

// devices returns the devices that a GPU is.
func (l *library) devices(handle nvml.Device, number int) []Device {
	whole := describe(handle, number)
	if !l.has("nvmlDeviceGetMigMode") {
		return []Device{whole}
	}
	if mode, _, ret := handle.GetMigMode(); ret != nvml.SUCCESS || mode != nvml.DEVICE_MIG_ENABLE {
		return []Device{whole}
	}
	most, ret := handle.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil
	}
	var instances []Device
	for i := range most {
		part, ret := handle.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue // there is no such instance
		}
		d := describe(part, number)
		d.MIG = &Instance{}
		d.MIG.GPU, _ = part.GetGpuInstanceId()
		d.MIG.Compute, _ = part.GetComputeInstanceId()
		d.Fault = whole.Fault
		instances = append(instances, d)
	}
	return instances
}

// has returns whether the driver is new enough for a function; calling one that it has not would
// end this process.
func (l *library) has(symbol string) bool { return l.nvml.Extensions().LookupSymbol(symbol) == nil }

func describe(handle nvml.Device, number int) Device {
	d := Device{GPU: number}
	var ret nvml.Return
	if d.UUID, ret = handle.GetUUID(); ret != nvml.SUCCESS {
		d.Fault = ret.Error()
	}
	// A lost GPU still has its UUID.
	if _, ret := handle.GetTemperature(nvml.TEMPERATURE_GPU); isLost(ret) {
		d.Fault = ret.Error()
	}
	return d
}

func isLost(ret nvml.Return) bool {
	return ret == nvml.ERROR_GPU_IS_LOST || ret == nvml.ERROR_RESET_REQUIRED
}

func (l *library) watch(ctx context.Context, found func(Event)) error {
	if err := l.open(); err != nil {
		return err
	}
	defer l.close()
	boards, err := l.boards()
	if err != nil {
		return err
	}
	if len(boards) == 0 {
		return fmt.Errorf("%w: the NVIDIA driver has none", ErrNoGPU)
	}
	set, ret := l.nvml.EventSetCreate()
	if ret != nvml.SUCCESS {
		return fmt.Errorf("gpu: watching: %v", ret)
	}
	defer set.Free()
	w := &watcher{boards: boards, set: set, found: found}
	return w.run(ctx)
}

// watcher is a Watch.
type watcher struct {
	boards     []*board
	set        nvml.EventSet
	registered bool // some GPU reports events
	found      func(Event)
}

func (w *watcher) run(ctx context.Context) error {
	for _, b := range w.boards {
		if b.lost {
			w.tell(b.devices, Lost, 0)
			continue
		}
		// Not all GPUs know all kinds of events; that of one that knows none shows when it is
		// asked.
		types, _ := b.handle.GetSupportedEventTypes()
		types &= nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError
		if types != 0 && b.handle.RegisterEvents(types, w.set) == nvml.SUCCESS {
			w.registered = true
		}
	}
	w.look()
	for looked := time.Now(); ctx.Err() == nil; {
		ret := w.wait(ctx)
		switch {
		case ret == nvml.SUCCESS, ret == nvml.ERROR_TIMEOUT:
		case isLost(ret):
			looked = time.Time{}
		default:
			return fmt.Errorf("gpu: waiting for events: %v", ret)
		}
		if time.Since(looked) >= lookTime {
			looked = time.Now()
			if w.look(); isLost(ret) && w.pause(ctx) { // the set reports a lost GPU again and again
				break
			}
		}
	}
	return context.Cause(ctx)
}

// wait takes one event, if one comes soon.
func (w *watcher) wait(ctx context.Context) nvml.Return {
	if !w.registered {
		w.pause(ctx)
		return nvml.ERROR_TIMEOUT
	}
	data, ret := w.set.Wait(uint32(waitTime.Milliseconds()))
	if ret != nvml.SUCCESS {
		return ret
	}
	kind := XID
	switch data.EventType {
	case nvml.EventTypeDoubleBitEccError:
		kind = ECC2
	case nvml.EventTypeXidCriticalError:
	default:
		return ret
	}
	w.tell(w.affected(data), kind, data.EventData)
	return ret
}

// pause waits as long as a wait for events does, and returns whether ctx has ended.
func (w *watcher) pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return true
	case <-time.After(waitTime):
		return false
	}
}

// affected returns the devices that an event is about: all of them where that cannot be told.
func (w *watcher) affected(data nvml.EventData) []Device {
	i := slices.IndexFunc(w.boards, func(b *board) bool { return b.handle != nil && b.handle == data.Device })
	if i < 0 && data.Device != nil {
		uuid, ret := data.Device.GetUUID()
		i = slices.IndexFunc(w.boards, func(b *board) bool { return ret == nvml.SUCCESS && b.uuid == uuid })
	}
	if i < 0 {
		var all []Device
		for _, b := range w.boards {
			all = append(all, b.devices...)
		}
		return all
	}
	devices := w.boards[i].devices
	for _, d := range devices {
		if d.MIG != nil && data.GpuInstanceId != allInstances && d.MIG.GPU == int(data.GpuInstanceId) &&
			(data.ComputeInstanceId == allInstances || d.MIG.Compute == int(data.ComputeInstanceId)) {
			return []Device{d}
		}
	}
	return devices
}

func (w *watcher) tell(devices []Device, kind Kind, xid uint64) {
	critical := true
	if kind == XID {
		_, critical = criticalXIDs[xid]
	} else {
		xid = 0
	}
	for _, d := range devices {
		w.found(Event{Device: d, Kind: kind, XID: xid, Critical: critical})
	}
}

// look asks each GPU that was there whether it still is.
func (w *watcher) look() {
	for _, b := range w.boards {
		if b.lost {
			continue
		}
		if _, ret := b.handle.GetTemperature(nvml.TEMPERATURE_GPU); isLost(ret) {
			b.lost = true
			w.tell(b.devices, Lost, 0)
		}
	}
}
