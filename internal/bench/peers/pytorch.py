#!/usr/bin/env python3
"""The collectives of torch.distributed with gloo: pytorch.py OP SECONDS SIZES [RANKS EMPTY_FOLDER]

With RANKS the program starts its own ranks, on 127.0.0.1, which meet in the folder; else it is the
rank that the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say. "prepare PATH" copies it
to the path if torch is there. Samples are taken by the rule of measure.h.
"""
import math
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta

os.environ.update(OMP_NUM_THREADS="1", USE_LIBUV="0")

MIN_SAMPLES, MAX_SAMPLES = 10, 20000


def operation(op, dist, x):
    if op == "allreduce":
        return lambda: dist.all_reduce(x)
    if op == "broadcast":
        return lambda: dist.broadcast(x, 0)
    return dist.barrier


def verify(op, torch, dist, rank, n, x):
    """Runs once on numbers whose result is known, and zeroes them."""
    pattern = torch.arange(x.numel(), dtype=torch.int64).remainder_(7).float()
    x.copy_(pattern + (rank + 1))
    operation(op, dist, x)()
    want = pattern * n + n * (n + 1) // 2 if op == "allreduce" else pattern + 1
    if op != "barrier" and not torch.equal(x, want):
        sys.exit(f"rank {rank}: the result is wrong at {4 * x.numel()} bytes")
    x.zero_()


def samples(seconds, torch, dist, run):
    """Returns the times of as many operations as fit, in seconds."""
    clock, batch, n = time.perf_counter, 3, 0
    while n == 0:
        took = clock()
        for _ in range(batch):
            run()
        took = torch.tensor([max(clock() - took, 1e-9)], dtype=torch.float64)
        dist.broadcast(took, 0)
        if took.item() >= seconds / 20 or batch >= MAX_SAMPLES:
            n = min(max(int(seconds * batch / took.item()), MIN_SAMPLES), MAX_SAMPLES)
        batch *= 2
    times = [0.0] * n
    dist.barrier()
    for i in range(n):
        begun = clock()
        run()
        times[i] = clock() - begun
    return times


def rank_main(op, seconds, sizes, rank, n, method):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=n, timeout=timedelta(seconds=120))
    for size in sizes:
        x = torch.empty(size // 4)
        verify(op, torch, dist, rank, n, x)
        us = torch.tensor(samples(seconds, torch, dist, operation(op, dist, x)), dtype=torch.float64) * 1e6
        dist.all_reduce(us, op=dist.ReduceOp.MAX)
        if rank == 0:
            us = sorted(us.tolist())
            k = len(us)
            median = (us[(k - 1) // 2] + us[k // 2]) / 2
            print(f"{size}\t{k}\t{us[0]:.3f}\t{median:.3f}\t{us[max(0, math.ceil(0.99 * k) - 1)]:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    if sys.argv[1:2] == ["prepare"]:
        import torch.distributed  # noqa: F401

        shutil.copyfile(__file__, sys.argv[2])
        return os.chmod(sys.argv[2], 0o700)
    op, seconds, sizes = sys.argv[1], float(sys.argv[2]), [int(s) for s in sys.argv[3].split(",")]
    if "TORCH_PEER_RANK" in os.environ:
        n, folder = int(sys.argv[4]), sys.argv[5]
        return rank_main(op, seconds, sizes, int(os.environ["TORCH_PEER_RANK"]), n, f"file://{folder}/store")
    if len(sys.argv) == 4:
        return rank_main(op, seconds, sizes, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = [subprocess.Popen([sys.executable] + sys.argv, env=dict(os.environ, TORCH_PEER_RANK=str(r)))
             for r in range(int(sys.argv[4]))]
    bad = 0
    while ranks and not bad:
        for p in list(ranks):
            try:
                bad = bad or abs(p.wait(0.05))
                ranks.remove(p)
            except subprocess.TimeoutExpired:
                pass
    for p in ranks:
        p.kill()  # they would wait for the one that failed
    return bad


if __name__ == "__main__":
    sys.exit(main())
