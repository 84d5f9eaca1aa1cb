package cuda

import (
	"bytes"
	"embed"
	"fmt"
	"math"
	"reflect"
	"runtime"
	"unsafe"

	"github.com/hvdrun/hvdrun/collective"
	"github.com/hvdrun/hvdrun/internal/kernel"
)

//go:generate go run ./internal/gen ptx

// programs are the kernels, a file for each type.
//
//go:embed ptx/*.ptx
var programs embed.FS

// places is the largest number of vectors that one kernel reads, and that it writes.
const places = 16

// arguments is the parameter of every kernel; see internal/gen.
type arguments struct {
	sources, targets [places]uint64
	nSources         uint32
	nTargets         uint32
	skip             uint64 // bytes of the head
	vectors          uint64 // of 16 bytes
	head             uint64 // elements
	rest             uint64 // elements of head and tail
	number           uint64
}

// over returns the arguments for the first count elements of vectors of a type.
func over(t kernel.Type, count int, targets []uint64, sources ...uint64) *arguments {
	a := &arguments{nSources: uint32(len(sources)), nTargets: uint32(len(targets))}
	copy(a.sources[:], sources)
	copy(a.targets[:], targets)
	size, n := uint64(t.Size()), uint64(count)
	past := sources[0] % 16
	a.head = min((16-past)%16/size, n)
	for _, at := range append(targets, sources...) {
		if at%16 != past {
			a.head = n // the vectors are aligned differently
		}
	}
	a.skip = a.head * size
	a.vectors = (n - a.head) * size / 16
	a.rest = n - a.vectors*16/size
	return a
}

// blockSize is the number of threads of a block, and full how many blocks keep a multiprocessor
// busy.
const (
	blockSize = 256
	full      = 8
)

// launch launches a kernel in a stream. It is called within [Device.do].
func (d *Device) launch(stream uintptr, op string, t kernel.Type, a *arguments) error {
	function, err := d.kernel(op, t)
	if err != nil {
		return err
	}
	blocks := uint32(min((max(a.vectors, a.rest)+blockSize-1)/blockSize, uint64(max(d.info.Multiprocessors, 1)*full)))
	if blocks == 0 {
		return nil
	}
	params := &[1]unsafe.Pointer{unsafe.Pointer(a)}
	r := d.api.launchKernel(function, blocks, 1, 1, blockSize, 1, 1, 0, stream, unsafe.Pointer(params), nil)
	runtime.KeepAlive(params)
	return d.api.check("cuLaunchKernel", r)
}

// kernel returns a kernel's function. The first call for a type compiles the type's file.
func (d *Device) kernel(op string, t kernel.Type) (uintptr, error) {
	name := op + "_" + t.String()
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.kernels[name]; f != 0 {
		return f, nil
	}
	module := d.modules[t.String()]
	if module == 0 {
		text, err := programs.ReadFile("ptx/" + t.String() + ".ptx")
		if err != nil {
			return 0, fmt.Errorf("cuda: there are no kernels for %v", t)
		}
		if module, err = d.compile(text); err != nil {
			return 0, err
		}
		d.modules[t.String()] = module
	}
	var f uintptr
	symbol := append([]byte(name), 0)
	if err := d.api.check("cuModuleGetFunction", d.api.moduleGetFunction(&f, module, &symbol[0])); err != nil {
		return 0, fmt.Errorf("%w: %s", err, name)
	}
	d.kernels[name] = f
	return f, nil
}

// Options of the driver's compiler.
const (
	jitErrorLog     = 5
	jitErrorLogSize = 6
)

// compile compiles PTX to a module. The error contains the compiler's messages.
func (d *Device) compile(text []byte) (uintptr, error) {
	text = append(text, 0)
	log := make([]byte, 4096)
	names := []int32{jitErrorLog, jitErrorLogSize}
	values := []uintptr{uintptr(unsafe.Pointer(&log[0])), uintptr(len(log) - 1)}
	var module uintptr
	r := d.api.moduleLoadDataEx(&module, unsafe.Pointer(&text[0]), uint32(len(names)),
		unsafe.Pointer(&names[0]), unsafe.Pointer(&values[0]))
	runtime.KeepAlive(log)
	err := d.api.check("cuModuleLoadDataEx", r)
	if said, _, _ := bytes.Cut(log, []byte{0}); err != nil && len(said) > 0 {
		err = fmt.Errorf("%w: %s", err, said)
	}
	return module, err
}

