package cuda

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/hvdrun/hvdrun/internal/dlopen"
)

// DefaultLibrary is the driver's library. It comes with the driver, not with CUDA's toolkit.
const DefaultLibrary = "libcuda.so.1"

// ipcHandle identifies an allocation for other processes: a CUipcMemHandle, which is passed by
// value.
type ipcHandle struct{ bytes [64]byte }

// api has the driver's functions: each field is the C function of the symbol, with its types.
// Handles are C pointers (uintptr), addresses on the device are 64-bit numbers, and host memory is
// an unsafe.Pointer.
type api struct {
	init               func(flags uint32) result
	driverGetVersion   func(version *int32) result
	getErrorName       func(r result, name *unsafe.Pointer) result
	getErrorString     func(r result, text *unsafe.Pointer) result
	deviceGetCount     func(n *int32) result
	deviceGet          func(device *int32, ordinal int32) result
	deviceGetName      func(name *byte, size int32, device int32) result
	deviceGetUUID      func(uuid *[16]byte, device int32) result
	deviceGetPCIBusID  func(id *byte, size int32, device int32) result
	deviceGetAttribute func(value *int32, attribute int32, device int32) result
	deviceTotalMem     func(bytes *uint64, device int32) result

	primaryCtxRetain  func(context *uintptr, device int32) result
	primaryCtxRelease func(device int32) result
	ctxSetCurrent     func(context uintptr) result
	ctxPushCurrent    func(context uintptr) result
	ctxPopCurrent     func(context *uintptr) result

	memAlloc          func(address *uint64, bytes uint64) result
	memFree           func(address uint64) result
	memGetInfo        func(free, total *uint64) result
	memHostAlloc      func(memory *unsafe.Pointer, bytes uint64, flags uint32) result
	memFreeHost       func(memory unsafe.Pointer) result
	memHostRegister   func(memory unsafe.Pointer, bytes uint64, flags uint32) result
	memHostUnregister func(memory unsafe.Pointer) result
	memcpyHtoDAsync   func(dst uint64, src unsafe.Pointer, bytes uint64, stream uintptr) result
	memcpyDtoHAsync   func(dst unsafe.Pointer, src uint64, bytes uint64, stream uintptr) result
	memcpyDtoDAsync   func(dst, src uint64, bytes uint64, stream uintptr) result
	memsetD8Async     func(dst uint64, value uint8, bytes uint64, stream uintptr) result

	streamCreate    func(stream *uintptr, flags uint32) result
	streamDestroy   func(stream uintptr) result
	streamWaitEvent func(stream, event uintptr, flags uint32) result
	eventCreate     func(event *uintptr, flags uint32) result
	eventDestroy    func(event uintptr) result
	eventRecord     func(event, stream uintptr) result
	eventQuery      func(event uintptr) result

	moduleLoadDataEx  func(module *uintptr, image unsafe.Pointer, options uint32, names, values unsafe.Pointer) result
	moduleUnload      func(module uintptr) result
	moduleGetFunction func(function *uintptr, module uintptr, name *byte) result
	launchKernel      func(function uintptr, gridX, gridY, gridZ, blockX, blockY, blockZ, shared uint32, stream uintptr,
		params, extra unsafe.Pointer) result

	ipcGetMemHandle   func(handle *ipcHandle, address uint64) result
	ipcOpenMemHandle  func(address *uint64, handle ipcHandle, flags uint32) result
	ipcCloseMemHandle func(address uint64) result
}

