package shm

import "unsafe"

// streamLines copies n bytes, bypassing the caches. n is a positive multiple of the size of a cache
// line, and dst is at the beginning of a line.
//
//go:noescape
func streamLines(dst, src unsafe.Pointer, n uintptr)

// stream copies like the builtin copy, but bypasses the caches.
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
