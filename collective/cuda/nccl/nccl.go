// Package nccl calls NVIDIA's collective communications library, which it loads at run time,
// without cgo. It is a plain binding: NCCL's manual describes what a call does, when it may be made
// and on which thread. Every communicator is nonblocking: a call that starts something returns at
// once, and [Comm.Poll] reports when it is done.
package nccl

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"unsafe"

	"github.com/hvdrun/hvdrun/internal/dlopen"
)

// defaultLibrary is the name of NCCL's library for the system's linker.
const defaultLibrary = "libnccl.so.2"

// oldest is the first version with nonblocking communicators and configurations that later versions
// accept.
const oldest Version = 21400

// errUnavailable reports that there is no usable library.
var errUnavailable = errors.New("nccl: not available")

// Version is a version of NCCL, as in its header: 21403 is 2.14.3.
type Version int

// String returns the version in dotted form, such as "2.14.3".
func (v Version) String() string {
	major := Version(10000)
	if v < major {
		major = 1000 // until 2.8
	}
	return fmt.Sprintf("%d.%d.%d", int(v/major), int(v%major/100), int(v%100))
}

// ID identifies a communicator to be made: one rank makes the ID and sends it to the others.
type ID struct{ Bytes [128]byte }

// config is an ncclConfig_t of version 2.14. Later versions accept it.
type config struct {
	size     uint64
	magic    uint32
	version  uint32
	blocking int32
	_        int32
}

func nonblocking() *config {
	return &config{size: uint64(unsafe.Sizeof(config{})), magic: 0xcafebeef, version: uint32(oldest), blocking: 0}
}

// api has the library's functions: each field is the C function of the symbol, with its types. The
// functions of the second group are nil if the library's version lacks them.
type api struct {
	getVersion     func(version *int32) result
	getUniqueID    func(id *ID) result
	getErrorString func(r result) unsafe.Pointer
	getLastError   func(comm uintptr) unsafe.Pointer
	initRankConfig func(comm *uintptr, size int32, id ID, rank int32, c *config) result
	getAsyncError  func(comm uintptr, r *result) result
	abort          func(comm uintptr) result
	finalize       func(comm uintptr) result
	destroy        func(comm uintptr) result
	allReduce      func(send, recv uint64, n uint64, t Type, op Op, comm, stream uintptr) result
	broadcast      func(send, recv uint64, n uint64, t Type, root int32, comm, stream uintptr) result
	allGather      func(send, recv uint64, n uint64, t Type, comm, stream uintptr) result
	reduceScatter  func(send, recv uint64, n uint64, t Type, op Op, comm, stream uintptr) result
	groupStart     func() result
	groupEnd       func() result

	initRankScalable func(comm *uintptr, size, rank, ids int32, id *ID, c *config) result
	shrink           func(comm uintptr, without *int32, n int32, child *uintptr, c *config, flags int32) result
	revoke           func(comm uintptr, flags int32) result
	growID           func(comm uintptr, id *ID) result
	grow             func(comm uintptr, size int32, id *ID, rank int32, child *uintptr, c *config) result
}

func (a *api) required() []dlopen.Symbol {
	return []dlopen.Symbol{
		{"ncclGetUniqueId", &a.getUniqueID}, {"ncclGetErrorString", &a.getErrorString}, {"ncclGetLastError", &a.getLastError},
		{"ncclCommInitRankConfig", &a.initRankConfig}, {"ncclCommGetAsyncError", &a.getAsyncError},
		{"ncclCommAbort", &a.abort}, {"ncclCommFinalize", &a.finalize}, {"ncclCommDestroy", &a.destroy},
		{"ncclAllReduce", &a.allReduce}, {"ncclBroadcast", &a.broadcast}, {"ncclAllGather", &a.allGather},
		{"ncclReduceScatter", &a.reduceScatter}, {"ncclGroupStart", &a.groupStart}, {"ncclGroupEnd", &a.groupEnd},
	}
}

func (a *api) optional() []dlopen.Symbol {
	return []dlopen.Symbol{
		{"ncclCommInitRankScalable", &a.initRankScalable}, {"ncclCommShrink", &a.shrink}, {"ncclCommRevoke", &a.revoke},
		{"ncclCommGetUniqueId", &a.growID}, {"ncclCommGrow", &a.grow},
	}
}

// Library is NCCL, loaded. Its methods may be called on any thread.
type Library struct {
	api
	path    string
	version Version
	lacks   []string
}

// loaded has the libraries of this process, by path. They are never unloaded.
var loaded struct {
	mu  sync.Mutex
	all map[string]*Library
}

// Load returns the library at a path, or with a name that the system's linker finds; libnccl.so.2
// if path is empty. The error says why the library cannot be used, such as a function that it
// lacks. After a failure, the next call tries again.
func Load(path string) (*Library, error) {
	if path == "" {
		path = defaultLibrary
	}
	loaded.mu.Lock()
	defer loaded.mu.Unlock()
	if l := loaded.all[path]; l != nil {
		return l, nil
	}
	handle, err := dlopen.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", errUnavailable, err)
	}
	l := &Library{path: path}
	if err := l.bind(handle); err != nil {
		return nil, fmt.Errorf("%w: %s %w", errUnavailable, path, err)
	}
	if loaded.all == nil {
		loaded.all = make(map[string]*Library)
	}
	loaded.all[path] = l
	return l, nil
}

// bind finds the functions and reads the version.
func (l *Library) bind(handle uintptr) error {
	if missing, _ := dlopen.Bind(handle, []dlopen.Symbol{{"ncclGetVersion", &l.getVersion}}); missing != nil {
		return errors.New("has no ncclGetVersion: it is not NCCL")
	}
	var code int32
	if r := l.getVersion(&code); r != success {
		return fmt.Errorf("does not return its version: %v", r)
	}
	l.version = Version(code)
	if l.version < oldest {
		return fmt.Errorf("is version %v; %v is the oldest that can be used", l.version, oldest)
	}
	if missing, _ := dlopen.Bind(handle, l.required()); missing != nil {
		return fmt.Errorf("is version %v, but lacks %s", l.version, strings.Join(missing, ", "))
	}
	l.lacks, _ = dlopen.Bind(handle, l.optional())
	return nil
}

// Version returns the version that the library reports.
func (l *Library) Version() Version { return l.version }

// Path returns the path from which the library was loaded.
func (l *Library) Path() string { return l.path }

// Lacks returns the C names of the functions that later versions have and this one lacks.
func (l *Library) Lacks() []string { return l.lacks }

// CanShrink reports whether the library supports [Comm.Shrink].
func (l *Library) CanShrink() bool { return l.shrink != nil }

// CanRevoke reports whether the library supports [Comm.Revoke].
func (l *Library) CanRevoke() bool { return l.revoke != nil }

// CanGrow reports whether the library supports [Comm.GrowID], [Comm.Grow] and [Library.Join].
func (l *Library) CanGrow() bool { return l.growID != nil && l.grow != nil }

// NewID returns the ID of a new communicator. This process must run until the other ranks have made
// the communicator.
func (l *Library) NewID() (ID, error) {
	id := new(ID)
	err := l.check("ncclGetUniqueId", l.getUniqueID(id), 0)
	return *id, err
}

// Group combines the calls that f makes into one operation. f runs on the caller's thread.
func (l *Library) Group(f func() error) error {
	if err := l.check("ncclGroupStart", l.groupStart(), 0); err != nil {
		return err
	}
	return errors.Join(f(), l.check("ncclGroupEnd", l.groupEnd(), 0))
}
