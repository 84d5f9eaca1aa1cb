#!/usr/bin/python3
"""Measures all_reduce of torch.distributed with the backends gloo and hvdrun, in turns: collectives.py [RANKS [ROUNDS]]

Prints the medians in µs, and how many times longer gloo takes: the median, minimum and maximum of the ratios of the rounds. It needs
hvdrun's module on PYTHONPATH, and HVD_LIBRARY.
"""
import multiprocessing
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from hvdrun import _backend

# Sizes in bytes, each with the number of calls of each backend in a round.
SIZES = ((4, 100, 500), (64 << 10, 50, 300), (1 << 20, 20, 100), (4 << 20, 8, 40), (64 << 20, 2, 6))


def measure(rank, ranks, rounds, store):
    _backend.register()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    groups = dist.group.WORLD, dist.new_group(backend="hvdrun")
    for size, *calls in SIZES:
        tensor = torch.zeros(size // 4)
        times = [], []
        for i in range(rounds + 1):
            for group, n, all_times in zip(groups, calls, times):
                dist.all_reduce(tensor, group=group)
                dist.barrier(group=group)
                start = time.perf_counter()
                for _ in range(n):
                    dist.all_reduce(tensor, group=group)
                if i > 0:
                    all_times.append((time.perf_counter() - start) / n * 1e6)
        if rank == 0:
            ratios = [a / b for a, b in zip(*times)]
            gloo, ours = map(statistics.median, times)
            print(f"{ranks} ranks, {size} B: gloo {gloo:.1f}, hvdrun {ours:.1f}, ratio {statistics.median(ratios):.1f} "
                  f"({min(ratios):.1f} to {max(ratios):.1f})", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        all_ranks = [context.Process(target=measure, args=(r, ranks, rounds, os.path.join(folder, "store"))) for r in range(ranks)]
        for process in all_ranks:
            process.start()
        for process in all_ranks:
            process.join()
