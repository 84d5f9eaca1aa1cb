//go:build linux && !static

package gpu

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hvdrun/hvdrun/internal/retry"
)

const (
	// waitTime is the duration of one wait for events, and so the longest time that Watch continues
	// after its context has ended.
	waitTime = 500 * time.Millisecond
	// lookTime is the interval at which silent GPUs are checked.
	lookTime     = 2 * time.Second
	allInstances = ^uint32(0)
)

// driver is the NVML of this machine.
var driver = &library{load: func() (*api, error) { return load(libraryName) }}

// Inventory returns the devices of this machine. It blocks as long as the driver takes, which may
// be seconds if the driver is not kept loaded. A device that the driver knows but that cannot be
// used is listed with its Fault. If there is no driver or no device, the error wraps ErrNoGPU.
func Inventory() ([]Device, error) { return driver.inventory() }

// Watch calls found with each fault of a device, from one goroutine, until ctx ends; it returns the
// cause of ctx at most half a second later. It reports a lost device once. If there is nothing to
// watch, the error wraps ErrNoGPU; other errors say why it cannot watch.
func Watch(ctx context.Context, found func(Event)) error { return driver.watch(ctx, found) }

// library is NVML. It is loaded on the first use and stays loaded; it is initialized while in use.
type library struct {
	load func() (*api, error)

	mu    sync.Mutex
	nvml  *api // nil: not loaded
	users int
}

// open initializes the library on its first concurrent use. Each successful open must be followed
// by a close.
func (l *library) open() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.nvml == nil {
		var err error
		if l.nvml, err = l.load(); err != nil {
			return err
		}
	}
	if l.users == 0 {
		if r := l.nvml.start(); r != success {
			return fmt.Errorf("%w: the NVIDIA driver: %w", ErrNoGPU, r)
		}
	}
	l.users++
	return nil
}

func (l *library) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users == 0 {
		l.nvml.shutdown()
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
	handle  handle // 0 if the GPU is lost
	uuid    string
	devices []Device // the GPU itself, or its MIG instances
	lost    bool
}

func (l *library) boards() ([]*board, error) {
	var n uint32
	if r := l.nvml.count(&n); r != success {
		return nil, fmt.Errorf("gpu: counting GPUs: %w", r)
	}
	boards := make([]*board, n)
	index := 0
	for i := range boards {
		b := &board{}
		if r := l.nvml.at(uint32(i), &b.handle); r == success {
			b.uuid, _ = l.nvml.uuidOf(b.handle)
			b.devices = l.devices(b.handle, i)
		} else {
			b.handle, b.lost = 0, true
			b.devices = []Device{{GPU: i, Fault: r.Error()}}
		}
		for j := range b.devices {
			b.devices[j].Index = index
			index++
		}
		boards[i] = b
	}
	return boards, nil
}

// devices returns the devices of a GPU: itself, or its MIG instances.
func (l *library) devices(h handle, number int) []Device {
	whole := l.describe(h, number)
	if !l.nvml.knowsMIG() {
		return []Device{whole}
	}
	var mode, pending, most uint32
	if l.nvml.migMode(h, &mode, &pending) != success || mode != migEnabled {
		return []Device{whole}
	}
	if l.nvml.migCount(h, &most) != success {
		return nil
	}
	var instances []Device
	for i := range most {
		var part handle
		if l.nvml.migAt(h, i, &part) != success {
			continue // there is no such instance
		}
		d := l.describe(part, number)
		var gpu, compute uint32
		l.nvml.gpuInstance(part, &gpu)
		l.nvml.computeInstance(part, &compute)
		d.MIG = &Instance{int(gpu), int(compute)}
		d.Fault = whole.Fault
		instances = append(instances, d)
	}
	return instances
}

// knowsMIG returns whether the driver is new enough for MIG.
func (a *api) knowsMIG() bool {
	return a.migMode != nil && a.migCount != nil && a.migAt != nil && a.gpuInstance != nil && a.computeInstance != nil
}

