//go:build cgo && linux

package gpu

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
)

// machine is a mock of one with eight GPUs.
type machine struct {
	*dgxa100.Server
	loaded int
	lost   [8]atomic.Bool
	events chan nvml.EventData
}

func newMachine() (*machine, *library) {
	m := &machine{Server: dgxa100.New(), events: make(chan nvml.EventData, 10)}
	m.InitFunc = func() nvml.Return { m.loaded++; return nvml.SUCCESS }
	m.ShutdownFunc = func() nvml.Return { m.loaded--; return nvml.SUCCESS }
	m.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) {
		return &mock.EventSet{WaitFunc: m.wait, FreeFunc: func() nvml.Return { return nvml.SUCCESS }}, nvml.SUCCESS
	}
	for i := range m.Devices {
		d := m.device(i)
		d.GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) {
			if m.lost[i].Load() {
				return 0, nvml.ERROR_GPU_IS_LOST
			}
			return uint32(40 + i), nvml.SUCCESS
		}
		d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return nvml.EventTypeAll, nvml.SUCCESS }
		d.RegisterEventsFunc = func(types uint64, _ nvml.EventSet) nvml.Return {
			if types != nvml.EventTypeXidCriticalError|nvml.EventTypeDoubleBitEccError {
				return nvml.ERROR_INVALID_ARGUMENT
			}
			return nvml.SUCCESS
		}
	}
	return m, &library{nvml: m}
}

func (m *machine) device(i int) *dgxa100.Device { return m.Devices[i].(*dgxa100.Device) }

func (m *machine) wait(ms uint32) (nvml.EventData, nvml.Return) {
	select {
	case data := <-m.events:
		return data, nvml.SUCCESS
	case <-time.After(time.Duration(ms) * time.Millisecond):
		return nvml.EventData{}, nvml.ERROR_TIMEOUT
	}
}

// split cuts a GPU into MIG instances 1/0 and 5/2.
func (m *machine) split(i int) {
	d := m.device(i)
	d.MigMode = nvml.DEVICE_MIG_ENABLE
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	d.GetMigDeviceHandleByIndexFunc = func(index int) (nvml.Device, nvml.Return) {
		part, known := map[int]*mock.Device{0: instance("MIG-first", 1, 0), 3: instance("MIG-second", 5, 2)}[index]
		if !known {
			return nil, nvml.ERROR_NOT_FOUND
		}
		return part, nvml.SUCCESS
	}
}

func instance(uuid string, gi, ci int) *mock.Device {
	return &mock.Device{
		GetUUIDFunc:              func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
		GetTemperatureFunc:       func(nvml.TemperatureSensors) (uint32, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED },
		GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return gi, nvml.SUCCESS },
		GetComputeInstanceIdFunc: func() (int, nvml.Return) { return ci, nvml.SUCCESS },
	}
}

func TestInventory(t *testing.T) {
	m, l := newMachine()
	m.split(2)
	m.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if i == 6 {
			return nil, nvml.ERROR_GPU_IS_LOST
		}
		return m.Devices[i], nvml.SUCCESS
	}
	devices, err := l.inventory()
	if err != nil || len(devices) != 9 || m.loaded != 0 {
		t.Fatalf("%d devices, %v; loaded %d times", len(devices), err, m.loaded)
	}
	for i, d := range devices {
		if d.Index != i {
			t.Errorf("device %d has index %d", i, d.Index)
		}
	}
	d := devices[1]
	if d.GPU != 1 || d.MIG != nil || d.UUID != m.device(1).UUID || d.Fault != "" {
		t.Errorf("GPU 1: %+v", d)
	}
	for i, want := range []Instance{{1, 0}, {5, 2}} {
		d := devices[2+i]
		if d.GPU != 2 || d.MIG == nil || *d.MIG != want || d.UUID[:4] != "MIG-" {
			t.Errorf("instance %d: %+v", i, d)
		}
	}
	if d := devices[7]; d.GPU != 6 || d.Fault == "" || d.UUID != "" {
		t.Errorf("the lost one: %+v", d)
	}
}

// A driver from before there was MIG is not asked for it: the call would end the process.
func TestOldDriver(t *testing.T) {
	m, l := newMachine()
	m.LookupSymbolFunc = func(string) error { return errors.New("undefined symbol") }
	m.device(0).GetMigModeFunc = func() (int, int, nvml.Return) { panic("called") }
	if devices, err := l.inventory(); err != nil || len(devices) != 8 {
		t.Errorf("%d devices, %v", len(devices), err)
	}
}

func TestNoGPU(t *testing.T) {
	for _, ret := range []nvml.Return{nvml.ERROR_LIBRARY_NOT_FOUND, nvml.ERROR_DRIVER_NOT_LOADED, nvml.SUCCESS} {
		l := &library{nvml: &mock.Interface{
			InitFunc:           func() nvml.Return { return ret },
			ShutdownFunc:       func() nvml.Return { return nvml.SUCCESS },
			DeviceGetCountFunc: func() (int, nvml.Return) { return 0, nvml.SUCCESS },
		}}
		devices, err := l.inventory()
		if devices != nil || !errors.Is(err, ErrNoGPU) || l.users != 0 {
			t.Errorf("%v: %v, %v, %d users", ret, devices, err, l.users)
		}
		if err := l.watch(t.Context(), nil); !errors.Is(err, ErrNoGPU) || l.users != 0 {
			t.Errorf("%v: watching: %v", ret, err)
		}
	}
}