// symbols returns the functions with their names in the driver. A number at the end of a name, as
// in cuMemAlloc_v2, is the version of a function that was changed; the name without it is for old
// programs.
func (a *api) symbols() []dlopen.Symbol {
	return []dlopen.Symbol{
		{"cuInit", &a.init}, {"cuDriverGetVersion", &a.driverGetVersion},
		{"cuGetErrorName", &a.getErrorName}, {"cuGetErrorString", &a.getErrorString},
		{"cuDeviceGetCount", &a.deviceGetCount}, {"cuDeviceGet", &a.deviceGet}, {"cuDeviceGetName", &a.deviceGetName},
		{"cuDeviceGetUuid_v2", &a.deviceGetUUID}, {"cuDeviceGetPCIBusId", &a.deviceGetPCIBusID},
		{"cuDeviceGetAttribute", &a.deviceGetAttribute}, {"cuDeviceTotalMem_v2", &a.deviceTotalMem},
		{"cuDevicePrimaryCtxRetain", &a.primaryCtxRetain}, {"cuDevicePrimaryCtxRelease_v2", &a.primaryCtxRelease},
		{"cuCtxSetCurrent", &a.ctxSetCurrent}, {"cuCtxPushCurrent_v2", &a.ctxPushCurrent}, {"cuCtxPopCurrent_v2", &a.ctxPopCurrent},
		{"cuMemAlloc_v2", &a.memAlloc}, {"cuMemFree_v2", &a.memFree}, {"cuMemGetInfo_v2", &a.memGetInfo},
		{"cuMemHostAlloc", &a.memHostAlloc}, {"cuMemFreeHost", &a.memFreeHost},
		{"cuMemHostRegister_v2", &a.memHostRegister}, {"cuMemHostUnregister", &a.memHostUnregister},
		{"cuMemcpyHtoDAsync_v2", &a.memcpyHtoDAsync}, {"cuMemcpyDtoHAsync_v2", &a.memcpyDtoHAsync},
		{"cuMemcpyDtoDAsync_v2", &a.memcpyDtoDAsync}, {"cuMemsetD8Async", &a.memsetD8Async},
		{"cuStreamCreate", &a.streamCreate}, {"cuStreamDestroy_v2", &a.streamDestroy},
		{"cuStreamWaitEvent", &a.streamWaitEvent},
		{"cuEventCreate", &a.eventCreate}, {"cuEventDestroy_v2", &a.eventDestroy},
		{"cuEventRecord", &a.eventRecord}, {"cuEventQuery", &a.eventQuery},
		{"cuModuleLoadDataEx", &a.moduleLoadDataEx}, {"cuModuleUnload", &a.moduleUnload},
		{"cuModuleGetFunction", &a.moduleGetFunction}, {"cuLaunchKernel", &a.launchKernel},
		{"cuIpcGetMemHandle", &a.ipcGetMemHandle}, {"cuIpcOpenMemHandle_v2", &a.ipcOpenMemHandle},
		{"cuIpcCloseMemHandle", &a.ipcCloseMemHandle},
	}
}

// loaded has the drivers of this process, by the path of the library. They are never unloaded,
// since CUDA does not support that.
var loaded struct {
	mu  sync.Mutex
	api map[string]*api
}

// load returns the driver in a library, and initializes it at the first call. After a failure, the
// next call tries again.
func load(library string) (*api, error) {
	if library == "" {
		library = DefaultLibrary
	}
	loaded.mu.Lock()
	defer loaded.mu.Unlock()
	if a := loaded.api[library]; a != nil {
		return a, nil
	}
	handle, err := dlopen.Open(library)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrUnavailable, err)
	}
	a := &api{}
	if _, err := dlopen.Bind(handle, a.symbols()); err != nil {
		return nil, fmt.Errorf("%w: the driver in %s is too old: %v", ErrUnavailable, library, err)
	}
	if err := a.check("cuInit", a.init(0)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if loaded.api == nil {
		loaded.api = make(map[string]*api)
	}
	loaded.api[library] = a
	return a, nil
}

// check returns the error of a call's result, or nil for success.
func (a *api) check(call string, r result) error {
	if r == success {
		return nil
	}
	e := &Error{Call: call, Code: int(r)}
	var name, text unsafe.Pointer
	if a.getErrorName(r, &name) == success {
		e.Name = dlopen.String(name)
	}
	if a.getErrorString(r, &text) == success {
		e.Text = dlopen.String(text)
	}
	return e
}
