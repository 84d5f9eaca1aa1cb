// Package cuda computes together on memory of NVIDIA GPUs: devices, streams, events and memory
// through CUDA's driver API, kernels that combine vectors on the device with the bits of
// internal/kernel, and the collectives of package collective on device memory. A program that
// imports it builds without CUDA: the driver's library is loaded by the first [Open] or [Devices],
// without cgo. On a machine without it they return [ErrUnavailable], and everything else works.
//
// The primary context of a device is used, the one that other libraries of the process use as well:
// their memory is used by [Wrap], their streams by [WrapStream]. Every [Device] has an operating
// system's thread of its own on which it calls the driver and polls what it has begun; no call
// blocks in the driver until the device is done.
//
// The program's own kernels are loaded as PTX by [Device.Load] and put into streams by
// [Function.Launch]; [Options].After makes a collective wait for them.
//
// At its first collective the ranks of a group choose a backend together ([Config].Backend). Where
// all have NVIDIA's library for it, NCCL, they make a communicator in the background, and use it as
// soon as all have it. Until then, and without NCCL, the memory of devices of one host is opened in
// all processes (CUDA IPC) and one kernel of each rank combines a part of the vector, reading all
// vectors and writing to all. With several hosts the ranks of each do so, and the owners of a part
// exchange it through pinned memory. Otherwise data is staged: pieces go through pinned memory that
// the ranks of a host share, while one is reduced by the group the next is on its way from the
// device and the last on its way back.
//
// The group detects the loss of a rank, not NCCL: every other rank ends what is under way, and
// makes the communicator of the next world from the old one where the version can do that, or else
// a new one. Groups of the same ranks that are used at the same time, such as by [AllReduce] and
// [AllReduceAsync], have one communicator each, and the device needs room for NCCL's kernels of
// both.
//
// What a group takes of its device is given back in the next generation, or by [Device.Close], also
// where it is a subset that is closed before: a stream and an event, a communicator of NCCL, and
// 64 MiB where vectors are not memory of [Alloc] and the ranks open each other's. A program makes
// its subsets once in a generation, not once in a step.
package cuda
