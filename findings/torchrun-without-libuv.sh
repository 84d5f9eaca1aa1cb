#!/bin/bash
# Debian's torch 2.14.1 is built without libuv. Its torchrun --standalone fails, with the advice to set USE_LIBUV=0, and fails in
# the same way, with the same advice, if that is set: the store of c10d ignores it.
# Guess: it works with USE_LIBUV=0, as the message says.
. "$(dirname "$0")/debian.bash"
packages python3-torch
for value in 1 0; do
  USE_LIBUV=$value sid timeout 100 python3 -W ignore -m torch.distributed.run --standalone --nproc-per-node 1 --no-python true > out 2>&1
  echo "USE_LIBUV=$value: status $?, $(grep -o 'use_libuv was requested.*' out | head -1)"
done | tee said
[ "$(grep -c 'status 1, use_libuv was requested.*run with USE_LIBUV=0' said)" = 2 ]
