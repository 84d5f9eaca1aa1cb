package cuda

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"unsafe"
)

// Module is compiled PTX on a device: the program's own kernels.
type Module struct {
	device  *Device
	handle  uintptr // 0 after Close; used only within [Device.do]
	entries map[string][]parameter
}

// parameter describes a parameter of a kernel.
type parameter struct {
	size  int
	float bool // it is declared as a float
	whole bool // it is declared as an integer; if both are false, as bits
}

// Load makes the driver compile PTX, and blocks until that is done. The error contains the
// compiler's messages. The driver caches compiled code on disk. [Module.Close] releases the module.
func (d *Device) Load(ptx string) (*Module, error) {
	m := &Module{device: d, entries: entries(ptx)}
	err := d.do(func() (err error) {
		m.handle, err = d.compile([]byte(ptx))
		return err
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Close releases the module. None of its kernels may be in progress, and none can be launched
// afterwards. A second call returns ErrClosed.
func (m *Module) Close() error {
	return m.device.do(func() error {
		if m.handle == 0 {
			return ErrClosed
		}
		handle := m.handle
		m.handle = 0
		return m.device.api.check("cuModuleUnload", m.device.api.moduleUnload(handle))
	})
}

// Function is a kernel of a Module. It must not be used after the module is closed.
type Function struct {
	module     *Module
	name       string
	handle     uintptr
	parameters []parameter
}

// Function returns the kernel with the given name, an .entry of the module's PTX.
func (m *Module) Function(name string) (*Function, error) {
	parameters, there := m.entries[name]
	f := &Function{module: m, name: name, parameters: parameters}
	symbol := append([]byte(name), 0)
	err := m.device.do(func() error {
		if m.handle == 0 {
			return ErrClosed
		}
		return m.device.api.check("cuModuleGetFunction", m.device.api.moduleGetFunction(&f.handle, m.handle, &symbol[0]))
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %s", err, name)
	case !there:
		return nil, fmt.Errorf("cuda: the PTX text does not show the parameters of %s", name)
	}
	return f, nil
}

// Dim is an extent in up to three directions. A zero counts as 1.
type Dim struct{ X, Y, Z int }

// Grid is the number of threads that run a kernel.
type Grid struct {
	Blocks  Dim
	Threads Dim // of each block
	Shared  int // bytes of memory that the threads of a block share, besides what the kernel declares
}

// Linear is a grid of at least n threads, in blocks of 256 side by side; n must not be negative.
func Linear(n int) Grid {
	return Grid{Blocks: Dim{X: (n + blockSize - 1) / blockSize}, Threads: Dim{X: blockSize}}
}

// LaunchError reports that a kernel was not launched because the call does not match its
// declaration.
type LaunchError struct {
	Function string
	Argument int // index of the argument, from 0; -1 if the error is about their number, the grid or the stream
	Reason   string
}

// Error names the kernel and the argument.
func (e *LaunchError) Error() string {
	if e.Argument < 0 {
		return fmt.Sprintf("cuda: kernel %s: %s", e.Function, e.Reason)
	}
	return fmt.Sprintf("cuda: kernel %s: argument %d: %s", e.Function, e.Argument, e.Reason)
}

// Launch launches the kernel in a stream of its device and does not wait for it: a later call, such
// as [Stream.Synchronize], returns errors of the kernel. An argument is a *[Slice] of any type, for
// its address, or an int32, uint32, int64, uint64, float32 or float64. Number, sizes and kinds
// (integer or float) of the arguments must match the kernel's declaration; otherwise the error is a
// *[LaunchError]. The caller must not free the slices until the kernel is done.
//
// A collective waits for the kernel if the stream is its [Options.After]. Work launched after the
// collective has returned runs after it, in any stream.
func (f *Function) Launch(s *Stream, g Grid, args ...any) error {
	d := f.module.device
	values, err := f.arguments(args)
	if err != nil {
		return err
	}
	dims := [...]int{g.Blocks.X, g.Blocks.Y, g.Blocks.Z, g.Threads.X, g.Threads.Y, g.Threads.Z, g.Shared}
	var n [len(dims)]uint32
	for i, v := range dims {
		if v < 0 || v > math.MaxInt32 {
			return &LaunchError{f.name, -1, fmt.Sprintf("the grid %+v is not possible", g)}
		}
		n[i] = uint32(v)
		if i < len(dims)-1 {
			n[i] = max(n[i], 1)
		}
	}
	if s.device != d {
		return &LaunchError{f.name, -1, "the stream is of another device"}
	}
	places := make([]unsafe.Pointer, len(values)+1) // one more, so that &places[0] exists
	for i := range values {
		places[i] = unsafe.Pointer(&values[i])
	}
	return d.do(func() error {
		if f.module.handle == 0 {
			return ErrClosed
		}
		r := d.api.launchKernel(f.handle, n[0], n[1], n[2], n[3], n[4], n[5], n[6], s.handle, unsafe.Pointer(&places[0]), nil)
		runtime.KeepAlive(places)
		return d.api.check("cuLaunchKernel", r)
	})
}

// onDevice is a slice of any type, as an argument.
type onDevice interface{ place() (*Device, uint64) }

func (s *Slice[T]) place() (*Device, uint64) { return s.device, s.address }

// arguments returns the bits of each argument. A 32-bit argument is the lower half of its word.
func (f *Function) arguments(args []any) ([]uint64, error) {
	if len(args) != len(f.parameters) {
		return nil, &LaunchError{f.name, -1, fmt.Sprintf("%d arguments for %d parameters", len(args), len(f.parameters))}
	}
	values := make([]uint64, len(args))
	for i, a := range args {
		given := parameter{size: 8, whole: true}
		switch v := a.(type) {
		case onDevice:
			device, address := v.place()
			if device != f.module.device && address != 0 {
				return nil, &LaunchError{f.name, i, "the slice is on another device"}
			}
			values[i] = address
		case int32:
			given.size, values[i] = 4, uint64(uint32(v))
		case uint32:
			given.size, values[i] = 4, uint64(v)
		case int64:
			values[i] = uint64(v)
		case uint64:
			values[i] = v
		case float32:
			given, values[i] = parameter{size: 4, float: true}, uint64(math.Float32bits(v))
		case float64:
			given, values[i] = parameter{size: 8, float: true}, math.Float64bits(v)
		default:
			return nil, &LaunchError{f.name, i, fmt.Sprintf("a kernel takes no %T", a)}
		}
		if want := f.parameters[i]; want.size != given.size || want.float && given.whole || want.whole && given.float {
			return nil, &LaunchError{f.name, i, fmt.Sprintf("the argument is a %T, and the parameter %s", a, want)}
		}
	}
	return values, nil
}

// String describes the parameter.
func (p parameter) String() string {
	switch {
	case p.size == 0:
		return "a structure"
	case p.float:
		return fmt.Sprintf("a float of %d bits", 8*p.size)
	case p.whole:
		return fmt.Sprintf("an integer or address of %d bits", 8*p.size)
	}
	return fmt.Sprintf("%d bits", 8*p.size)
}

// scalars has the types of PTX that a number or an address can have.
var scalars = map[string]parameter{
	".u32": {size: 4, whole: true}, ".s32": {size: 4, whole: true}, ".b32": {size: 4}, ".f32": {size: 4, float: true},
	".u64": {size: 8, whole: true}, ".s64": {size: 8, whole: true}, ".b64": {size: 8}, ".f64": {size: 8, float: true},
}

// entries parses the parameters of the kernels in PTX. The driver reads as many arguments as are
// declared, of the declared sizes, from memory: only this package checks that a call matches. The
// compiler refuses invalid PTX.
func entries(text string) map[string][]parameter {
	all := map[string][]parameter{}
	for _, part := range strings.Split(withoutComments(text), ".entry")[1:] {
		head, _, _ := strings.Cut(part, "{")
		name, rest, declared := strings.Cut(head, "(")
		name = strings.TrimSpace(name)
		list, _, _ := strings.Cut(rest, ")")
		parameters := []parameter{}
		for p := range strings.SplitSeq(list, ",") {
			words := strings.Fields(p)
			if len(words) == 0 || !declared {
				continue
			}
			var is parameter
			if at := slices.IndexFunc(words, func(w string) bool { return scalars[w].size > 0 }); at >= 0 && !strings.Contains(p, "[") {
				is = scalars[words[at]]
			}
			parameters = append(parameters, is)
		}
		all[name] = parameters
	}
	return all
}

// withoutComments replaces each comment by a blank.
func withoutComments(text string) string {
	var b strings.Builder
	for {
		at := strings.Index(text, "/")
		if at < 0 || at+1 == len(text) {
			return b.String() + text
		}
		end, skip := "", 0
		switch text[at+1] {
		case '/':
			end = "\n"
		case '*':
			end, skip = "*/", 2
		default:
			b.WriteString(text[:at+1])
			text = text[at+1:]
			continue
		}
		b.WriteString(text[:at] + " ")
		rest := strings.Index(text[at+2:], end)
		if rest < 0 {
			return b.String()
		}
		text = text[at+2+rest+skip:]
	}
}
