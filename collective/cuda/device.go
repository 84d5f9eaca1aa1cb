package cuda

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/plan"
)

// Config configures a [Device]. The zero value stands for the first device of the machine's driver.
type Config struct {
	Device  int    // the device's number in CUDA's order, from 0; for a worker, the index of its slot
	Library string // path or name of the driver's library; DefaultLibrary if empty
	// NCCL is the path or name of NCCL's library. If it is empty, the value of HVD_NCCL_LIBRARY
	// when the device is opened counts, or else libnccl.so.2.
	NCCL string
	// Backend forces the backend of collectives: BackendNCCL, BackendIPC, BackendHosts or
	// BackendStaging. It applies to a whole group if one rank sets it; if the group cannot use it,
	// or another rank forces another, collectives return a *BackendError. If it is empty, the value
	// of HVD_CUDA_BACKEND when the device is opened counts, or else the best that all ranks can
	// use.
	Backend string

	ncclShared bool // NCCL permits several ranks on one device

	host string // set by tests: the host that this process reports instead of its real one
}

// Info describes a device.
type Info struct {
	Index           int
	Name            string
	UUID            [16]byte // the same in every process, however the devices are numbered there
	Bus             string   // its address on the PCI bus, such as "0000:1b:00.0"
	Major, Minor    int      // compute capability
	Multiprocessors int
	Memory          uint64 // total bytes
	Exclusive       bool   // the device serves one process at a time
}

// Attributes and flags of CUDA's header.
const (
	attributeMultiprocessors = 16
	attributeComputeMode     = 20
	attributeMajor           = 75
	attributeMinor           = 76

	exclusiveProcess = 3

	streamNonBlocking  = 1
	eventDisableTiming = 2
	hostPortable       = 1
	ipcLazyPeerAccess  = 1
)

// minMajor is the lowest major compute capability that the kernels support.
const minMajor = 7

// Devices lists the devices of the machine's driver, or of the one in library if that is not empty.
// It opens no device. On a machine without a usable driver, the error is [ErrUnavailable].
func Devices(library string) ([]Info, error) {
	a, err := load(library)
	if err != nil {
		return nil, err
	}
	return a.devices()
}

func (a *api) devices() ([]Info, error) {
	var n int32
	if err := a.check("cuDeviceGetCount", a.deviceGetCount(&n)); err != nil {
		return nil, err
	}
	all := make([]Info, n)
	for i := range all {
		info, _, err := a.info(i)
		if err != nil {
			return nil, err
		}
		all[i] = info
	}
	return all, nil
}

// info returns the description and the handle of a device.
func (a *api) info(index int) (Info, int32, error) {
	info := Info{Index: index}
	var device, major, minor, processors, mode int32
	if err := a.check("cuDeviceGet", a.deviceGet(&device, int32(index))); err != nil {
		return info, 0, err
	}
	var name, bus [256]byte
	attribute := func(value *int32, number int32) func() result {
		return func() result { return a.deviceGetAttribute(value, number, device) }
	}
	for _, ask := range []struct {
		name string
		call func() result
	}{
		{"cuDeviceGetName", func() result { return a.deviceGetName(&name[0], int32(len(name)-1), device) }},
		{"cuDeviceGetUuid_v2", func() result { return a.deviceGetUUID(&info.UUID, device) }},
		{"cuDeviceGetPCIBusId", func() result { return a.deviceGetPCIBusID(&bus[0], int32(len(bus)-1), device) }},
		{"cuDeviceTotalMem_v2", func() result { return a.deviceTotalMem(&info.Memory, device) }},
		{"cuDeviceGetAttribute", attribute(&processors, attributeMultiprocessors)},
		{"cuDeviceGetAttribute", attribute(&mode, attributeComputeMode)},
		{"cuDeviceGetAttribute", attribute(&major, attributeMajor)},
		{"cuDeviceGetAttribute", attribute(&minor, attributeMinor)},
	} {
		if err := a.check(ask.name, ask.call()); err != nil {
			return info, 0, err
		}
	}
	info.Name, _, _ = strings.Cut(string(name[:]), "\x00")
	info.Bus, _, _ = strings.Cut(string(bus[:]), "\x00")
	info.Major, info.Minor, info.Multiprocessors = int(major), int(minor), int(processors)
	info.Exclusive = mode == exclusiveProcess
	return info, device, nil
}

