#!/usr/bin/python3
"""A training with deaths, whose steps change all kinds of state: whole.py RESULTS MARKS [DEATH…]

DEATH is backward, commit or evaluation: a rank kills itself there once, each at another step. Each rank that reaches the end
appends the result of the training, which does not depend on the deaths, to RESULTS as a line of JSON.
"""
import json
import os
import signal
import sys

import hvdrun.torch as hvd
import torch
import torch.distributed as dist

torch.set_num_threads(1)
RESULTS, MARKS, DEATHS = sys.argv[1], sys.argv[2], sys.argv[3:]
AT = {"backward": (1, 7), "commit": (0, 13), "evaluation": (0, 10)}  # rank and step of a death
SAMPLES, BATCH, TOTAL = 24, 6, 20


def die(where, step):
    if where in DEATHS and (job.rank, step) == AT[where] and job.size > 1:
        try:
            os.close(os.open(MARKS + where, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Net(torch.nn.Module):
    """Its buffers count the applied passes, each with another idiom. Its gradient is the mean of the samples."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        for name in ("in_place", "by_data", "assigned"):
            self.register_buffer(name, torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            self.in_place += 1
            self.by_data.data += 1
            self.assigned = self.assigned + 1
        return self.weight * x


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return float(i), job.rank


job = hvd.init("gloo")
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=1.0)
ema = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda average, new, n: average * 0.5 + new * 0.5)
state = job.state(model=net, optimizer=opt, scheduler=torch.optim.lr_scheduler.StepLR(opt, 1, 0.5), ema=ema,
                  step=0, seen=0, log=[], history=torch.zeros(TOTAL))
lines, names = [], set()


@job.on_reset
def on_reset():
    assert os.environ.get("RANK", "0") == str(dist.get_rank()) == str(job.rank), (os.environ.get("RANK"), dist.get_rank(), job.rank)
    assert os.environ.get("WORLD_SIZE", "1") == str(dist.get_world_size()) == str(job.size)


def update(step):
    """The average of the weights is a part of the update, and so is the scheduler's step."""
    def call():
        opt.step()
        if step.ends_epoch:
            state.scheduler.step()
        ema.update_parameters(net)
    return call


def evaluate():
    sum_ = torch.tensor([float(job.rank)])
    dist.all_reduce(sum_)
    die("evaluation", state.step)
    assert sum_.item() == job.size * (job.size - 1) / 2, sum_
    dist.barrier()
    if job.rank == 0:
        names.add(state.step)


loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
for step in job.steps(state, total=TOTAL, batch=BATCH, evaluate=evaluate, every=5, data=loader, seed=3, more=True):
    with step:
        opt.zero_grad()
        state.seen += step.batch
        state.log.append(step.number)
        state.history[step.number] += 1
        values = step.data[0] if step.data is not None else torch.zeros(0)
        assert values.tolist() == [float(i) for i in step.indices], (values, step.indices)
        at = 0
        for micro in step.micro(2):
            x = values[at:at + len(micro.indices)].float()
            at += len(micro.indices)
            micro.mean(state.model(x)).backward()
        die("backward", step.number)
        step.commit(update(step))
        die("commit", step.number)
    if step.done:
        lines.append(step.number)


def last():
    all_of = [None] * job.size
    dist.all_gather_object(all_of, job.rank)
    return len(all_of)


assert job.together(state, last) == job.size
with open(RESULTS, "a") as f:
    f.write(json.dumps({
        "weight": round(net.weight.item(), 4), "buffers": [net.in_place.item(), net.by_data.item(), net.assigned.item()],
        "lr": opt.param_groups[0]["lr"], "seen": state.seen, "log": state.log == list(range(TOTAL)),
        "history": state.history.tolist() == [1.0] * TOTAL, "ema": round(ema.module.weight.item(), 4),
        "lines": lines == sorted(set(lines)) and lines[-1] == TOTAL - 1,
    }) + "\n")
