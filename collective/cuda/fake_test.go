package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/internal/ptxtest"
)

// Results that only the fake driver returns.
const (
	invalidValue   result = 1
	invalidContext result = 201
	invalidPTX     result = 218
	invalidHandle  result = 400
	notFound       result = 500
	notSupported   result = 801
)

// isCode reports whether err is a result of the driver.
func isCode(err error, r result) bool {
	var e *Error
	return errors.As(err, &e) && result(e.Code) == r
}

// cString returns a copy of the C string at p, of any length.
func cString(p unsafe.Pointer) string {
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// node is a machine with devices. Its device memory is host memory, and each of its processes has a
// driver.
type node struct {
	mu      sync.Mutex
	devices int
	address uint64 // of the next allocation
	handles map[[64]byte]*allocation
	limit   uint64 // bytes of memory on each device
	used    uint64
	unseen  bool // allocations are not visible to the race detector
	maps    [][]byte
	early   int           // allocations that were freed while others had them open
	wrong   []string      // what programs have done against the driver's rules
	gate    chan struct{} // kernels wait until it is closed; nil: they do not
	modules sync.Map      // by text
	streams sync.WaitGroup
}

type allocation struct {
	memory []byte
	opens  int
	freed  atomic.Bool
}

func newNode(t *testing.T) *node {
	n := &node{devices: 2, address: 0x7f0000000000, handles: map[[64]byte]*allocation{}, limit: 1 << 30}
	t.Cleanup(func() {
		n.streams.Wait()
		n.mu.Lock()
		defer n.mu.Unlock()
		for _, m := range n.maps {
			unix.Munmap(m)
		}
		for _, w := range n.wrong {
			t.Error(w)
		}
		if n.used != 0 {
			t.Errorf("%d bytes of the devices' memory are lost", n.used)
		}
	})
	return n
}

func (n *node) blame(format string, args ...any) {
	n.wrong = append(n.wrong, fmt.Sprintf(format, args...))
}

// take returns memory filled with garbage. The race detector cannot see that ranks synchronise
// through memory that they share, so in tests of that it must not see their other shared memory
// either.
func (n *node) take(bytes int) []byte {
	memory := make([]byte, bytes)
	if n.unseen {
		m, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			panic(err)
		}
		n.maps = append(n.maps, m)
		memory = m
	}
	for i := 0; i < bytes; i += copy(memory[i:], garbage[:]) {
	}
	return memory
}

var garbage = [4096]byte(bytes.Repeat([]byte{0xee}, 4096))

// driver is the CUDA driver in one process of a node.
type driver struct {
	node *node

	mu        sync.Mutex
	fault     func(call string) result // called for each call; success: continue
	sticky    result                   // of all calls from now on
	ranges    map[uint64]*allocation   // what the process sees, by address
	mapped    map[uint64]int           // how often each range of another process is open
	pinned    map[unsafe.Pointer][]byte
	register  bool // other host memory can be pinned
	next      uintptr
	streams   map[uintptr]*fakeStream
	events    map[uintptr]*mark
	modules   map[uintptr]*ptxtest.Module
	kernels   map[uintptr]*ptxtest.Kernel
	grid      [7]uint32    // of the last launch
	threads   map[int]bool // those with a context
	retained  int
	elsewhere bool // opened handles lead to other memory
	calls     map[string]int
	carried   uint64 // bytes over the bus, in both directions
}

// mark is a recorded event.
type mark struct{ passed chan struct{} }

type fakeStream struct {
	work chan func()
}

// process returns the driver of a new process on the node.
func (n *node) process() *driver {
	return &driver{node: n, ranges: map[uint64]*allocation{}, mapped: map[uint64]int{}, pinned: map[unsafe.Pointer][]byte{},
		register: true, next: 100, streams: map[uintptr]*fakeStream{}, events: map[uintptr]*mark{},
		modules: map[uintptr]*ptxtest.Module{}, kernels: map[uintptr]*ptxtest.Kernel{}, threads: map[int]bool{}, calls: map[string]int{}}
}

// failCalls makes calls with that name return r. The number few is how many calls succeed before,
// and most bounds the calls that fail. restore ends that, and reports whether any call has failed.
func (f *driver) failCalls(call string, few, most int, r result) (restore func() (failed bool)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := 0
	f.fault = func(c string) result {
		if c == call {
			if seen++; seen > few && seen-few <= most {
				return r
			}
		}
		return success
	}
	return func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.fault = nil
		return seen > few
	}
}