// Device is an open device. Its methods may be called by several goroutines.
type Device struct {
	api    *api
	config Config
	info   Info
	device int32
	calls
	watcher

	threads  sync.WaitGroup // threads for NCCL, and goroutines that wait for them
	shutting sync.Mutex     // held while backends of earlier generations are shut
	endLimit time.Duration  // the package's endLimit; it differs in tests

	mu sync.Mutex // guards what follows
	usage
	kernelCode
	stagings
	groupState
	allocations
}

// calls is the state of calls of the driver, which are made one at a time. A goroutine makes its
// calls itself, since switching to another thread would cost more than most calls.
type calls struct {
	calling sync.Mutex // held during a call
	context uintptr    // the device's primary context
	over    bool       // Close has ended; guarded by calling
}

// watcher is the thread that polls events that take long.
type watcher struct {
	watch   chan watched  // tells the thread to poll an event
	forget  chan watched  // tells the thread to stop polling the event with the same done
	closed  chan struct{} // closed when Close tells the thread to end
	ended   chan struct{} // closed when the thread has ended
	once    sync.Once     // of Close
	waiting []watched     // owned by the thread
}

// usage counts the operations in progress on the device.
type usage struct {
	active  int        // number of operations in progress
	idle    *sync.Cond // signalled when active is 0
	closing bool       // no further asynchronous operation may begin
	shut    bool       // no further operation may begin
}

// kernelCode is the package's code on the device, as far as it has been used.
type kernelCode struct {
	modules map[string]uintptr // by the name of the type
	kernels map[string]uintptr // functions, by name
}

// stagings are the sets of pinned memory and streams that copies use.
type stagings struct {
	spare    []*staging      // unused sets
	retiring []chan struct{} // closed when the device no longer uses the staging of a failed operation
}

// groupState is the state of the groups that use the device.
type groupState struct {
	backends map[*collective.Group]backend
	fusions  map[*collective.Group]*fusion // of the engines of asynchronous operations
	reusable []*communicator               // of earlier generations: possible parents
}

// allocations is the memory allocated on the device.
type allocations struct {
	owned         ranges          // the memory of Alloc
	deferredFrees []uint64        // freed memory that other processes may have open, or whose release would wait for the device
	banks         map[uint64]bool // the memory for snapshots of tensors
}

// watched is an event that the watcher polls.
type watched struct {
	event uintptr
	done  chan error // buffered, so that a send does not block
}

// Open opens a device and starts a thread, which [Device.Close] ends. It takes a reference to the
// device's primary context, which it makes if needed. The error is [ErrUnavailable] if the driver
// or the device cannot be used. Open also fails if another process has exclusive use of the device.
func Open(config Config) (*Device, error) {
	a, err := load(config.Library)
	if err != nil {
		return nil, err
	}
	return a.open(config)
}

