#!/usr/bin/python3
"""Two ranks, one of which has an error at step 5: errors.py MARK WAY

WAY is

  wrapped    rank 1 is killed, once, and the program wraps the error of the other
  own        the worker of slot 1 always raises its own error, whose text is like that of a connection
  after      the worker of slot 1 makes an invalid collective call after each commit, from step 5 on
  differs    the worker of slot 1 has another seed
  parts      each rank adds up its own gradients over two steps, which no rank averages before a commit
  no_sync    the same, within no_sync of the module
"""
import contextlib
import os
import signal
import sys
import time

import hvdrun.torch as hvd
import torch
import torch.distributed as dist

torch.set_num_threads(1)
MARK, WAY = sys.argv[1:]
SECOND = os.environ["HVD_SLOT"] == "1"


class TrainingError(Exception):
    pass


def add_up(step):
    """Adds up the gradients of the rank's samples over two steps."""
    with state.model.no_sync() if WAY == "no_sync" else contextlib.nullcontext():
        step.mean(state.model(torch.tensor(step.indices, dtype=torch.float32)[:, None].expand(-1, 4)).square().mean()).backward()
    if step.number % 2 == 0:
        return step.commit(lambda: None)
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= job.size
    step.commit(lambda: (opt.step(), opt.zero_grad()))


def pass_over(step):
    if WAY in ("parts", "no_sync"):
        return add_up(step)
    try:
        loss = step.mean(state.model(torch.ones(len(step.indices), 4)).mean())
        opt.zero_grad()
        loss.backward()
        step.commit()
    except Exception as err:
        raise TrainingError("the pass has failed") from err


job = hvd.init("gloo")
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
state = job.state(ddp=None if WAY == "parts" else {}, model=net, optimizer=opt, step=0)
for step in job.steps(state, total=20, batch=8, samples=80, seed=int(WAY == "differs" and SECOND)):
    with step:
        if step.number == 5 and WAY == "wrapped" and job.rank == 1 and not os.path.exists(MARK):
            open(MARK, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if step.number == 5 and WAY == "own" and SECOND:
            raise RuntimeError("connection to feature store lost")
        pass_over(step)
        if step.number >= 5 and WAY == "after" and SECOND:
            dist.all_gather([torch.zeros(1)] * (job.size + 1), torch.ones(1))
        time.sleep(0.02)
print(f"rank {job.rank} has made {state.step} steps", flush=True)