// heard is an event that a watch has told.
type heard struct {
	event Event
	after time.Duration
}

// watch watches the machine for ten seconds while do happens, in virtual time.
func watch(t *testing.T, m *machine, l *library, do func()) (all []heard) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	began := time.Now()
	ended := make(chan error)
	go func() {
		ended <- l.watch(ctx, func(e Event) { all = append(all, heard{e, time.Since(began)}) })
	}()
	synctest.Wait()
	do()
	err := <-ended
	if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > 11*time.Second || m.loaded != 0 {
		t.Errorf("ended after %v with %v, loaded %d times", took, err, m.loaded)
	}
	return all
}

func TestWatchEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := newMachine()
		m.split(2)
		unknown := &mock.Device{GetUUIDFunc: func() (string, nvml.Return) { return "", nvml.ERROR_GPU_IS_LOST }}
		copied := &mock.Device{GetUUIDFunc: func() (string, nvml.Return) { return m.device(7).UUID, nvml.SUCCESS }}
		all := watch(t, m, l, func() {
			xid := func(d nvml.Device, number uint64, gi, ci uint32) {
				m.events <- nvml.EventData{Device: d, EventType: nvml.EventTypeXidCriticalError, EventData: number,
					GpuInstanceId: gi, ComputeInstanceId: ci}
			}
			xid(m.Devices[0], 79, allInstances, allInstances)
			xid(m.Devices[1], 31, allInstances, allInstances)
			xid(m.Devices[2], 95, 5, 2)
			xid(m.Devices[2], 94, 1, allInstances)
			xid(m.Devices[2], 64, allInstances, allInstances)
			m.events <- nvml.EventData{Device: m.Devices[4], EventType: nvml.EventTypeDoubleBitEccError}
			m.events <- nvml.EventData{Device: m.Devices[4], EventType: nvml.EventTypeClock}
			xid(copied, 48, 0, 0)
			xid(unknown, 79, allInstances, allInstances)
		})
		type short struct {
			slot     int
			kind     Kind
			xid      uint64
			critical bool
		}
		want := []short{{0, XID, 79, true}, {1, XID, 31, false}, {3, XID, 95, true}, {2, XID, 94, true}, {2, XID, 64, true},
			{3, XID, 64, true}, {5, ECC2, 0, true}, {8, XID, 48, true}}
		for slot := range 9 {
			want = append(want, short{slot, XID, 79, true}) // of whom it is cannot be told
		}
		var got []short
		for _, h := range all {
			got = append(got, short{h.event.Device.Index, h.event.Kind, h.event.XID, h.event.Critical})
		}
		if !slices.Equal(got, want) {
			t.Errorf("heard %v\nwant  %v", got, want)
		}
	})
}

func TestWatchFindsLostGPUs(t *testing.T) {
	for name, deaf := range map[string]bool{"events are reported": false, "no events are known": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, l := newMachine()
				m.lost[1].Store(true) // from the beginning
				if deaf {
					for i := range m.Devices {
						m.device(i).GetSupportedEventTypesFunc = func() (uint64, nvml.Return) { return 0, nvml.ERROR_NOT_SUPPORTED }
					}
				}
				all := watch(t, m, l, func() { m.lost[5].Store(true) })
				if len(all) != 2 || all[0].event.Kind != Lost || all[0].event.Device.Index != 1 || !all[0].event.Critical ||
					all[1].event.Device.Index != 5 || all[1].after > lookTime+waitTime {
					t.Errorf("heard %v", all)
				}
			})
		})
	}
}

// A set of events that a lost GPU is in reports that instead of events, at once and for ever.
func TestWatchOfALostSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := newMachine()
		waits := 0
		m.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) {
			wait := func(uint32) (nvml.EventData, nvml.Return) { waits++; return nvml.EventData{}, nvml.ERROR_GPU_IS_LOST }
			return &mock.EventSet{WaitFunc: wait, FreeFunc: func() nvml.Return { return nvml.SUCCESS }}, nvml.SUCCESS
		}
		all := watch(t, m, l, func() { m.lost[3].Store(true) })
		if len(all) != 1 || all[0].event.Device.Index != 3 || all[0].after > waitTime || waits > 30 {
			t.Errorf("heard %v after %d waits", all, waits)
		}
	})
}

func TestWatchFails(t *testing.T) {
	m, l := newMachine()
	m.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) { return nil, nvml.ERROR_UNKNOWN }
	if err := l.watch(t.Context(), nil); err == nil || errors.Is(err, ErrNoGPU) || l.users != 0 {
		t.Errorf("got %v", err)
	}
	m.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) {
		wait := func(uint32) (nvml.EventData, nvml.Return) { return nvml.EventData{}, nvml.ERROR_UNINITIALIZED }
		return &mock.EventSet{WaitFunc: wait, FreeFunc: func() nvml.Return { return nvml.SUCCESS }}, nvml.SUCCESS
	}
	if err := l.watch(t.Context(), nil); err == nil || errors.Is(err, ErrNoGPU) || l.users != 0 {
		t.Errorf("got %v", err)
	}
}
