#!/bin/bash
# torchrun 2.14.1, c10d, --nnodes 2: if the clock of one node is 20 s behind, the other node considers it dead, since its
# heartbeats are older than 15 s, and trains alone: WORLD_SIZE is 1, below the minimum of 2, and the exit status is 0.
# Guess: the nodes never meet.
. "$(dirname "$0")/debian.bash"
packages python3-torch faketime; without_libuv
cat > w.py <<'PY'
import os, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
time.sleep(5)
PY
export OMP_NUM_THREADS=1 FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1
try() {
  port=$((20000 + RANDOM % 20000))
  node() { sid faketime -f "$2" timeout 90 python3 -W ignore -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --local-addr 127.0.0.1 --rdzv-backend c10d --rdzv-endpoint localhost:$port --rdzv-id x --rdzv-conf join_timeout=40 w.py > $1 2>&1; echo "status $?" >> $1; }
  node one +0s & sleep 8; node two "$1" & wait
  for f in one two; do echo "clocks differ by $1, node $f: $(grep -h '^rank\|^status' $f | tr '\n' ';')"; done
}
try +0s | tee same
try -20s | tee behind
[ "$(grep -c 'rank [01] of 2;status 0;' same)" = 2 ] && grep -q 'node one: rank 0 of 1;status 0;' behind
