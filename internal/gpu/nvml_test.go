//go:build linux && !static

package gpu

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"
)

// machine simulates a machine with eight GPUs, and its NVML. The handle of a GPU is its number plus
// 1.
type machine struct {
	api
	loaded int
	lost   [8]atomic.Bool
	parts  map[handle]map[uint32]instance // of GPUs that are split into MIG instances, by index
	uuids  map[handle]string              // of handles that belong to no GPU; empty: lost
	events chan eventData
}

// instance is a MIG instance, with its handle.
type instance struct {
	handle      handle
	gpu, within uint32
}

func uuidOf(gpu int) string { return "GPU-" + strconv.Itoa(gpu) + "0000000-0000" }

func newMachine() (*machine, *library) {
	m := &machine{events: make(chan eventData, 10), parts: map[handle]map[uint32]instance{}, uuids: map[handle]string{}}
	m.api = api{
		start:    func() result { m.loaded++; return success },
		shutdown: func() result { m.loaded--; return success },
		count:    func(n *uint32) result { *n = 8; return success },
		at:       func(index uint32, h *handle) result { *h = handle(index + 1); return success },
		uuid: func(h handle, text *byte, size uint32) result {
			name, other := m.uuids[h]
			if !other {
				name = uuidOf(int(h) - 1)
			}
			if name == "" {
				return isLostResult
			}
			copy(unsafe.Slice(text, size), name+"\x00")
			return success
		},
		temperature: func(h handle, _ uint32, degrees *uint32) result {
			switch {
			case h > 8:
				return unsupported
			case m.lost[h-1].Load():
				return isLostResult
			}
			*degrees = 40
			return success
		},
		eventTypes: func(_ handle, types *uint64) result { *types = 1<<16 - 1; return success },
		register: func(_ handle, types uint64, _ eventSet) result {
			if types != eventXID|eventDoubleBitECC {
				return 2
			}
			return success
		},
		newSet:  func(set *eventSet) result { *set = 1; return success },
		freeSet: func(eventSet) result { return success },
		wait:    m.waitFor,
		migMode: func(h handle, current, _ *uint32) result {
			if m.parts[h] != nil {
				*current = migEnabled
			}
			return success
		},
		migCount: func(_ handle, most *uint32) result { *most = 7; return success },
		migAt: func(h handle, index uint32, part *handle) result {
			i, known := m.parts[h][index]
			if !known {
				return notFound
			}
			*part = i.handle
			return success
		},
		gpuInstance:     func(h handle, id *uint32) result { *id = m.part(h).gpu; return success },
		computeInstance: func(h handle, id *uint32) result { *id = m.part(h).within; return success },
	}
	return m, &library{load: func() (*api, error) { return &m.api, nil }}
}

func (m *machine) part(h handle) instance {
	for _, parts := range m.parts {
		for _, i := range parts {
			if i.handle == h {
				return i
			}
		}
	}
	return instance{}
}

func (m *machine) waitFor(_ eventSet, data *eventData, ms uint32) result {
	select {
	case *data = <-m.events:
		return success
	case <-time.After(time.Duration(ms) * time.Millisecond):
		return timedOut
	}
}

// split cuts a GPU into MIG instances 1/0 and 5/2.
func (m *machine) split(i int) {
	m.parts[handle(i+1)] = map[uint32]instance{0: {101, 1, 0}, 3: {102, 5, 2}}
	m.uuids[101], m.uuids[102] = "MIG-first", "MIG-second"
}

