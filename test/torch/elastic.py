#!/usr/bin/python3
"""Runs a meaningless training under hvdrun and checks each step: elastic.py LEDGER STEPS [WAY...]

Appends lines to LEDGER as ledger.py describes. The gradient of a step is the mean of 1 + index over the samples of the step, which
cannot vanish, and each rank compares it. WAY are any of:

  plain       no DistributedDataParallel: one flat buffer
  buffers     a BatchNorm, whose number of batches must equal that of the steps
  static      static_graph
  unused      find_unused_parameters, with a layer that is not used in odd steps
  accumulate  two passes per step, the first within no_sync
  amp         bfloat16 where autocast says so, and a GradScaler
  compile     a model that torch.compile has compiled, by the inductor
  adam        Adam and a scheduler in place of SGD
  loader      samples by the worker processes of a DataLoader
  slow        10 ms of pause in each step
  paced       50 ms for each step
  groups      another process group in each world
  sendrecv    each rank sends a number to the next in each step
  large       256 MB of additional state; the rank that sends them dies in the middle if there is a file LEDGER.dies
  hvdrun      the backend hvdrun in place of gloo
  nccl        NCCL in place of gloo, and tensors on the GPU
  gpu         tensors on the GPU

It ends after STEPS, or earlier if there is a file LEDGER.stop. The process whose PID is in the file LEDGER.hang hangs, and the one
whose PID is in LEDGER.within kills itself between the two passes.
"""
import contextlib
import os
import signal
import sys
import threading
import time

import hvdrun.torch as hvd
import torch
import torch.distributed as dist
from ledger import SAMPLES, Steps, tell
from torch import nn

torch.set_num_threads(1)
TOTAL, WAYS = int(sys.argv[2]), set(sys.argv[3:])
SIDE = 256  # of the layers, so that a step sends a megabyte


