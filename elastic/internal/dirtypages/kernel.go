package dirtypages

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants of include/uapi/linux/userfaultfd.h and fs.h of Linux 6.7.
const (
	uffdAPI        = 0xAA
	uffdUserMode   = 1       // UFFD_USER_MODE_ONLY of userfaultfd(2): needs no privilege
	uffdUnpopulate = 1 << 13 // UFFD_FEATURE_WP_UNPOPULATED: protects unpopulated pages too
	uffdAsync      = 1 << 15 // UFFD_FEATURE_WP_ASYNC: the kernel resolves and records write faults itself
	uffdProtect    = 1 << 1  // UFFDIO_REGISTER_MODE_WP

	scanProtect    = 1 << 0 // PM_SCAN_WP_MATCHING
	scanCheckAsync = 1 << 1 // PM_SCAN_CHECK_WPASYNC: fail if memory is not registered for WP_ASYNC
	pageIsWritten  = 1 << 1 // PAGE_IS_WRITTEN
)

// uffdioAPI is struct uffdio_api.
type uffdioAPI struct{ api, features, ioctls uint64 }

// uffdioRange is struct uffdio_range.
type uffdioRange struct{ start, length uint64 }

// uffdioRegister is struct uffdio_register.
type uffdioRegister struct {
	uffdioRange
	mode, ioctls uint64
}

// pmScanArg is struct pm_scan_arg.
type pmScanArg struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages    uint64
	categoryInverted, categoryMask, categoryAnyof, returnsMask uint64
}

// pageRegion is struct page_region.
type pageRegion struct{ start, end, categories uint64 }

var (
	ioctlAPI        = request(reads|writes, uffdAPI, 0x3f, unsafe.Sizeof(uffdioAPI{}))
	ioctlRegister   = request(reads|writes, uffdAPI, 0x00, unsafe.Sizeof(uffdioRegister{}))
	ioctlUnregister = request(reads, uffdAPI, 0x01, unsafe.Sizeof(uffdioRange{}))
	ioctlScan       = request(reads|writes, 'f', 16, unsafe.Sizeof(pmScanArg{}))
)

const writes, reads = 1, 2 // _IOC_WRITE and _IOC_READ on most architectures

// request returns the number of an ioctl, like the macro _IOC.
func request(direction, kind, number, size uintptr) uintptr {
	return direction<<30 | size<<16 | kind<<8 | number
}

// kernel holds the two files of the kernel interface.
type kernel struct {
	faults, pages int
	regions       []pageRegion // buffer of one scan; not empty
}

// open opens the kernel interface.
func open() (*kernel, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|uffdUserMode, 0, 0)
	if errno != 0 {
		return nil, fmt.Errorf("userfaultfd: %w", errno)
	}
	api := uffdioAPI{api: uffdAPI, features: uffdAsync | uffdUnpopulate}
	if err := ioctl(int(fd), ioctlAPI, unsafe.Pointer(&api)); err != nil {
		_ = unix.Close(int(fd))
		return nil, fmt.Errorf("userfaultfd, asynchronous write protection: %w", err)
	}
	pages, err := unix.Open("/proc/self/pagemap", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		_ = unix.Close(int(fd))
		return nil, fmt.Errorf("/proc/self/pagemap: %w", err)
	}
	return &kernel{faults: int(fd), pages: pages, regions: make([]pageRegion, 512)}, nil
}

// close closes the kernel interface, which ends all registrations.
func (k *kernel) close() {
	_ = unix.Close(k.pages)
	_ = unix.Close(k.faults)
}

// register registers pages. They count as written to until they are protected.
func (k *kernel) register(p span) error {
	r := uffdioRegister{uffdioRange: uffdioRange{uint64(p.from), uint64(p.to - p.from)}, mode: uffdProtect}
	if err := ioctl(k.faults, ioctlRegister, unsafe.Pointer(&r)); err != nil {
		return fmt.Errorf("userfaultfd, register: %w", err)
	}
	return nil
}

func (k *kernel) unregister(p span) {
	r := uffdioRange{uint64(p.from), uint64(p.to - p.from)}
	_ = ioctl(k.faults, ioctlUnregister, unsafe.Pointer(&r))
}

// scan calls found for each run of pages written to since they were protected, and protects them
// again if protect is set.
func (k *kernel) scan(p span, protect bool, found func(span)) error {
	var pin runtime.Pinner
	defer pin.Unpin()
	pin.Pin(&k.regions[0])
	arg := pmScanArg{
		flags: scanCheckAsync, start: uint64(p.from), end: uint64(p.to), vecLen: uint64(len(k.regions)),
		vec: uint64(uintptr(unsafe.Pointer(&k.regions[0]))), categoryMask: pageIsWritten, returnsMask: pageIsWritten,
	}
	arg.size = uint64(unsafe.Sizeof(arg))
	if protect {
		arg.flags |= scanProtect
	}
	for arg.start < arg.end {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(k.pages), ioctlScan, uintptr(unsafe.Pointer(&arg)))
		if errno != 0 {
			return fmt.Errorf("pagemap scan: %w", errno)
		}
		for _, r := range k.regions[:n] {
			found(span{uintptr(r.start), uintptr(r.end)})
		}
		if arg.walkEnd <= arg.start {
			return fmt.Errorf("pagemap scan: no progress at %#x", arg.start)
		}
		arg.start = arg.walkEnd
	}
	return nil
}

func ioctl(fd int, request uintptr, argument unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(argument)); errno != 0 {
		return errno
	}
	return nil
}

// private returns the private anonymous writable memory of this process, in address order.
func private() ([]span, error) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseMaps(f)
}

// parseMaps parses the format of proc_pid_maps(5).
func parseMaps(r io.Reader) (all []span, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		var from, to uintptr
		var access, offset, device, inode, name string
		n, err := fmt.Sscanf(lines.Text(), "%x-%x %s %s %s %s %s", &from, &to, &access, &offset, &device, &inode, &name)
		if n < 6 { // memory may have no name
			return nil, fmt.Errorf("/proc/self/maps: %q: %w", lines.Text(), err)
		}
		if len(access) != 4 || access[:2] != "rw" || access[3] != 'p' || inode != "0" || name != "" && name != "[heap]" && !strings.HasPrefix(name, "[anon:") {
			continue
		}
		if n := len(all); n > 0 && all[n-1].to == from {
			all[n-1].to = to
		} else {
			all = append(all, span{from, to})
		}
	}
	return all, lines.Err()
}
