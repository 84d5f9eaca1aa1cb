#!/bin/bash
# Debian's torch 2.14.1 has no collective of gloo for bfloat16, float16 or int16, not even a broadcast; send and recv work.
# PyTorch's own wheels have them. Guess: the types that torch.distributed's page lists for gloo work.
. "$(dirname "$0")/debian.bash"
packages python3-torch
cat > w.py <<'PY'
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
def tries(name, f, dtype):
    try:
        f(torch.ones(4).to(dtype)); return name + " yes"
    except RuntimeError as e:
        return name + " no (" + str(e).split("\n")[0][:40] + ")"
def point(t):
    dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
for dtype in (torch.float32, torch.uint8, torch.int16, torch.float16, torch.bfloat16):
    said = [tries("all_reduce", dist.all_reduce, dtype), tries("broadcast", lambda t: dist.broadcast(t, 0), dtype), tries("send", point, dtype)]
    if rank == 0:
        print(dtype, ", ".join(said), flush=True)
os._exit(0)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
sid python3 -W ignore w.py 1 > /dev/null 2>&1 & sid python3 -W ignore w.py 0 > out 2>err; wait; cat out
[ "$(grep -c 'all_reduce yes.*broadcast yes.*send yes' out)" = 2 ] && [ "$(grep -c 'all_reduce no.*broadcast no.*send yes' out)" = 3 ]