// enter begins a call. If the call needs a context, its thread must have one. The caller must call
// the returned function at the end.
func (f *driver) enter(call string, context bool) (result, func()) {
	f.mu.Lock()
	f.calls[call]++
	if f.fault != nil {
		if r := f.fault(call); r != success {
			if r.sticky() {
				f.sticky = r
			}
			return r, f.mu.Unlock
		}
	}
	if context && !f.threads[unix.Gettid()] {
		f.node.mu.Lock()
		f.node.blame("%s on a thread without a context", call)
		f.node.mu.Unlock()
		return invalidContext, f.mu.Unlock
	}
	return f.sticky, f.mu.Unlock
}

func (f *driver) handle() uintptr {
	f.next++
	return f.next
}

// Span returns the process's view of device memory, or nil.
func (f *driver) Span(address uint64, n int) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	base, a := f.find(address)
	if a == nil || a.freed.Load() || address-base+uint64(n) > uint64(len(a.memory)) {
		return nil
	}
	return a.memory[address-base:][:n:n]
}

func (f *driver) find(address uint64) (uint64, *allocation) {
	for base, a := range f.ranges {
		if address >= base && address-base < uint64(max(len(a.memory), 1)) {
			return base, a
		}
	}
	return 0, nil
}

// put adds work to a stream. If the work fails, the context becomes unusable.
func (f *driver) put(stream uintptr, work func() result) result {
	s := f.streams[stream]
	if s == nil {
		return invalidHandle
	}
	s.work <- func() {
		if r := work(); r != success {
			f.mu.Lock()
			f.sticky = r
			f.mu.Unlock()
		}
	}
	return success
}

func text(b *byte, size int32, s string) { copy(unsafe.Slice(b, size), s+"\x00") }

// api returns the driver as the package sees it.
func (f *driver) api() *api {
	a := &api{}
	f.basics(a)
	f.memory(a)
	f.copies(a)
	f.queues(a)
	f.programs(a)
	f.ipc(a)
	return a
}

var names = map[result]string{invalidValue: "CUDA_ERROR_INVALID_VALUE", outOfMemory: "CUDA_ERROR_OUT_OF_MEMORY",
	illegalAddress: "CUDA_ERROR_ILLEGAL_ADDRESS", launchFailed: "CUDA_ERROR_LAUNCH_FAILED", notReady: "CUDA_ERROR_NOT_READY"}

func (f *driver) basics(a *api) {
	keep := map[result]*byte{}
	a.init = func(uint32) result { return success }
	a.driverGetVersion = func(v *int32) result { *v = 12040; return success }
	a.getErrorName = func(r result, name *unsafe.Pointer) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		if names[r] == "" {
			return invalidValue
		}
		if keep[r] == nil {
			keep[r] = &append([]byte(names[r]), 0)[0]
		}
		*name = unsafe.Pointer(keep[r])
		return success
	}
	a.getErrorString = func(result, *unsafe.Pointer) result { return invalidValue }
	a.deviceGetCount = func(n *int32) result { *n = int32(f.node.devices); return success }
	a.deviceGet = func(d *int32, ordinal int32) result { *d = ordinal; return success }
	a.deviceGetName = func(b *byte, size, d int32) result { text(b, size, fmt.Sprintf("Fake %d", d)); return success }
	a.deviceGetUUID = func(u *[16]byte, d int32) result { u[0] = byte(d); return success }
	a.deviceGetPCIBusID = func(b *byte, size, d int32) result { text(b, size, fmt.Sprintf("0000:%02x:00.0", d)); return success }
	a.deviceGetAttribute = func(v *int32, attribute, _ int32) result {
		*v = map[int32]int32{attributeMultiprocessors: 2, attributeMajor: 9, attributeMinor: 0}[attribute]
		return success
	}
	a.deviceTotalMem = func(n *uint64, _ int32) result { *n = f.node.limit; return success }
	a.primaryCtxRetain = func(ctx *uintptr, d int32) result {
		r, done := f.enter("cuDevicePrimaryCtxRetain", false)
		defer done()
		f.retained++
		*ctx = uintptr(d) + 1
		return r
	}
	a.primaryCtxRelease = func(int32) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.retained--
		delete(f.threads, unix.Gettid())
		return success
	}
	a.ctxSetCurrent = func(uintptr) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.threads[unix.Gettid()] = true
		return success
	}
	a.ctxPushCurrent = func(context uintptr) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		if context == 0 || f.threads[unix.Gettid()] {
			return invalidContext
		}
		f.threads[unix.Gettid()] = true
		return success
	}
	a.ctxPopCurrent = func(*uintptr) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		if !f.threads[unix.Gettid()] {
			return invalidContext
		}
		delete(f.threads, unix.Gettid())
		return success
	}
}