// typeOf returns the type of an element.
func typeOf[T collective.Element]() kernel.Type {
	switch any(*new(T)).(type) {
	case collective.Float16:
		return kernel.Float16
	case collective.BFloat16:
		return kernel.BFloat16
	}
	return kernel.OfKind(reflect.TypeFor[T]().Kind())
}

// checkReduced returns an error for a type that looks like a floating point number but would be
// reduced as an integer.
func checkReduced[T collective.Element]() error {
	switch any(*new(T)).(type) {
	case collective.Float16, collective.BFloat16:
		return nil
	}
	return kernel.CheckAlien(reflect.TypeFor[T]())
}

// hasKernels reports whether there are kernels for a type.
func hasKernels(t kernel.Type) bool {
	switch t {
	case kernel.Float32, kernel.Float64, kernel.Float16, kernel.BFloat16, kernel.Int32, kernel.Int64:
		return true
	}
	return false
}

// combination returns the name of the kernel of an operation; empty if no kernel computes it.
func combination(op collective.Op) string {
	switch op {
	case collective.Sum, collective.Average, collective.Min, collective.Max, collective.Product:
		return op.String()
	}
	return ""
}

// Combine launches a kernel in the stream that sets dst[i] to a[i] combined with b[i], with the
// same bits as the reductions of package collective. The three slices have equal lengths; dst may
// be a or b, but must not overlap with them otherwise. The element type is float32, float64,
// Float16, BFloat16, int32 or int64, and the operation Sum, Min, Max or Product. Combine does not
// wait for the kernel; the first call for an element type blocks until the kernels of the type are
// compiled.
func Combine[T collective.Element](s *Stream, dst, a, b *Slice[T], op collective.Op) error {
	t, name := typeOf[T](), combination(op)
	switch {
	case name == "" || op == collective.Average || !hasKernels(t):
		return fmt.Errorf("cuda: no kernel computes the %v of %v", op, t)
	case a.n != dst.n || b.n != dst.n:
		return fmt.Errorf("cuda: vectors of %d and %d elements cannot be combined into one of %d: give three of equal lengths", a.n, b.n, dst.n)
	case a.device != s.device || b.device != s.device || dst.device != s.device:
		return fmt.Errorf("cuda: the vectors and the stream belong to different devices")
	case dst.n == 0:
		return nil
	}
	args := over(t, dst.n, []uint64{dst.address}, a.address, b.address)
	return s.device.do(func() error { return s.device.launch(s.handle, name, t, args) })
}

// Scale launches a kernel in the stream that multiplies every element by a factor. The factor must
// not be NaN; it is first rounded to the element type, or to float32 for 16-bit floats. Integers
// are multiplied in float64, truncated towards zero, and clamped to the range of the type. The
// types are those of [Combine].
func Scale[T collective.Element](s *Stream, v *Slice[T], factor float64) error {
	t := typeOf[T]()
	switch {
	case !hasKernels(t):
		return fmt.Errorf("cuda: no kernel scales %v", t)
	case factor != factor:
		return fmt.Errorf("cuda: the factor is not a number")
	case v.device != s.device:
		return fmt.Errorf("cuda: the vector and the stream belong to different devices")
	case v.n == 0 || factor == 1:
		return nil // multiplied by 1 in float64, some 64-bit integers would change
	}
	args := over(t, v.n, []uint64{v.address}, v.address)
	args.number = math.Float64bits(factor)
	return s.device.do(func() error { return s.device.launch(s.handle, "scale", t, args) })
}

// divisor returns the argument of an average's kernel, by which the sum is divided.
func divisor(t kernel.Type, n int) uint64 {
	if t == kernel.Int32 || t == kernel.Int64 {
		return uint64(n)
	}
	return math.Float64bits(float64(n))
}