func (l *library) describe(h handle, number int) Device {
	d := Device{GPU: number}
	var r result
	if d.UUID, r = l.nvml.uuidOf(h); r != success {
		d.Fault = r.Error()
	}
	// A lost GPU still has its UUID.
	if r := l.nvml.look(h); isLost(r) {
		d.Fault = r.Error()
	}
	return d
}

// uuidOf returns the UUID of a GPU or an instance.
func (a *api) uuidOf(h handle) (string, result) {
	var text [uuidSize]byte
	r := a.uuid(h, &text[0], uuidSize)
	if r != success {
		return "", r
	}
	uuid, _, _ := bytes.Cut(text[:], []byte{0})
	return string(uuid), r
}

// look sends a GPU a query that every present GPU can answer.
func (a *api) look(h handle) result {
	var degrees uint32
	return a.temperature(h, gpuTemperature, &degrees)
}

func isLost(r result) bool { return r == isLostResult || r == resetRequired }

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
	w := &watcher{nvml: l.nvml, boards: boards, found: found}
	if r := l.nvml.newSet(&w.set); r != success {
		return fmt.Errorf("gpu: watching: %w", r)
	}
	defer l.nvml.freeSet(w.set)
	return w.run(ctx)
}

// watcher is a running Watch.
type watcher struct {
	nvml       *api
	boards     []*board
	set        eventSet
	registered bool // some GPU reports events
	found      func(Event)
}

func (w *watcher) run(ctx context.Context) error {
	for _, b := range w.boards {
		if b.lost {
			w.tell(b.devices, Lost, 0)
			continue
		}
		// Not every GPU supports all kinds of events. If a GPU supports none, this call fails.
		var types uint64
		if w.nvml.eventTypes(b.handle, &types) != success {
			types = 0
		}
		types &= eventXID | eventDoubleBitECC
		if types != 0 && w.nvml.register(b.handle, types, w.set) == success {
			w.registered = true
		}
	}
	w.look()
	for looked := time.Now(); ctx.Err() == nil; {
		r := w.wait(ctx)
		switch {
		case r == success, r == timedOut:
		case isLost(r):
			looked = time.Time{}
		default:
			return fmt.Errorf("gpu: waiting for events: %w", r)
		}
		if time.Since(looked) >= lookTime {
			looked = time.Now()
			if w.look(); isLost(r) && retry.Pause(ctx, waitTime) != nil { // the set reports a lost GPU repeatedly
				break
			}
		}
	}
	return context.Cause(ctx)
}

// wait waits up to waitTime for an event, and reports it.
func (w *watcher) wait(ctx context.Context) result {
	if !w.registered {
		_ = retry.Pause(ctx, waitTime) // run notices the end of ctx
		return timedOut
	}
	var data eventData
	r := w.nvml.wait(w.set, &data, uint32(waitTime.Milliseconds()))
	if r != success {
		return r
	}
	switch data.kind {
	case eventDoubleBitECC:
		w.tell(w.affected(data), ECC2, data.data)
	case eventXID:
		w.tell(w.affected(data), XID, data.data)
	}
	return r
}

// affected returns the devices that an event concerns: all devices if that is unknown.
func (w *watcher) affected(data eventData) []Device {
	i := slices.IndexFunc(w.boards, func(b *board) bool { return b.handle != 0 && b.handle == data.device })
	if i < 0 && data.device != 0 {
		uuid, r := w.nvml.uuidOf(data.device)
		i = slices.IndexFunc(w.boards, func(b *board) bool { return r == success && b.uuid == uuid })
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
		if d.MIG != nil && data.instance != allInstances && d.MIG.GPU == int(data.instance) &&
			(data.within == allInstances || d.MIG.Compute == int(data.within)) {
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

// look checks each GPU that is not lost, and reports those that are now.
func (w *watcher) look() {
	for _, b := range w.boards {
		if b.lost {
			continue
		}
		if isLost(w.nvml.look(b.handle)) {
			b.lost = true
			w.tell(b.devices, Lost, 0)
		}
	}
}
