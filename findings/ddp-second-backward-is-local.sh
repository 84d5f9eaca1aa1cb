#!/bin/bash
# torch 2.14.1, DistributedDataParallel: if two backward passes follow two forward passes, the gradient of the second is not averaged, so
# the ranks' weights diverge without an error. They also diverge with an optimizer that steps in the backward pass, as in PyTorch's
# tutorial: its hook runs before the average. Guess: both gradients are averaged, or an error is raised.
. "$(dirname "$0")/debian.bash"
packages python3-torch
cat > w.py <<'PY'
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
def train(name, steps):
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps(model, optimizer, torch.tensor([[1.0 + rank]]))
    print(f"{name}: rank {rank} has {net.weight.item()}", flush=True)
def each_at_once(model, optimizer, x):
    for factor in 1, 10:
        model(factor * x).sum().backward()
    optimizer.step()
def forwards_first(model, optimizer, x):
    for loss in [model(factor * x).sum() for factor in (1, 10)]:
        loss.backward()
    optimizer.step()
def step_in_backward(model, optimizer, x):
    def step(parameter):
        optimizer.step()
        optimizer.zero_grad()
    model.module.weight.register_post_accumulate_grad_hook(step)
    model(x).sum().backward()
train("forward, backward, forward, backward", each_at_once)
train("forward, forward, backward, backward", forwards_first)
train("step in the backward pass", step_in_backward)
os._exit(0)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
for rank in 0 1; do sid python3 -W ignore w.py $rank > out$rank 2> err$rank & done; wait; cat out0 out1 | grep ': rank' | sort | tee out
[ "$(wc -l < out)" = 6 ] || { tail -n 3 err0; tail -n 3 err1; exit 2; }
differ() { [ "$(grep "^$1:" out | sed 's/.* has //' | sort -u | wc -l)" = 2 ]; }
! differ "forward, backward, forward, backward" && differ "forward, forward, backward, backward" && differ "step in the backward pass"
