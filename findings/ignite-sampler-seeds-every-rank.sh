#!/bin/bash
# Ignite 0.5.1, auto_dataloader with the user's own sampler: each pass over the loader seeds torch's global generator with the epoch, which
# Ignite's Engine leaves at 0. So dropout and other random numbers are the same on all ranks and in all epochs, whatever the ranks' seeds.
# A loader without a sampler leaves the generator alone. Guess: as without a sampler.
. "$(dirname "$0")/debian.bash"
packages python3-torch python3-torch-ignite
cat > w.py <<'PY'
import os, sys, torch, ignite.distributed as idist
from ignite.engine import Engine
rank = int(sys.argv[1])
idist.initialize("gloo", init_method="file://%s/store" % os.getcwd(), rank=rank, world_size=2)
samples = list(range(8))
for name, sampler in ("a sampler", torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)), ("no sampler", None):
    torch.manual_seed(100 + rank)
    drawn = []
    engine = Engine(lambda engine, batch: drawn.append("%.4f" % torch.rand(1).item()))
    engine.run(idist.auto_dataloader(samples, batch_size=8, sampler=sampler), max_epochs=3)
    print(f"{name}: rank {rank}, seed {100 + rank}, draws in three epochs", *drawn, flush=True)
os._exit(0)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
for rank in 0 1; do sid python3 -W ignore w.py $rank > out$rank 2> err$rank & done; wait; cat out0 out1 | grep 'sampler: rank' | sort | tee out
[ "$(wc -l < out)" = 4 ] || { tail -n 3 err0; tail -n 3 err1; exit 2; }
numbers() { grep "^$1:" out | sed 's/.*epochs //' | tr ' ' '\n' | sort -u | wc -l; }
[ "$(numbers 'a sampler')" = 1 ] && [ "$(numbers 'no sampler')" = 6 ]