func TestInventory(t *testing.T) {
	m, l := newMachine()
	m.split(2)
	m.at = func(index uint32, h *handle) result {
		if index == 6 {
			return isLostResult
		}
		*h = handle(index + 1)
		return success
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
	if d.GPU != 1 || d.MIG != nil || d.UUID != uuidOf(1) || d.Fault != "" {
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

// TestOldDriver: a driver without MIG is not asked for it, because the call would end the process.
func TestOldDriver(t *testing.T) {
	m, l := newMachine()
	m.migCount = nil
	m.migMode = func(handle, *uint32, *uint32) result { panic("called") }
	if devices, err := l.inventory(); err != nil || len(devices) != 8 {
		t.Errorf("%d devices, %v", len(devices), err)
	}
}

func TestNoLibrary(t *testing.T) {
	for name, path := range map[string]string{
		"none": filepath.Join(t.TempDir(), "libnvidia-ml.so.1"), "another one": "libc.so.6",
	} {
		if a, err := load(path); a != nil || !errors.Is(err, ErrNoGPU) {
			t.Errorf("%s: %v, %v", name, a, err)
		}
	}
}

// TestBinding: a library compiled by a C compiler is called with the types of NVML's header.
func TestBinding(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("there is no C compiler here: ", err)
	}
	path := filepath.Join(t.TempDir(), libraryName)
	if out, err := exec.Command(gcc, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, "testdata/nvml.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	l := &library{load: func() (*api, error) { return load(path) }}
	devices, err := l.inventory()
	want := []Device{
		{Index: 0, UUID: "GPU-0", GPU: 0},
		{Index: 1, UUID: "MIG-1", GPU: 1, MIG: &Instance{7, 3}},
		{Index: 2, UUID: "GPU-2", GPU: 2, Fault: "GPU is lost"},
	}
	if err != nil || !slices.EqualFunc(devices, want, func(a, b Device) bool { return a.String() == b.String() && a.Index == b.Index && a.Fault == b.Fault }) {
		t.Fatalf("%v, %v; want %v", devices, err, want)
	}
	var heard []string
	err = l.watch(t.Context(), func(e Event) { heard = append(heard, e.String()) })
	if err == nil || !strings.Contains(err.Error(), "unknown error") { // after its last event
		t.Errorf("watching: %v", err)
	}
	if want := []string{"GPU 2 (GPU-2): does not answer any more", "MIG 7/3 of GPU 1 (MIG-1): XID 95, uncontained memory error"}; !slices.Equal(heard, want) {
		t.Errorf("heard %q, want %q", heard, want)
	}
}

func TestNoGPU(t *testing.T) {
	for _, ret := range []result{driverNotLoaded, success} {
		m, l := newMachine()
		m.start, m.count = func() result { return ret }, func(*uint32) result { return success }
		devices, err := l.inventory()
		if devices != nil || !errors.Is(err, ErrNoGPU) || l.users != 0 {
			t.Errorf("%v: %v, %v, %d users", ret, devices, err, l.users)
		}
		if err := l.watch(t.Context(), nil); !errors.Is(err, ErrNoGPU) || l.users != 0 {
			t.Errorf("%v: watching: %v", ret, err)
		}
	}
}

// heard is an event that a watch has delivered.
type heard struct {
	event Event
	after time.Duration
}

// watch watches the machine for ten seconds while do runs, in virtual time.
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
		const unknown, copied handle = 201, 202
		m.uuids[unknown], m.uuids[copied] = "", uuidOf(7)
		all := watch(t, m, l, func() {
			xid := func(h handle, number uint64, instance, within uint32) {
				m.events <- eventData{h, eventXID, number, instance, within}
			}
			xid(1, 79, allInstances, allInstances)
			xid(2, 31, allInstances, allInstances)
			xid(3, 95, 5, 2)
			xid(3, 94, 1, allInstances)
			xid(3, 64, allInstances, allInstances)
			m.events <- eventData{device: 5, kind: eventDoubleBitECC}
			m.events <- eventData{device: 5, kind: 1 << 4} // its clock has changed
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
			want = append(want, short{slot, XID, 79, true}) // the GPU is not known
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
					m.eventTypes = func(handle, *uint64) result { return unsupported }
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

// TestWatchOfALostSet: an event set that contains a lost GPU returns that error instead of events,
// at once and forever.
func TestWatchOfALostSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := newMachine()
		waits := 0
		m.api.wait = func(eventSet, *eventData, uint32) result { waits++; return isLostResult }
		all := watch(t, m, l, func() { m.lost[3].Store(true) })
		if len(all) != 1 || all[0].event.Device.Index != 3 || all[0].after > waitTime || waits > 30 {
			t.Errorf("heard %v after %d waits", all, waits)
		}
	})
}

func TestWatchFails(t *testing.T) {
	m, l := newMachine()
	works := m.newSet
	m.newSet = func(*eventSet) result { return unknownError }
	if err := l.watch(t.Context(), nil); err == nil || errors.Is(err, ErrNoGPU) || l.users != 0 {
		t.Errorf("got %v", err)
	}
	m.newSet, m.api.wait = works, func(eventSet, *eventData, uint32) result { return 1 }
	if err := l.watch(t.Context(), nil); err == nil || errors.Is(err, ErrNoGPU) || l.users != 0 {
		t.Errorf("got %v", err)
	}
}