func (f *driver) memory(a *api) {
	a.memAlloc = func(address *uint64, n uint64) result {
		r, done := f.enter("cuMemAlloc_v2", true)
		defer done()
		f.node.mu.Lock()
		defer f.node.mu.Unlock()
		if r == success && f.node.used+n > f.node.limit {
			r = outOfMemory
		}
		if r != success {
			return r
		}
		memory := f.node.take(int(n))
		f.node.used += n
		*address = f.node.address
		f.node.address += (n + 0xfff) &^ 0xff
		f.ranges[*address] = &allocation{memory: memory}
		return success
	}
	a.memFree = func(address uint64) result {
		f.drain()
		r, done := f.enter("cuMemFree_v2", true)
		defer done()
		alloc := f.ranges[address]
		f.node.mu.Lock()
		defer f.node.mu.Unlock()
		if alloc == nil || f.mapped[address] > 0 {
			f.node.blame("cuMemFree of %#x, which is nothing", address)
			return invalidValue
		}
		if alloc.opens > 0 {
			f.node.early++
		}
		alloc.freed.Store(true)
		f.node.used -= uint64(len(alloc.memory))
		delete(f.ranges, address)
		return r
	}
	a.memGetInfo = func(free, total *uint64) result {
		r, done := f.enter("cuMemGetInfo_v2", true)
		defer done()
		f.node.mu.Lock()
		defer f.node.mu.Unlock()
		*free, *total = f.node.limit-f.node.used, f.node.limit
		return r
	}
	a.memHostAlloc = func(memory *unsafe.Pointer, n uint64, _ uint32) result {
		r, done := f.enter("cuMemHostAlloc", true)
		defer done()
		b := make([]byte, n)
		*memory = unsafe.Pointer(&b[0])
		f.pinned[*memory] = b
		return r
	}
	unpin := func(call string) func(memory unsafe.Pointer) result {
		return func(memory unsafe.Pointer) result {
			r, done := f.enter(call, true)
			defer done()
			if f.pinned[memory] == nil {
				return invalidValue
			}
			delete(f.pinned, memory)
			return r
		}
	}
	a.memFreeHost, a.memHostUnregister = unpin("cuMemFreeHost"), unpin("cuMemHostUnregister")
	a.memHostRegister = func(memory unsafe.Pointer, n uint64, _ uint32) result {
		r, done := f.enter("cuMemHostRegister_v2", true)
		defer done()
		if r == success && !f.register {
			r = notSupported
		}
		if r == success {
			f.pinned[memory] = unsafe.Slice((*byte)(memory), n)
		}
		return r
	}
}

// drain waits until all streams have done their work.
func (f *driver) drain() {
	var all sync.WaitGroup
	f.mu.Lock()
	for _, s := range f.streams {
		all.Add(1)
		s.work <- all.Done
	}
	f.mu.Unlock()
	all.Wait()
}

// host returns pinned memory of the process, or nil.
func (f *driver) host(p unsafe.Pointer, n uint64) []byte {
	for base, b := range f.pinned {
		if at := uintptr(p) - uintptr(base); uintptr(p) >= uintptr(base) && uint64(at)+n <= uint64(len(b)) {
			return b[at:][:n]
		}
	}
	f.node.mu.Lock()
	defer f.node.mu.Unlock()
	f.node.blame("a copy of %d bytes of host memory that is not pinned", n)
	return nil
}

