// Package written finds out which memory of this process has been written to, without reading it.
//
// The memory is registered with the kernel for asynchronous write protection (userfaultfd with
// UFFD_FEATURE_WP_ASYNC, Linux 6.7 or newer; needs no privilege). The first write to a page of it
// then costs a fault that the kernel resolves by itself, about 0.8 µs, and that it remembers; the
// ioctl PAGEMAP_SCAN reads what it remembers, 4 µs for a thousand pages that nobody has written to,
// and protects pages anew.
//
// What it sees are writes that go through this process's page tables, whoever makes them: its own,
// those of the kernel for it, as read(2) does, and those of other processes by process_vm_writev or
// ptrace. Pages that are given back and come anew, that are swapped out, moved to elsewhere in
// memory or made huge are, where that leaves doubt, told as written to. What it does not see are
// writes by devices, and by the kernel for them, to pages that were pinned before they were
// protected: cuMemHostRegister, RDMA, io_uring's fixed buffers. And memory that other processes
// have mapped too is written to through tables of theirs; such memory, files and what somebody else
// watches are refused.
package written

import (
	"errors"
	"os"
	"sync"
	"unsafe"
)

// MostMemories is how many pieces of memory one Watcher watches: each takes up to two of the 65,530
// mappings that a process may have.
const MostMemories = 4096

// leastPages is how many pages are worth asking the system for.
const leastPages = 16

// span is some addresses.
type span struct{ from, to uintptr }

// Watcher watches memory of this process. One goroutine at a time uses it and its Memories.
type Watcher struct {
	kernel  *kernel
	page    uintptr
	spans   map[span]struct{} // that are registered
	closing sync.Once
}

// Open returns a Watcher of nothing yet. It fails where the system cannot tell of writes, or a
// sandbox does not let it.
func Open() (*Watcher, error) {
	k, err := open()
	if err != nil {
		return nil, err
	}
	return &Watcher{kernel: k, page: uintptr(os.Getpagesize()), spans: make(map[span]struct{})}, nil
}

// Close ends it, and the watch over all memory.
func (w *Watcher) Close() { w.closing.Do(w.kernel.close) }

// Watch begins to watch pieces of memory, each in chunks of so many bytes; all of them count as
// written to until the second Scan. Who has a Memory keeps its bytes from being freed. In the place
// of those that cannot be watched it returns nil, and why.
func (w *Watcher) Watch(memory [][]byte, chunk int) ([]*Memory, []error) {
	all, errs := make([]*Memory, len(memory)), make([]error, len(memory))
	free, err := private()
	for i, b := range memory {
		if errs[i] = err; err == nil {
			all[i], errs[i] = w.watch(b, chunk, free)
		}
	}
	return all, errs
}

var (
	errSmall    = errors.New("too small to be worth it")
	errNotOurs  = errors.New("it is a file's, or other processes write to it too")
	errOverlaps = errors.New("it is watched already")
	errMany     = errors.New("too many are watched")
)

func (w *Watcher) watch(b []byte, chunk int, free []span) (*Memory, error) {
	from := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	pages := span{(from + w.page - 1) &^ (w.page - 1), (from + uintptr(len(b))) &^ (w.page - 1)}
	if pages.to < pages.from+leastPages*w.page {
		return nil, errSmall
	}
	if len(w.spans) >= MostMemories {
		return nil, errMany
	}
	ours := false
	for _, f := range free {
		ours = ours || f.from <= pages.from && pages.to <= f.to
	}
	if !ours {
		return nil, errNotOurs
	}
	// Two would each take from the other what it has not seen. The kernel refuses only what another
	// Watcher has.
	for s := range w.spans {
		if s.from < pages.to && pages.from < s.to {
			return nil, errOverlaps
		}
	}
	if err := w.kernel.register(pages); err != nil {
		return nil, err
	}
	m := &Memory{watcher: w, bytes: b, base: from, pages: pages, size: chunk}
	for at := 0; at < len(b); at += chunk {
		m.chunks = append(m.chunks, state{changed: true})
	}
	if err := w.kernel.scan(pages, false, func(span) {}); err != nil { // an older kernel says no only now
		w.kernel.unregister(pages)
		return nil, err
	}
	w.spans[pages] = struct{}{}
	return m, nil
}
