#!/bin/bash
# torch 2.14.1: load_state_dict(..., assign=True) replaces the parameters of a model, and if DistributedDataParallel has wrapped the model, it
# does not average gradients of the new ones: the ranks' weights diverge without an error. Guess: it acts like a load that copies, or raises.
. "$(dirname "$0")/debian.bash"
packages python3-torch
cat > w.py <<'PY'
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
for assign in False, True:
    net = torch.nn.Linear(1, 1, bias=False)
    model = torch.nn.parallel.DistributedDataParallel(net)
    net.load_state_dict({"weight": torch.ones(1, 1)}, assign=assign)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([[1.0 + rank]])).sum().backward()
    optimizer.step()
    print(f"assign={assign}: rank {rank} has {net.weight.item()}", flush=True)
os._exit(0)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
for rank in 0 1; do sid python3 -W ignore w.py $rank > out$rank 2> err$rank & done; wait; cat out0 out1 | grep ': rank' | sort | tee out
[ "$(wc -l < out)" = 4 ] || { tail -n 3 err0; tail -n 3 err1; exit 2; }
[ "$(grep -c 'False: rank . has -0.5' out)" = 2 ] && grep -q 'True: rank 0 has 0.0' out && grep -q 'True: rank 1 has -1.0' out
