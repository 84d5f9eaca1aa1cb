#!/bin/bash
# torch 2.14.1, FSDP2 on CPUs: if a model on meta is initialised after fully_shard, with one seed on all ranks, all shards have the same rows;
# the only warning is about "complete support". If it is initialised before, with different seeds, it mixes the ranks' models, without a warning.
# Guess: the weights are those of one process with that seed; fully_shard broadcasts rank 0's, as DistributedDataParallel does.
. "$(dirname "$0")/debian.bash"
packages python3-torch
cat > w.py <<'PY'
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
def alone(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 4, bias=False)
with torch.device("meta"):
    late = torch.nn.Linear(3, 4, bias=False)
fully_shard(late, mesh=mesh)
late.to_empty(device="cpu")
torch.manual_seed(0)
late.reset_parameters()
early = alone(rank)
fully_shard(early, mesh=mesh)
a, b = late.weight.full_tensor(), early.weight.full_tensor()
if rank == 0:
    print("same seed, initialised after fully_shard: rows 0 and 1 equal rows 2 and 3", torch.equal(a[:2], a[2:]), "one process's", torch.equal(a, alone(0).weight))
    print("other seeds, initialised before: rows 0 and 1 are rank 0's", torch.equal(b[:2], alone(0).weight[:2]), "rows 2 and 3 are rank 1's", torch.equal(b[2:], alone(1).weight[2:]), flush=True)
dist.barrier()
os._exit(0)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
for rank in 0 1; do sid python3 w.py $rank > out$rank 2> err$rank & done; wait; grep seed out0 | tee out
echo "warnings: $(grep -ho 'UserWarning.*' err0 err1 | sort -u)"
[ "$(wc -l < out)" = 2 ] || { tail -n 3 err0; tail -n 3 err1; exit 2; }
grep -q '2 and 3 True .*False$' out && grep -q "0's True .* 1's True$" out
