# Times AllReduces of float32 over NCCL through PyTorch, with one process per rank. Prints one line of JSON: the measurements,
# or the reason why there are no measurements.
import json, os, sys, time


def rank_main(rank, size, devices, store, sizes, out):
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(rank % devices)
    dist.init_process_group("nccl", init_method="file://" + store, rank=rank, world_size=size)
    found = []
    for n in sizes:
        v = torch.ones(n // 4, dtype=torch.float32, device="cuda")
        for _ in range(5):
            dist.all_reduce(v)
            v.fill_(1)
        dist.all_reduce(v)
        if float(v[-1]) != size:
            raise SystemExit("the sum of %d ones is %g" % (size, float(v[-1])))
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            began = time.perf_counter()
            dist.all_reduce(v)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            v.fill_(1)
        times.sort()
        found.append({"Bytes": n, "Median": times[len(times) // 2], "Worst": times[-1]})
    if rank == 0:
        with open(out, "w") as f:
            json.dump(found, f)
    dist.destroy_process_group()


def nccl_version():
    """Returns the version of the loaded library, which can differ from the one that PyTorch was built with."""
    import ctypes
    import torch
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10000, number.value % 10000 // 100, number.value % 100
    except (OSError, AttributeError):
        pass
    return tuple(torch.cuda.nccl.version())


def main():
    folder, sizes = sys.argv[1], [int(n) for n in sys.argv[2].split(",")]
    try:
        import torch
        import torch.distributed as dist
    except ImportError as e:
        return {"Skip": "there is no PyTorch: %s" % e}
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return {"Skip": "this PyTorch has no CUDA or no NCCL"}
    devices, version = torch.cuda.device_count(), nccl_version()
    size = 2
    if devices < 2:
        if version < (2, 30):
            return {"Skip": "its NCCL %s allows one rank a GPU, and there is one GPU" % ".".join(map(str, version))}
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        os.environ.setdefault("NCCL_MAX_CTAS", "8")
    out = os.path.join(folder, "times.json")
    torch.multiprocessing.spawn(rank_main, (size, devices, os.path.join(folder, "store"), sizes, out), nprocs=size)
    with open(out) as f:
        return {"Ranks": size, "Devices": min(size, devices), "Version": ".".join(map(str, version)), "Speeds": json.load(f)}


if __name__ == "__main__":
    print(json.dumps(main()))
