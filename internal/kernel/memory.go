package kernel

import "unsafe"

// Bytes returns the memory of data, without a copy; nil if data is empty. Elements are in the byte
// order of the machine.
func Bytes[T any](data []T) []byte {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(data[0])))
}

// Elements is the inverse of Bytes. It returns as many whole elements as b has. b must be aligned
// for T.
func Elements[T any](b []byte) []T {
	size := int(unsafe.Sizeof(*new(T)))
	if len(b) < size {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/size)
}
