// Package cuda runs the collectives of package collective on memory of NVIDIA GPUs. It provides
// devices, streams, events and memory through CUDA's driver API, kernels that combine vectors on
// the device with the bits of internal/kernel, and the collectives. A program that imports it
// builds without CUDA: the driver's library is loaded by the first [Open] or [Devices], without
// cgo. On a machine without the driver, these return [ErrUnavailable], and everything else works.
//
// The package uses the primary context of a device, as other libraries of the process do: [Wrap]
// makes their memory usable, and [Device.WrapStream] their streams. Every [Device] has an operating
// system thread that polls events; no call blocks in the driver until the device is done.
//
// A program loads its own kernels as PTX by [Device.Load] and launches them in streams by
// [Function.Launch]; [Options].After makes a collective wait for them.
//
// # Collectives
//
// Every rank of a group calls each collective with the same arguments, except for the data, and in
// the same order, also relative to operations of package collective. A call blocks until the result
// is complete on this rank's device; work launched afterwards in any stream sees it. An error on
// one rank's device ends the group on all ranks: that rank gets the error, and the others an error
// that matches [collective.ErrAborted].
//
// At its first collective the ranks of a group choose a backend together ([Config].Backend). If all
// ranks have NVIDIA's library for collectives, NCCL, they make a communicator in the background,
// and use it as soon as all have it. Until then, and without NCCL, the processes of one host open
// each other's device memory (CUDA IPC), and one kernel of each rank combines a part of the
// vectors: it reads all vectors and writes to all. With several hosts, the ranks of each host do
// the same, and the owners of a part exchange it through pinned memory. Otherwise data is staged:
// it is copied in pieces through pinned memory that the ranks of a host share. While the group
// reduces one piece, the next is copied from the device and the previous one back to the device.
//
// The group, not NCCL, detects the loss of a rank: every other rank ends the operations in
// progress, and makes the communicator of the next world from the old one if the version of NCCL
// supports that, or else a new one. Groups of the same ranks that are used at the same time, such
// as by [AllReduce] and [AllReduceAsync], have one communicator each, and the device needs room for
// NCCL's kernels of both.
//
// What a group uses on its device is released in the next generation, or by [Device.Close], even if
// the group is a subset that is closed earlier: a stream and an event, a communicator of NCCL, and
// 64 MiB if ranks open each other's memory but vectors are not from [Alloc]. So a program should
// make its subsets once in a generation, not in each step.
package cuda
