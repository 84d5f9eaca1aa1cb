// Package gpu lists the NVIDIA GPUs of this machine, and reports when one of them fails.
//
// A device is what one worker uses: a whole GPU, or a MIG instance of a GPU that is partitioned.
// Devices are numbered in the driver's order, with a GPU's instances in its place; a device's
// number is the index of its slot.
//
// The package uses NVML, the driver's own library, and loads it on the first use: through go-nvml
// if the program is built with cgo, otherwise through the binding in this package, so that hvdrun
// does not need a newer glibc. Without that library, or if the program was built with -tags static,
// the error is ErrNoGPU, with the reason.
package gpu

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// ErrNoGPU says that this process can see no GPU. The errors that wrap it give the reason.
var ErrNoGPU = errors.New("gpu: no GPUs")

// Device is one device. Fields that the driver does not report are zero.
type Device struct {
	// Index is the device's index in the inventory, from 0, and the index of its slot.
	Index int
	// UUID is "GPU-…" or "MIG-…"; empty if the device is lost.
	UUID string
	// GPU is the number of the whole GPU, as nvidia-smi shows it.
	GPU int
	// MIG is the MIG instance; nil for a whole GPU.
	MIG *Instance
	// Fault is the reason why the device cannot be used, such as "GPU is lost"; empty if none is
	// known.
	Fault string
}

// Instance is a MIG instance: the number of its GPU instance, and that of its compute instance
// within it.
type Instance struct{ GPU, Compute int }

// String returns a text such as "GPU 3 (GPU-…)" or "MIG 1/0 of GPU 3 (MIG-…)".
func (d Device) String() string {
	name := "GPU " + strconv.Itoa(d.GPU)
	if d.MIG != nil {
		name = fmt.Sprintf("MIG %d/%d of %s", d.MIG.GPU, d.MIG.Compute, name)
	}
	if d.UUID != "" {
		name += " (" + d.UUID + ")"
	}
	return name
}

// VisibleEnv returns the environment variable that limits a worker to the device of its slot:
// CUDA_VISIBLE_DEVICES with its UUID, or with its number if it has none. Slots beyond the devices
// share them in turn. Without devices it returns nil.
func VisibleEnv(devices []Device, slot int) []string {
	if len(devices) == 0 || slot < 0 {
		return nil
	}
	d := devices[slot%len(devices)]
	return []string{"CUDA_VISIBLE_DEVICES=" + cmp.Or(d.UUID, strconv.Itoa(d.GPU))}
}

// Visible returns the devices that a CUDA program sees if CUDA_VISIBLE_DEVICES has that value, in
// its order and with new indices. The value lists numbers of GPUs, or prefixes of UUIDs; the first
// that matches no device ends the list. The numbers are those of nvidia-smi, which CUDA also uses
// if CUDA_DEVICE_ORDER=PCI_BUS_ID or all GPUs are alike.
func Visible(devices []Device, value string) []Device {
	visible := []Device{}
	for item := range strings.SplitSeq(value, ",") {
		item = strings.TrimSpace(item)
		number, err := strconv.Atoi(item)
		i := slices.IndexFunc(devices, func(d Device) bool {
			if err == nil {
				return d.GPU == number
			}
			return item != "" && strings.HasPrefix(d.UUID, item)
		})
		if i < 0 || slices.ContainsFunc(visible, func(d Device) bool { return d.UUID == devices[i].UUID && d.GPU == devices[i].GPU }) {
			break
		}
		d := devices[i]
		d.Index = len(visible)
		visible = append(visible, d)
	}
	return visible
}

// Kind is the kind of an Event.
type Kind uint8

// The kinds of events.
const (
	XID  Kind = iota + 1 // the driver reports an error by its number
	ECC2                 // a memory error of two bits, which cannot be corrected
	Lost                 // the GPU no longer answers
)

// Event is a fault of a device. A fault of a GPU makes an Event for each of its MIG instances,
// unless it concerns only one of them.
type Event struct {
	Device Device
	Kind   Kind
	XID    uint64 // the error's number, for Kind XID
	// Critical: the device is unreliable until it, or the machine, is reset. Other events are
	// errors of programs, or temporary.
	Critical bool
}

// String describes the fault and the device.
func (e Event) String() string {
	what := "does not answer any more"
	switch e.Kind {
	case XID:
		what = "XID " + strconv.FormatUint(e.XID, 10)
		if name := cmp.Or(criticalXIDs[e.XID], otherXIDs[e.XID]); name != "" {
			what += ", " + name
		}
	case ECC2:
		what = "memory error of two bits"
	}
	return e.Device.String() + ": " + what
}

// criticalXIDs are the errors in NVIDIA's list after which a GPU must be reset or replaced.
var criticalXIDs = map[uint64]string{
	46:  "the GPU has stopped processing",
	48:  "memory error of two bits",
	54:  "auxiliary power is not connected",
	61:  "internal micro-controller breakpoint",
	62:  "internal micro-controller halt",
	63:  "memory page retired or row to be remapped",
	64:  "memory page not retired or row not remapped",
	74:  "NVLink error",
	79:  "the GPU has fallen off the bus",
	92:  "high rate of single-bit memory errors",
	94:  "contained memory error",
	95:  "uncontained memory error",
	110: "security fault",
	119: "the GPU's system processor does not answer",
	120: "error of the GPU's system processor",
	140: "memory error that was not corrected",
}

// otherXIDs are errors of programs, after which the GPU is as good as before.
var otherXIDs = map[uint64]string{
	13:  "graphics engine exception",
	31:  "memory page fault of a program",
	43:  "a program was stopped",
	45:  "clean-up after a program",
	68:  "video processor exception",
	109: "a program's context switch took too long",
}

// Health records the slots whose devices have failed. The zero value has none. Its methods may be
// called by several goroutines.
type Health struct {
	mu  sync.Mutex
	bad map[int]Event
}

// Note records an event, and returns whether it is the first critical one of its device.
func (h *Health) Note(e Event) (news bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, known := h.bad[e.Device.Index]; known || !e.Critical {
		return false
	}
	if h.bad == nil {
		h.bad = map[int]Event{}
	}
	h.bad[e.Device.Index] = e
	return true
}

// Bad returns the event because of which the slot's device is bad; false if the device is good.
func (h *Health) Bad(slot int) (Event, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, bad := h.bad[slot]
	return e, bad
}

// Slots returns the slots whose devices are bad, in ascending order.
func (h *Health) Slots() []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.bad))
}
