package shm

import "unsafe"

// streamLines copies n bytes, whole lines and at least one, to dst, which begins a line, past the
// caches.
//
//go:noescape
func streamLines(dst, src unsafe.Pointer, n uintptr)

// stream is copy past the caches.
func stream(dst, src []byte) int {
	n := min(len(dst), len(src))
	head := int(-uintptr(unsafe.Pointer(unsafe.SliceData(dst))) % line)
	body := (n - head) &^ (line - 1)
	if body <= 0 {
		return copy(dst, src)
	}
	copy(dst[:head], src)
	streamLines(unsafe.Pointer(&dst[head]), unsafe.Pointer(&src[head]), uintptr(body))
	copy(dst[head+body:n], src[head+body:n])
	return n
}
