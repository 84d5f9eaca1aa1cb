//go:build linux && !static

package gpu

import (
	"fmt"

	"github.com/hvdrun/hvdrun/internal/dlopen"
)

// libraryName is the name by which the system's linker finds NVML.
const libraryName = "libnvidia-ml.so.1"

// result is an nvmlReturn_t.
type result int32

const (
	success           result = 0
	unsupported       result = 3
	notFound          result = 6
	driverNotLoaded   result = 9
	timedOut          result = 10
	isLostResult      result = 15
	resetRequired     result = 16
	unknownError      result = 999
	gpuTemperature           = 0 // nvmlTemperatureSensors_t
	migEnabled               = 1
	eventDoubleBitECC        = 1 << 1
	eventXID                 = 1 << 3
	uuidSize                 = 96
)

var resultNames = map[result]string{
	1: "it is not initialised", 2: "invalid argument", unsupported: "not supported", 4: "no permission", notFound: "not found",
	7: "insufficient size", 8: "a power cable is not attached", driverNotLoaded: "the driver is not loaded", timedOut: "timed out",
	11: "a fault of interrupts", 13: "the function is missing", 14: "the infoROM is corrupted", isLostResult: "GPU is lost",
	resetRequired: "GPU requires a reset", 17: "blocked by the operating system", 18: "the versions of driver and library differ",
	19: "in use", 20: "insufficient memory", 23: "insufficient resources", 27: "not ready", 28: "GPU not found",
	unknownError: "unknown error",
}

// Error returns the description of the result in NVML's manual.
func (r result) Error() string {
	if name := resultNames[r]; name != "" {
		return name
	}
	return fmt.Sprintf("NVML's error %d", int32(r))
}

// handle is an nvmlDevice_t, and eventSet an nvmlEventSet_t.
type (
	handle   uintptr
	eventSet uintptr
)

// eventData is an nvmlEventData_t.
type eventData struct {
	device           handle
	kind, data       uint64
	instance, within uint32 // of MIG: GPU instance and compute instance; allInstances: it concerns no single one
}

// api holds the functions of the library, each with the types of its C function.
type api struct {
	start       func() result
	shutdown    func() result
	count       func(n *uint32) result
	at          func(index uint32, device *handle) result
	uuid        func(device handle, text *byte, size uint32) result
	temperature func(device handle, sensor uint32, degrees *uint32) result
	eventTypes  func(device handle, types *uint64) result
	register    func(device handle, types uint64, set eventSet) result
	newSet      func(set *eventSet) result
	wait        func(set eventSet, data *eventData, milliseconds uint32) result
	freeSet     func(set eventSet) result

	// The functions for MIG are nil with an older driver.
	migMode         func(device handle, current, pending *uint32) result
	migCount        func(device handle, most *uint32) result
	migAt           func(device handle, index uint32, part *handle) result
	gpuInstance     func(device handle, id *uint32) result
	computeInstance func(device handle, id *uint32) result
}

func (a *api) required() []dlopen.Symbol {
	return []dlopen.Symbol{
		{"nvmlInit_v2", &a.start}, {"nvmlShutdown", &a.shutdown}, {"nvmlDeviceGetCount_v2", &a.count},
		{"nvmlDeviceGetHandleByIndex_v2", &a.at}, {"nvmlDeviceGetUUID", &a.uuid},
		{"nvmlDeviceGetTemperature", &a.temperature}, {"nvmlDeviceGetSupportedEventTypes", &a.eventTypes},
		{"nvmlDeviceRegisterEvents", &a.register}, {"nvmlEventSetCreate", &a.newSet}, {"nvmlEventSetWait_v2", &a.wait},
		{"nvmlEventSetFree", &a.freeSet},
	}
}

func (a *api) optional() []dlopen.Symbol {
	return []dlopen.Symbol{
		{"nvmlDeviceGetMigMode", &a.migMode}, {"nvmlDeviceGetMaxMigDeviceCount", &a.migCount},
		{"nvmlDeviceGetMigDeviceHandleByIndex", &a.migAt}, {"nvmlDeviceGetGpuInstanceId", &a.gpuInstance},
		{"nvmlDeviceGetComputeInstanceId", &a.computeInstance},
	}
}