class Net(nn.Module):
    """The gradient of scale is the mean of the samples, whatever the weights are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1))
        self.layers = nn.Sequential(*[nn.Linear(SIDE, SIDE) for _ in range(4)])
        self.unused = nn.Linear(SIDE, 1) if WAYS & {"static", "unused"} else None
        self.norm = nn.BatchNorm1d(SIDE) if "buffers" in WAYS else nn.Identity()

    def forward(self, x, extra):
        rows = x.unsqueeze(1).expand(-1, SIDE) * 1e-3
        deep = self.layers(self.norm(rows)).sum(1) * 1e-6
        loss = self.scale * x + deep - deep.detach()
        if extra:
            other = self.unused(rows).sum(1)
            loss = loss + other - other.detach()
        return loss


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return 1.0 + i


class Large:
    def __init__(self):
        self.tensor = torch.zeros(1 << 26)

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, values):
        self.tensor.copy_(values["tensor"])


def broadcast(tensor, src, group=None, broadcast=dist.broadcast):
    """Replaces dist.broadcast. Kills this process in the middle of Large's message, if this rank sends it."""
    size = tensor.numel() * tensor.element_size()  # torch 1.13 has no nbytes
    if src == dist.get_rank() and size >= 1 << 28 and os.path.exists(sys.argv[1] + ".dies"):
        tell("dies", generation=job.generation)
        threading.Thread(target=die_while_sending, args=[size // 2]).start()
    return broadcast(tensor, src, group)


def die_while_sending(after):
    """Kills this process when it has written this many more bytes (after)."""
    def written():
        with open("/proc/self/io") as f:
            return int(f.read().split("wchar:")[1].split()[0])

    after += written()
    while written() < after:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def meant(suffix):
    """Returns whether a file beside the ledger contains this process's PID."""
    try:
        with open(sys.argv[1] + suffix) as f:
            return f.read() == str(os.getpid())
    except FileNotFoundError:
        return False


def stand_still():
    """Hangs before the step."""
    while meant(".hang"):
        time.sleep(3600)


def pause(state, step, begun):
    """Sleeps for the rest of a step that began at begun, unless the step failed: that is repeated at once."""
    if state.step == step.number:
        return
    if "slow" in WAYS:
        time.sleep(0.01)
    if "paced" in WAYS:
        time.sleep(max(0, begun + 0.05 - time.monotonic()))


def pass_on():
    """Sends this rank's number to the next rank, and checks the one from the previous rank."""
    if job.size == 1 or "sendrecv" not in WAYS:
        return
    got = torch.empty(1)
    waits = [dist.isend(torch.tensor([float(job.rank)]), (job.rank + 1) % job.size), dist.irecv(got, (job.rank - 1) % job.size)]
    for wait in waits:
        wait.wait()
    assert got.item() == (job.rank - 1) % job.size, got


job = hvd.init(*(WAYS & {"hvdrun", "nccl"} or {"gloo"}))
DEVICE = "cuda" if WAYS & {"nccl", "gpu"} else "cpu"
STEPS = Steps(job)
tell("start")


@job.on_reset
def on_reset():
    if "groups" in WAYS:
        one = torch.ones(1)
        dist.all_reduce(one, group=dist.new_group())
        assert one.item() == job.size, one
    STEPS.world()


def plain():
    weights = torch.zeros(1 << 18, device=DEVICE)
    if "large" in WAYS:
        dist.broadcast = broadcast
    state = job.state(weights=weights, step=0, **({"large": Large()} if "large" in WAYS else {}))
    for step in STEPS.begin(state, TOTAL):
        begun = time.monotonic()
        with step:
            stand_still()
            grad = torch.full_like(weights, sum(1.0 + i for i in step.indices) / step.batch)
            dist.all_reduce(grad)
            pass_on()
            STEPS.part(step)
            mean = grad[-1].item()
            step.commit(lambda: weights.add_(grad))
            STEPS.made(step, mean)
        pause(state, step, begun)
    return weights.double().sum().item()


def wrapped():
    torch.manual_seed(os.getpid())  # the first world makes them equal
    net = Net().to(DEVICE)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3) if "adam" in WAYS else torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
    parts = {"scheduler": torch.optim.lr_scheduler.StepLR(opt, 7, 0.9)} if "adam" in WAYS else {}
    scaler, mixed = None, contextlib.nullcontext()
    if "amp" in WAYS:
        scaler, mixed = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=10), torch.autocast(DEVICE, dtype=torch.bfloat16)
        parts["scaler"] = scaler
    if "compile" in WAYS:
        net.compile()
    # Dynamo does not accept a bucket that is smaller than the first.
    ddp = {"bucket_cap_mb": 25 if "compile" in WAYS else 0.3, "static_graph": "static" in WAYS, "find_unused_parameters": "unused" in WAYS}
    state = job.state(model=net, optimizer=opt, step=0, ddp=ddp, **parts)
    data, loader = Numbers(), None
    for step in STEPS.begin(state, TOTAL):
        begun = time.monotonic()
        with step:
            stand_still()
            opt.zero_grad()
            if "loader" in WAYS:
                loader = iter(torch.utils.data.DataLoader(data, batch_sampler=[step.indices], num_workers=1,
                                                          multiprocessing_context="fork"))
                x = next(loader).float().to(DEVICE)
            else:
                x = torch.tensor([1.0 + i for i in step.indices], device=DEVICE)
            extra = "unused" in WAYS and step.number % 2 == 0
            halves = x.split([len(x) // 2, len(x) - len(x) // 2]) if "accumulate" in WAYS else (x,)
            for i, half in enumerate(halves):
                with state.model.no_sync() if i < len(halves) - 1 else contextlib.nullcontext():
                    with mixed:
                        loss = step.mean(state.model(half, extra))
                    (scaler.scale(loss) if scaler else loss).backward()
                if meant(".within"):
                    os.kill(os.getpid(), signal.SIGKILL)
            if scaler:
                scaler.unscale_(opt)
            pass_on()
            STEPS.part(step)
            mean = net.scale.grad.item()
            step.commit()
            STEPS.made(step, mean)
        pause(state, step, begun)
    if "buffers" in WAYS:
        assert net.norm.num_batches_tracked == state.step, (net.norm.num_batches_tracked, state.step)
    return sum(p.detach().double().sum().item() for p in net.parameters())


total = plain() if "plain" in WAYS else wrapped()
STEPS.end(total)
print(f"rank {job.rank} of {job.size} has made its steps", flush=True)
