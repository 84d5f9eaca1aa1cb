#!/usr/bin/python3
"""Trains nothing: each step is an all-reduce of 1 MiB with gloo and a pause of 10 ms.

worker.py LOG STEPS [RANK STEP]

Appends a line for each event to LOG: time, event, pid, rank, world, restart, step, separated by tabs.
Before the first restart, RANK sends itself SIGKILL after its STEP.
"""
import os
import signal
import sys
import time

RESTART = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
OUT = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def tell(event, step=-1):
    fields = (f"{time.time():.6f}", event, os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"], RESTART, step)
    os.write(OUT, ("\t".join(map(str, fields)) + "\n").encode())


tell("start")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("gloo")
tensor = torch.ones(1 << 18)
for step in range(int(sys.argv[2])):
    dist.all_reduce(tensor)
    tell("step", step)
    if RESTART == "0" and sys.argv[3:] == [os.environ["RANK"], str(step)]:
        tell("kill", step)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
dist.barrier()
