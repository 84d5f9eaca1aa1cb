// Package dirtypages detects which memory of this process has been written to, without reading it.
// Open returns a Watcher; its Watch starts watching memory, and Memory.Scan finds the changes.
//
// It registers memory with the kernel for asynchronous write protection (userfaultfd with
// UFFD_FEATURE_WP_ASYNC, Linux 6.7 or newer, unprivileged). The first write to a protected page
// costs a fault of about 0.8 µs that the kernel resolves and records. The ioctl PAGEMAP_SCAN reads
// these records, in 4 µs for a thousand unmodified pages, and protects pages again.
//
// It detects all writes through this process's page tables: the program's, those of the kernel for
// it, as in read(2), and those of other processes by process_vm_writev or ptrace. Pages that are
// freed and mapped again, swapped out, migrated or merged into huge pages count as written to if in
// doubt. It does not detect writes by devices, or by the kernel on their behalf, to pages that were
// pinned before they were protected: cuMemHostRegister, RDMA, fixed buffers of io_uring. It refuses
// to watch shared memory, which other processes write through their own page tables, files, and
// memory that is already registered.
package dirtypages

import (
	"errors"
	"os"
	"sync"
	"unsafe"
)

// mostMemories is the maximum number of Memories of a Watcher. Each uses up to two of the 65,530
// mappings of a process.
const mostMemories = 4096

// leastPages is the minimum size that is worth a system call.
const leastPages = 16

// span is a range of addresses.
type span struct{ from, to uintptr }

// Watcher watches memory of this process. It and its Memories must be used by one goroutine at a
// time.
type Watcher struct {
	kernel  *kernel
	page    uintptr
	spans   map[span]struct{} // registered
	closing sync.Once
}

// Open returns a Watcher without memory. It fails if the kernel does not support watching or a
// sandbox forbids it.
func Open() (*Watcher, error) {
	k, err := open()
	if err != nil {
		return nil, err
	}
	return &Watcher{kernel: k, page: uintptr(os.Getpagesize()), spans: make(map[span]struct{})}, nil
}

// Close stops watching all memory. It may be called again.
func (w *Watcher) Close() { w.closing.Do(w.kernel.close) }

// Watch starts watching each range of memory, in chunks of the given number of bytes. All chunks
// count as changed until the second Scan. A Memory keeps its bytes reachable. For each range that
// cannot be watched it returns nil and an error.
func (w *Watcher) Watch(memory [][]byte, chunk int) ([]*Memory, []error) {
	return w.watchAll(memory, chunk, false)
}

// WatchCalm is like Watch, for memory that may be written to all the time. It protects the pages of
// a chunk only after Keep has reported for several copies in a row that the chunk has not changed.
// Until then the chunk counts as changed, and writes to it cost nothing.
func (w *Watcher) WatchCalm(memory [][]byte, chunk int) ([]*Memory, []error) {
	return w.watchAll(memory, chunk, true)
}

func (w *Watcher) watchAll(memory [][]byte, chunk int, calm bool) ([]*Memory, []error) {
	all, errs := make([]*Memory, len(memory)), make([]error, len(memory))
	free, err := private()
	for i, b := range memory {
		if errs[i] = err; err == nil {
			all[i], errs[i] = w.watch(b, chunk, free, calm)
		}
	}
	return all, errs
}

var (
	errSmall    = errors.New("it is too small")
	errNotOurs  = errors.New("it is a file mapping or shared with other processes")
	errOverlaps = errors.New("it is already watched")
	errMany     = errors.New("too many memory ranges are watched")
)

func (w *Watcher) watch(b []byte, chunk int, free []span, calm bool) (*Memory, error) {
	from := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	pages := span{(from + w.page - 1) &^ (w.page - 1), (from + uintptr(len(b))) &^ (w.page - 1)}
	if pages.to < pages.from+leastPages*w.page {
		return nil, errSmall
	}
	if len(w.spans) >= mostMemories {
		return nil, errMany
	}
	ours := false
	for _, f := range free {
		ours = ours || f.from <= pages.from && pages.to <= f.to
	}
	if !ours {
		return nil, errNotOurs
	}
	// Two registrations would clear each other's records. The kernel refuses overlaps only with
	// another Watcher.
	for s := range w.spans {
		if s.from < pages.to && pages.from < s.to {
			return nil, errOverlaps
		}
	}
	if err := w.kernel.register(pages); err != nil {
		return nil, err
	}
	m := &Memory{watcher: w, bytes: b, base: from, pages: pages, size: chunk, calm: calm}
	first := watched
	if calm {
		first = resting
	}
	for at := 0; at < len(b); at += chunk {
		m.chunks = append(m.chunks, state{changed: true, mode: first})
	}
	if err := w.kernel.scan(pages, false, func(span) {}); err != nil { // older kernels report the missing support only here
		w.kernel.unregister(pages)
		return nil, err
	}
	w.spans[pages] = struct{}{}
	return m, nil
}
