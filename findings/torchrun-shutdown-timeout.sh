#!/bin/bash
# torchrun 2.14.1 ignores --shutdown-timeout if a worker has failed: the other workers get SIGKILL after 30 s.
# Guess: they get it after the 2 s given.
. "$(dirname "$0")/debian.bash"
packages python3-torch; without_libuv
cat > w.py <<'PY'
import os, signal, sys, time
if os.environ["RANK"] == "1":
    time.sleep(3); sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
while True:
    time.sleep(1)
PY
began=$(date +%s); sid timeout 100 python3 -W ignore -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 --shutdown-timeout 2 w.py > out 2>&1; rc=$?; took=$(($(date +%s) - began))
grep -c 'asked to end' out; echo "--shutdown-timeout 2: status $rc after $took s, of which the worker that failed took 3 s"
[ $rc = 1 ] && [ $took -ge 30 ]