func (a *api) open(config Config) (*Device, error) {
	env := plan.GPUFromEnv()
	config.Backend = cmp.Or(config.Backend, env.Backend)
	config.NCCL = cmp.Or(config.NCCL, env.NCCLLibrary)
	config.ncclShared = env.NCCLShared
	if config.Backend != "" && !slices.Contains(backends, config.Backend) {
		return nil, fmt.Errorf("cuda: %q is not a backend; choose one of %s", config.Backend, strings.Join(backends, ", "))
	}
	var n int32
	if err := a.check("cuDeviceGetCount", a.deviceGetCount(&n)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if config.Device < 0 || config.Device >= int(n) {
		return nil, fmt.Errorf("%w: there is no device %d: the driver has %d, numbered from 0", ErrUnavailable, config.Device, n)
	}
	info, device, err := a.info(config.Device)
	if err != nil {
		return nil, err
	}
	if info.Major < minMajor {
		return nil, fmt.Errorf("%w: device %d, %s, has compute capability %d.%d, and at least %d.0 is needed", ErrUnavailable,
			config.Device, info.Name, info.Major, info.Minor, minMajor)
	}
	d := &Device{
		api: a, config: config, info: info, device: device, endLimit: endLimit,
		watcher:     watcher{watch: make(chan watched), forget: make(chan watched), closed: make(chan struct{}), ended: make(chan struct{})},
		kernelCode:  kernelCode{modules: map[string]uintptr{}, kernels: map[string]uintptr{}},
		groupState:  groupState{backends: map[*collective.Group]backend{}, fusions: map[*collective.Group]*fusion{}},
		allocations: allocations{banks: map[uint64]bool{}},
	}
	d.idle = sync.NewCond(&d.mu)
	if err := a.check("cuDevicePrimaryCtxRetain", a.primaryCtxRetain(&d.context, device)); err != nil {
		return nil, err
	}
	go d.serve()
	return d, nil
}

// Info returns the description of the device.
func (d *Device) Info() Info { return d.info }

// Memory returns the number of free bytes and the total number of bytes of the device's memory.
func (d *Device) Memory() (free, total uint64, err error) {
	err = d.call("cuMemGetInfo_v2", func(a *api) result { return a.memGetInfo(&free, &total) })
	return free, total, err
}

// Close blocks until operations in progress, also asynchronous ones, have ended. It then releases
// what the device's collectives hold, and ends its thread. Slices, streams and events of the device
// should be freed or closed before; they must not be used afterwards. A second call returns
// [ErrClosed].
func (d *Device) Close() error {
	err := ErrClosed
	d.once.Do(func() {
		d.mu.Lock()
		d.closing = true
		for d.active > 0 {
			d.idle.Wait()
		}
		d.shut = true
		d.mu.Unlock()
		err = d.release()
		close(d.closed)
		<-d.ended
		d.calling.Lock()
		defer d.calling.Unlock()
		d.over = true
		err = errors.Join(err, d.api.check("cuDevicePrimaryCtxRelease_v2", d.api.primaryCtxRelease(d.device)))
	})
	return err
}

// release releases what belongs to the device itself.
func (d *Device) release() error {
	var errs []error
	for _, b := range d.backends {
		errs = append(errs, b.shut())
		d.deferredFrees = append(d.deferredFrees, b.takeDeferred()...)
	}
	d.endNCCL()
	d.deferredFrees = append(d.deferredFrees, d.forgetFusions(math.MaxUint64)...)
	errs = append(errs, d.freeAll(slices.AppendSeq(d.deferredFrees, maps.Keys(d.banks))))
	for _, s := range d.spare {
		errs = append(errs, s.free())
	}
	for _, m := range d.modules {
		errs = append(errs, d.call("cuModuleUnload", func(a *api) result { return a.moduleUnload(m) }))
	}
	d.backends, d.deferredFrees, d.banks, d.spare, d.modules, d.kernels = nil, nil, nil, nil, nil, nil
	return errors.Join(errs...)
}

// How events are polled.
const (
	eager  = 300 * time.Microsecond // time for which the waiting goroutine polls without a pause: as long as an exchange between ranks may take
	nap    = 20 * time.Microsecond  // pause of the watcher, in the kernel, since Go's timers are coarser
	napper = 50 * time.Millisecond  // time for which the watcher takes such pauses
	rest   = time.Millisecond       // its pause afterwards, by a timer
)

// now returns a channel that is always ready.
var now = func() <-chan time.Time {
	c := make(chan time.Time)
	close(c)
	return c
}()

// serve is the watcher's goroutine.
func (d *Device) serve() {
	runtime.LockOSThread() // without an unlock, so that the thread ends with its settings
	defer close(d.ended)
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // for precise naps; the kernel may refuse it
	var since time.Time                                // when an event was last added or removed
	timer := time.NewTimer(rest)
	defer timer.Stop()
	for {
		var again <-chan time.Time
		switch {
		case len(d.waiting) == 0:
		case time.Since(since) < napper:
			again = now
			unix.Nanosleep(&unix.Timespec{Nsec: nap.Nanoseconds()}, nil)
		default:
			timer.Reset(rest)
			again = timer.C
		}
		select {
		case w := <-d.watch:
			d.waiting, since = append(d.waiting, w), time.Now()
		case w := <-d.forget:
			d.waiting = slices.DeleteFunc(d.waiting, func(of watched) bool { return of.done == w.done })
		case <-d.closed:
			for _, w := range d.waiting {
				w.done <- ErrClosed
			}
			return
		case <-again:
		}
		before := len(d.waiting)
		if d.look(); len(d.waiting) != before {
			since = time.Now()
		}
	}
}

// look polls all watched events, and removes those that have occurred.
func (d *Device) look() {
	d.waiting = slices.DeleteFunc(d.waiting, func(w watched) bool {
		there, err := d.occurred(w.event)
		if there || err != nil {
			w.done <- err
		}
		return there || err != nil
	})
}

// occurred reports whether an event has occurred.
func (d *Device) occurred(event uintptr) (bool, error) {
	there := false
	err := d.call("cuEventQuery", func(a *api) result {
		r := a.eventQuery(event)
		if there = r == success; r == notReady {
			return success
		}
		return r
	})
	return there, err
}

// do calls f, which calls the driver, on a thread on which the device's context is current. It then
// restores the thread's previous context, which other code of the program may need.
func (d *Device) do(f func() error) error {
	d.calling.Lock()
	defer d.calling.Unlock()
	if d.over {
		return ErrClosed
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.api.check("cuCtxPushCurrent_v2", d.api.ctxPushCurrent(d.context)); err != nil {
		return err
	}
	err := f()
	var popped uintptr
	return errors.Join(err, d.api.check("cuCtxPopCurrent_v2", d.api.ctxPopCurrent(&popped)))
}

// call makes one call of the driver.
func (d *Device) call(name string, f func(a *api) result) error {
	return d.do(func() error { return d.api.check(name, f(d.api)) })
}

// await blocks until the event has occurred, the device has failed or ctx has ended.
func (d *Device) await(ctx context.Context, event uintptr) error {
	for began := time.Now(); ; {
		if there, err := d.occurred(event); there || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Since(began) > eager {
			break
		}
		runtime.Gosched()
	}
	w := watched{event, make(chan error, 1)}
	select {
	case d.watch <- w:
	case <-d.ended:
		return ErrClosed
	}
	select {
	case err := <-w.done:
		return err
	case <-ctx.Done():
	}
	select { // the caller may destroy the event afterwards
	case d.forget <- w:
	case <-d.ended:
	}
	return ctx.Err()
}

// begin prevents the device from being closed until end is called.
func (d *Device) begin() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.shut {
		return ErrClosed
	}
	d.active++
	return nil
}

// beginAsync is like begin, for an operation that outlives the call. Close waits for those that
// have begun, but lets no other begin.
func (d *Device) beginAsync() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing {
		return ErrClosed
	}
	d.active++
	return nil
}

// end ends what begin or beginAsync began.
func (d *Device) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.active--; d.active == 0 {
		d.idle.Broadcast()
	}
}

// spawn runs f in a goroutine for which Close waits. It is called between begin and end.
func (d *Device) spawn(f func()) {
	d.mu.Lock()
	d.active++
	d.mu.Unlock()
	go func() {
		defer d.end()
		f()
	}()
}
