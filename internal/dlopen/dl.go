// Package dlopen loads shared libraries of C at run time, without cgo.
package dlopen

import (
	"runtime"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Symbol is a function of a library. It is an alias, so that long tables need no field names.
type Symbol = struct {
	Name string
	Call any // pointer to a variable of the function's type, which Bind sets
}

// Open loads the library at a path, or under a name that the system's linker resolves. The library
// is never unloaded.
func Open(path string) (handle uintptr, err error) {
	runtime.LockOSThread() // the linker keeps its last error for each thread
	defer runtime.UnlockOSThread()
	return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

// Bind sets the variables of the functions that the library has. It returns the names of the
// missing functions, and the linker's error for the first of them.
func Bind(handle uintptr, symbols []Symbol) (missing []string, reason error) {
	runtime.LockOSThread() // as in Open
	defer runtime.UnlockOSThread()
	for _, s := range symbols {
		address, err := purego.Dlsym(handle, s.Name)
		if err != nil {
			if reason == nil {
				reason = err
			}
			missing = append(missing, s.Name)
			continue
		}
		purego.RegisterFunc(s.Call, address)
	}
	return missing, reason
}

// maxString bounds the length of a string, in bytes.
const maxString = 1024

// String returns a copy of the C string at p, or of its first 1024 bytes; "" if p is nil.
func String(p unsafe.Pointer) string {
	if p == nil {
		return ""
	}
	n := 0
	for n < maxString && *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}
