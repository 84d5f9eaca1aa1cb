#!/bin/bash
# gloo in torch 2.14.1: repeated all_reduces of True in two ranks give False at the eighth, since a byte wraps around; MAX of
# 1, NaN and 2 depends on the rank that has the NaN; an average of integers raises an error after it has changed the tensor.
# Guess: True; NaN, as torch.max gives; an error before the tensor changes.
. "$(dirname "$0")/debian.bash"
packages python3-torch
cat > w.py <<'PY'
import os, sys, torch, torch.distributed as dist
rank, size = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore("store%d" % size, size), rank=rank, world_size=size)
def of(t, op):
    try:
        dist.all_reduce(t, op)
    except RuntimeError as e:
        return "%s, then %s" % (str(e).split("\n")[0], t.tolist())
    return t.tolist()
said = ["%d ranks:" % size]
b = torch.tensor([True])
for n in range(8 if size == 2 else 1):
    last = of(b, dist.ReduceOp.SUM)
    said.append("sum %d of True %s" % (n + 1, last[0]))
if size == 3:
    for special in range(3):
        t = torch.tensor([[1.0, 2.0, 3.0][rank] if rank != special else float("nan")])
        said.append("MAX, NaN at rank %d: %s" % (special, of(t, dist.ReduceOp.MAX)[0]))
    said.append("AVG of integers 1, 2, 3: %s" % of(torch.tensor([rank + 1]), dist.ReduceOp.AVG))
if rank == 0:
    print("\n".join(said), flush=True)
os._exit(0)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
for n in 2 3; do for r in $(seq 1 $((n-1))); do sid python3 -W ignore w.py $r $n > /dev/null 2>&1 & done; sid python3 -W ignore w.py 0 $n 2>err | tee -a out; wait; done
grep -q "sum 7 of True True" out && grep -q "sum 8 of True False" out && grep -q "MAX, NaN at rank .: [123]" out && grep -q "AVG of integers 1, 2, 3: .*then \[6\]" out
