#!/bin/bash
# Ignite 0.5.1: idist.broadcast of a Python integer returns a float of 24 bits, on the source too: a seed taken from the clock is
# rounded to two minutes, and step 16777217 becomes 16777216. all_gather of the same integer is exact.
# Guess: the integer that was given.
. "$(dirname "$0")/debian.bash"
packages python3-torch python3-torch-ignite
cat > w.py <<'PY'
import os, sys, ignite.distributed as idist
rank = int(sys.argv[1])
idist.initialize("gloo", init_method="file://%s/store" % os.getcwd(), rank=rank, world_size=2)
for value in 1764438001, 1764438059, 16777217:
    gathered = idist.all_gather(value)
    print("rank", rank, "has from rank 0", repr(idist.broadcast(value if rank == 0 else 0, src=0)), "for", value, "and gathers", gathered[0], flush=True)
os._exit(0)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
for rank in 0 1; do sid python3 -W ignore w.py $rank > out$rank 2> err$rank & done; wait; cat out0 out1 | grep '^rank' | tee out
[ "$(wc -l < out)" = 6 ] || { tail -n 3 err0; tail -n 3 err1; exit 2; }
[ "$(grep -c 'has from rank 0 1764438016.0 for .* and gathers 1764438001$' out)" = 2 ] && [ "$(grep -c 'has from rank 0 16777216.0 for 16777217 and gathers 16777217$' out)" = 2 ]
