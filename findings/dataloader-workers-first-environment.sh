#!/bin/bash
# Python 3.14.8, PyTorch 2.14.1: all workers of DataLoaders come from Python's fork server, which keeps the environment of the moment when it
# started. When the RANK of a process changes, its data workers still read the first one, also the workers of new loaders.
# Guess: a new worker has its parent's environment, as with fork, which Python 3.13 had as its default on Linux.
. "$(dirname "$0")/debian.bash"
packages python3 python3-torch
cat > t.py <<'PY'
import os, torch.utils.data as data
class Shard(data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, i): return os.environ["RANK"] + " of " + os.environ["WORLD_SIZE"]
if __name__ == "__main__":
    for rank, size in ("3", "4"), ("0", "2"):
        os.environ.update(RANK=rank, WORLD_SIZE=size)
        read = {name: list(data.DataLoader(Shard(), batch_size=None, num_workers=1, multiprocessing_context=name))[0] for name in (None, "fork")}
        print(f"the process is {rank} of {size}: workers of the default read {read[None]}, of fork {read['fork']}", flush=True)
PY
OMP_NUM_THREADS=1 sid python3 -W ignore t.py 2> err | tee out
[ "$(wc -l < out)" = 2 ] || { tail -n 3 err; exit 2; }
grep -q 'is 3 of 4: .* default read 3 of 4, of fork 3 of 4$' out && grep -q 'is 0 of 2: .* default read 3 of 4, of fork 0 of 2$' out