func (f *driver) copies(a *api) {
	move := func(stream uintptr, n uint64, to, from func() []byte) result {
		return f.put(stream, func() result {
			dst, src := to(), from()
			if dst == nil || src == nil {
				return illegalAddress
			}
			copy(dst, src)
			return success
		})
	}
	device := func(address, n uint64) func() []byte { return func() []byte { return f.Span(address, int(n)) } }
	a.memcpyHtoDAsync = func(dst uint64, src unsafe.Pointer, n uint64, stream uintptr) result {
		r, done := f.enter("cuMemcpyHtoDAsync_v2", true)
		defer done()
		b := f.host(src, n)
		if r != success || b == nil {
			return either(r, invalidValue)
		}
		f.carried += n
		return move(stream, n, device(dst, n), func() []byte { return b })
	}
	a.memcpyDtoHAsync = func(dst unsafe.Pointer, src uint64, n uint64, stream uintptr) result {
		r, done := f.enter("cuMemcpyDtoHAsync_v2", true)
		defer done()
		b := f.host(dst, n)
		if r != success || b == nil {
			return either(r, invalidValue)
		}
		f.carried += n
		return move(stream, n, func() []byte { return b }, device(src, n))
	}
	a.memcpyDtoDAsync = func(dst, src, n uint64, stream uintptr) result {
		r, done := f.enter("cuMemcpyDtoDAsync_v2", true)
		defer done()
		if r != success {
			return r
		}
		return move(stream, n, device(dst, n), device(src, n))
	}
	a.memsetD8Async = func(dst uint64, value uint8, n uint64, stream uintptr) result {
		r, done := f.enter("cuMemsetD8Async", true)
		defer done()
		if r != success {
			return r
		}
		return move(stream, n, device(dst, n), func() []byte { return slices.Repeat([]byte{value}, int(n)) })
	}
}

func (f *driver) queues(a *api) {
	a.streamCreate = func(stream *uintptr, _ uint32) result {
		r, done := f.enter("cuStreamCreate", true)
		defer done()
		if r != success {
			return r
		}
		s := &fakeStream{work: make(chan func(), 1024)}
		*stream = f.handle()
		f.streams[*stream] = s
		f.node.streams.Go(func() {
			for work := range s.work {
				work()
			}
		})
		return success
	}
	a.streamDestroy = func(stream uintptr) result {
		r, done := f.enter("cuStreamDestroy_v2", true)
		defer done()
		if s := f.streams[stream]; s != nil {
			close(s.work)
			delete(f.streams, stream)
			return r
		}
		return invalidHandle
	}
	a.streamWaitEvent = func(stream, event uintptr, _ uint32) result {
		r, done := f.enter("cuStreamWaitEvent", true)
		defer done()
		m, there := f.events[event]
		if !there {
			return invalidHandle
		}
		if m == nil || r != success {
			return r
		}
		return f.put(stream, func() result { <-m.passed; return success })
	}
	a.eventCreate = func(event *uintptr, _ uint32) result {
		r, done := f.enter("cuEventCreate", true)
		defer done()
		if r == success {
			*event = f.handle()
			f.events[*event] = nil
		}
		return r
	}
	a.eventDestroy = func(event uintptr) result {
		r, done := f.enter("cuEventDestroy_v2", true)
		defer done()
		if _, there := f.events[event]; !there {
			return invalidHandle
		}
		delete(f.events, event)
		return r
	}
	a.eventRecord = func(event, stream uintptr) result {
		r, done := f.enter("cuEventRecord", true)
		defer done()
		if _, there := f.events[event]; !there || r != success {
			return either(r, invalidHandle)
		}
		m := &mark{make(chan struct{})}
		f.events[event] = m
		return f.put(stream, func() result { close(m.passed); return success })
	}
	a.eventQuery = func(event uintptr) result {
		r, done := f.enter("cuEventQuery", true)
		defer done()
		m, there := f.events[event]
		if !there {
			f.node.mu.Lock()
			f.node.blame("cuEventQuery of an event that was destroyed")
			f.node.mu.Unlock()
			return invalidHandle
		}
		if r != success || m == nil {
			return r
		}
		select {
		case <-m.passed:
			return f.sticky
		default:
			return notReady
		}
	}
}

