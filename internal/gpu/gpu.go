// Package gpu lists the NVIDIA GPUs of this machine, and reports when one of them fails.
//
// A device is what one worker uses: a whole GPU, or a MIG instance of a GPU that is cut into some.
// Devices are numbered as the driver has them, a GPU's instances in its place; a device's number is
// the index of the slot that it is for.
//
// All is by NVML, the driver's own library, which is loaded when it is first needed: by go-nvml
// where the program is built with cgo, and else by a binding of our own, so that hvdrun needs no
// newer glibc. Without that library, or if the program was built with -tags static, the error is
// ErrNoGPU, with the reason.
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

// ErrNoGPU reports that this machine has no GPU that can be seen; the error around it is the
// reason.
var ErrNoGPU = errors.New("gpu: no GPUs")

// Device is one device. What the driver does not report is zero.
type Device struct {
	// Index is the device's place in the inventory, from 0, and the index of its slot.
	Index int
	// UUID is "GPU-…" or "MIG-…"; empty where the device is lost.
	UUID string
	// GPU is the number of the whole GPU, as nvidia-smi has it.
	GPU int
	// MIG is the instance that the device is; nil for a whole GPU.
	MIG *Instance
	// Fault is why the device cannot be used, such as "GPU is lost"; empty where nothing is known
	// against it.
	Fault string
}

// Instance is a MIG instance, by the numbers of its GPU instance and of its compute instance in
// that.
type Instance struct{ GPU, Compute int }

// String returns such as "GPU 3 (GPU-…)", "MIG 1/0 of GPU 3 (MIG-…)".
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

// VisibleEnv returns the environment that shows a worker the device of its slot alone:
// CUDA_VISIBLE_DEVICES with its UUID, or its number where it has none. Slots beyond the devices
// share them in turn. Without devices there is nothing to show, and it returns nil.
func VisibleEnv(devices []Device, slot int) []string {
	if len(devices) == 0 || slot < 0 {
		return nil
	}
	d := devices[slot%len(devices)]
	return []string{"CUDA_VISIBLE_DEVICES=" + cmp.Or(d.UUID, strconv.Itoa(d.GPU))}
}

// Visible returns those devices that a CUDA program sees where CUDA_VISIBLE_DEVICES has that value,
// in its order and numbered anew: numbers of GPUs, or beginnings of UUIDs, up to the first that is
// none. The numbers are nvidia-smi's, which are CUDA's where CUDA_DEVICE_ORDER=PCI_BUS_ID or all
// GPUs are alike.
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

// Kind is what an Event is about.
type Kind uint8

// The kinds of events.
const (
	XID  Kind = iota + 1 // the driver reports an error by its number
	ECC2                 // a memory error of two bits, which could not be corrected
	Lost                 // the GPU does not answer any more
)

// Event is something that went wrong with a device. What happens to a GPU is told of each of its
// MIG instances, unless it is about one of them.
type Event struct {
	Device Device
	Kind   Kind
	XID    uint64 // the number, for Kind XID
	// Critical: the device cannot be relied upon until it, or the machine, is reset. Other events
	// are errors of programs, or pass.
	Critical bool
}

// String describes what happened, to which device.
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

// criticalXIDs are the errors after which a GPU has to be reset or replaced, of NVIDIA's list of
// them.
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

// otherXIDs are errors of programs: the GPU is as good as before.
var otherXIDs = map[uint64]string{
	13:  "graphics engine exception",
	31:  "memory page fault of a program",
	43:  "a program was stopped",
	45:  "clean-up after a program",
	68:  "video processor exception",
	109: "a program's context switch took too long",
}

// Health remembers which slots' devices have failed. The zero value knows of none. Its methods may
// be called by several goroutines at once.
type Health struct {
	mu  sync.Mutex
	bad map[int]Event
}

// Note takes an event, and returns whether a device that was good until now is bad.
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

// Bad returns the event that made the slot's device bad; false where it is good.
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
