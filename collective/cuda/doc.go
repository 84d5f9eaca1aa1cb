// Package cuda computes together on memory of NVIDIA GPUs: devices, streams, events and memory
// through CUDA's driver API, kernels that combine vectors on the device with the bits of
// collective/kernel, and the collectives of package collective on what is there. Nothing of CUDA is
// needed to build a program that imports it: the driver's library is loaded by the first [Open] or
// [Devices], without cgo. A machine without one gets [ErrUnavailable] from these and loses nothing
// else.
//
// The primary context of a device is used, the one that other libraries of the process use as well:
// their memory enters by [Wrap], their streams by [WrapStream]. Every [Device] has an operating
// system's thread of its own on which it calls the driver and looks after what it has begun; no
// call blocks in the driver until the device is done.
//
// Kernels of one's own are loaded as PTX by [Device.Load] and put into streams by
// [Function.Launch]; [Options].After has a collective wait for them.
//
// The ranks of a group choose together, at its first collective, by which backend they reach each
// other ([Config].Backend). Where all have NVIDIA's library for it, NCCL, they make a communicator
// in the background, and go by it from the operation on at which all have it. Until then, and where
// there is none, the memory of devices of one host is opened in all processes (CUDA IPC) and one
// kernel of each rank combines a part of the vector: from all, to all. With several hosts the ranks
// of each do so, and those that have a part exchange it through pinned memory. Otherwise it is
// staged: pieces go through pinned memory that the ranks of a host share, while one is reduced by
// the group the next is on its way from the device and the last on its way back.
//
// NCCL is told of a lost rank by the group: every other rank ends what is under way, and makes the
// communicator of the next world from the old one where the version can do that, or else a new one.
// Groups of the same ranks that are used at the same time, such as by [AllReduce] and
// [AllReduceAsync], have a communicator each, and NCCL needs room for the kernels of both on the
// device.
package cuda
