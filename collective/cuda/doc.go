// Package cuda computes together on memory of NVIDIA GPUs: devices, streams, events and memory through CUDA's driver API, kernels that
// combine vectors on the device with the bits of collective/kernel, and the collectives of package collective on what is
// there. Nothing of CUDA is needed to build a program that imports it: the driver's library is loaded by the first [Open] or
// [Devices], without cgo. A machine without one gets [ErrUnavailable] from these and loses nothing else.
//
// The primary context of a device is used, the one that other libraries of the process use as well: their memory enters by
// [Wrap], their streams by [WrapStream]. Every [Device] has an operating system's thread of its own on which it calls the
// driver and looks after what it has begun; no call blocks in the driver until the device is done.
//
// A collective takes one of two ways, which the ranks of a group agree on at the first. On one host the devices' memory is
// opened in all processes (CUDA IPC) and one kernel of each rank combines a part of the vector: from all, to all. Otherwise it
// is staged: pieces go through pinned memory that the ranks of a host share, while one is reduced by the group
// the next is on its way from the device and the last on its way back.
package cuda
