#!/bin/bash
# torch 2.14.1, torch.distributed.checkpoint, two ranks: if all ranks save a value under the same name, the value of one rank is kept; to
# balance the writes, this is not the same rank for each name. So all ranks can load the position of rank 1 and the generator of rank 0.
# Guess: each rank loads what it saved, or all load what rank 0 saved.
. "$(dirname "$0")/debian.bash"
packages python3-torch
cat > w.py <<'PY'
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
dcp.save({"step": 7, "position": 100 + rank, "generator": torch.full((4,), rank), "buffer": torch.full((4,), rank)}, checkpoint_id="saved")
state = {"step": 0, "position": 0, "generator": torch.zeros(4, dtype=torch.int64), "buffer": torch.zeros(4, dtype=torch.int64)}
dcp.load(state, checkpoint_id="saved")
print("rank", rank, "has the position of rank", state["position"] - 100, *("and the %s of rank %d" % (n, state[n][0]) for n in ("generator", "buffer")), flush=True)
os._exit(0)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
for rank in 0 1; do sid python3 -W ignore w.py $rank > out$rank 2> err$rank & done; wait; cat out0 out1 | grep '^rank' | tee out
[ "$(wc -l < out)" = 2 ] || { tail -n 3 err0; tail -n 3 err1; exit 2; }
[ "$(sed 's/^rank . //' out | sort -u | wc -l)" = 1 ] && grep -q 'of rank 0' out && grep -q 'of rank 1' out
