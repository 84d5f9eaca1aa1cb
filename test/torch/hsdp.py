#!/usr/bin/python3
"""Runs a meaningless training under hvdrun, with a model that FSDP2 shards over the ranks of a host and replicates on each: hsdp.py LEDGER STEPS [hvdrun]

The ranks of a host are lost together: hvdrun's --failure-policy host. Shards and their optimizer state stay in their
processes, and new workers get them from a rank with the same local rank; the sharded model is created again in each world. It
appends lines to LEDGER as ledger.py describes.
"""
import sys
import time

import hvdrun.torch as hvd
import torch
import torch.distributed as dist
from ledger import Steps, tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
SIDE = 256


class Net(nn.Module):
    """The gradient of each scale is the mean of the samples, whatever the weights are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.layers = nn.Sequential(*[nn.Linear(SIDE, SIDE) for _ in range(4)])

    def forward(self, x):
        deep = self.layers(x.unsqueeze(1).expand(-1, SIDE) * 1e-3).sum(1) * 1e-6
        return self.scale.sum() * x + deep - deep.detach()


job = hvd.init(sys.argv[3] if len(sys.argv) > 3 else "gloo")
steps = Steps(job)
state = job.state(step=0, ddp=None)
net = opt = None
applied = -1  # the steps that this rank's shards have; -1: it has none
tell("start")


def local(t):
    return t.detach().to_local()


@job.on_reset
def anew():
    global net, opt, applied
    if applied == state.step - 1 >= 0:
        opt.step()  # another rank has applied it, so all have the gradients
        applied += 1
    mesh = init_device_mesh("cpu", (job.size // job.local_size, job.local_size), mesh_dim_names=("replica", "shard"))
    old, old_opt = net, opt
    torch.manual_seed(1)
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt_of = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
    for p in net.parameters():
        opt_of.state[p]["momentum_buffer"] = torch.zeros_like(p)
    pairs = [(p, opt_of.state[p]["momentum_buffer"]) for p in opt_of.param_groups[0]["params"]]
    if old is not None:
        for (p, m), q in zip(pairs, old_opt.param_groups[0]["params"]):
            local(p).copy_(local(q))
            local(m).copy_(local(old_opt.state[q]["momentum_buffer"]))
    opt = opt_of
    have = [torch.zeros(1, dtype=torch.int64) for _ in range(job.size)]
    dist.all_gather(have, torch.tensor([applied]))
    have = [h.item() for h in have]
    column = range(job.local_rank, job.size, job.local_size)
    assert max(have) < 0 or any(have[r] == state.step for r in column), (have, state.step)
    if max(have) >= 0 and min(have) != max(have):
        root = next(i for i, r in enumerate(column) if have[r] == state.step)
        for t in (t for pair in pairs for t in pair):
            dist.broadcast(local(t), group_src=root, group=mesh["replica"].get_group())
    applied = state.step
    steps.world()


for step in steps.begin(state, int(sys.argv[2])):
    with step:
        opt.zero_grad()
        step.mean(net(torch.tensor([1.0 + i for i in step.indices]))).backward()
        steps.part(step)
        means = local(opt.param_groups[0]["params"][0].grad).tolist()

        def update():
            global applied
            opt.step()
            applied += 1

        step.commit(update)
        steps.made(step, *means)
    time.sleep(0.01)
steps.end(sum(local(p).double().sum().item() for p in opt.param_groups[0]["params"]))