func (f *driver) programs(a *api) {
	a.moduleLoadDataEx = func(module *uintptr, image unsafe.Pointer, _ uint32, _, _ unsafe.Pointer) result {
		r, done := f.enter("cuModuleLoadDataEx", true)
		defer done()
		if r != success {
			return r
		}
		source := cString(image)
		m, _ := f.node.modules.Load(source)
		if m == nil {
			parsed, err := ptxtest.Parse(source)
			if err != nil {
				return invalidPTX
			}
			m, _ = f.node.modules.LoadOrStore(source, parsed)
		}
		*module = f.handle()
		f.modules[*module] = m.(*ptxtest.Module)
		return success
	}
	a.moduleUnload = func(module uintptr) result {
		r, done := f.enter("cuModuleUnload", true)
		defer done()
		delete(f.modules, module)
		return r
	}
	a.moduleGetFunction = func(function *uintptr, module uintptr, name *byte) result {
		r, done := f.enter("cuModuleGetFunction", true)
		defer done()
		m := f.modules[module]
		if r != success || m == nil {
			return either(r, invalidHandle)
		}
		k := m.Kernels[cString(unsafe.Pointer(name))]
		if k == nil {
			return notFound
		}
		*function = f.handle()
		f.kernels[*function] = k
		return success
	}
	a.launchKernel = func(function uintptr, gx, gy, gz, bx, by, bz, shared uint32, stream uintptr, params, _ unsafe.Pointer) result {
		r, done := f.enter("cuLaunchKernel", true)
		defer done()
		k := f.kernels[function]
		f.grid = [7]uint32{gx, gy, gz, bx, by, bz, shared}
		if r != success || k == nil || gy*gz*by*bz != 1 || gx == 0 {
			return either(r, invalidValue)
		}
		var each [][]byte
		for i, place := range unsafe.Slice((*unsafe.Pointer)(params), len(k.Params)) {
			each = append(each, unsafe.Slice((*byte)(place), k.Params[i]))
		}
		param := k.Pack(each...) // the driver also copies the parameters
		gate := f.node.gate
		return f.put(stream, func() result {
			if gate != nil {
				<-gate
			}
			if err := k.Run(f, param, int(gx), int(bx)); err != nil {
				return illegalAddress
			}
			return success
		})
	}
}

func (f *driver) ipc(a *api) {
	a.ipcGetMemHandle = func(handle *ipcHandle, address uint64) result {
		r, done := f.enter("cuIpcGetMemHandle", true)
		defer done()
		alloc := f.ranges[address]
		if r != success || alloc == nil || f.mapped[address] > 0 {
			return either(r, invalidValue)
		}
		copy(handle.bytes[:], "IPC ")
		binary.LittleEndian.PutUint64(handle.bytes[4:], address)
		f.node.mu.Lock()
		defer f.node.mu.Unlock()
		f.node.handles[handle.bytes] = alloc
		return success
	}
	a.ipcOpenMemHandle = func(address *uint64, handle ipcHandle, flags uint32) result {
		r, done := f.enter("cuIpcOpenMemHandle_v2", true)
		defer done()
		f.node.mu.Lock()
		defer f.node.mu.Unlock()
		alloc := f.node.handles[handle.bytes]
		if r != success || alloc == nil || alloc.freed.Load() || flags != ipcLazyPeerAccess {
			return either(r, invalidValue)
		}
		for at, own := range f.ranges {
			if own == alloc && f.mapped[at] == 0 {
				f.node.blame("a process opens what is its own")
				return invalidContext
			}
			if own == alloc { // it is open already: count it
				f.mapped[at]++
				*address = at
				return success
			}
		}
		if f.elsewhere {
			alloc = &allocation{memory: make([]byte, len(alloc.memory))}
		}
		alloc.opens++
		*address = f.node.address
		f.node.address += uint64(len(alloc.memory)+0xfff) &^ 0xff
		f.ranges[*address], f.mapped[*address] = alloc, 1
		return success
	}
	a.ipcCloseMemHandle = func(address uint64) result {
		r, done := f.enter("cuIpcCloseMemHandle", true)
		defer done()
		alloc := f.ranges[address]
		if alloc == nil || f.mapped[address] == 0 {
			return invalidValue
		}
		if f.mapped[address]--; f.mapped[address] > 0 {
			return r
		}
		f.node.mu.Lock()
		defer f.node.mu.Unlock()
		alloc.opens--
		delete(f.ranges, address)
		delete(f.mapped, address)
		return r
	}
}

// open opens a device of a process. When the test ends it closes the device, and checks that the
// process holds nothing more.
func open(t *testing.T, f *driver, config Config) *Device {
	t.Helper()
	d, err := f.api().open(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Close()
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.streams)+len(f.events)+len(f.modules)+len(f.pinned)+f.retained != 0 && f.sticky == success {
			t.Errorf("left over: %d streams, %d events, %d modules, %d pieces of pinned memory, %d contexts",
				len(f.streams), len(f.events), len(f.modules), len(f.pinned), f.retained)
		}
	})
	return d
}

// either returns the fault r of a call, or wrong, the error in its arguments, if there is no fault.
func either(r, wrong result) result {
	if r != success {
		return r
	}
	return wrong
}
