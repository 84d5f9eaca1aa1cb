#!/bin/bash
# torchrun 2.14.1 with --rdzv-endpoint 127.0.0.1:PORT on one node waits for a connection to the machine's host name, which does not
# resolve, for example in a container. After 300 s by default, the job fails; --local-addr 127.0.0.1 makes it run.
# Guess: a rendezvous at a numeric address on one machine needs no name.
. "$(dirname "$0")/debian.bash"
packages python3-torch
without_libuv
# run ARGUMENTS…: torchrun of one process, on a machine whose host name has no address.
run() {
  sid timeout 60 unshare --uts sh -c 'hostname no-such-host; exec "$@"' sh python3 -W ignore -m torch.distributed.run \
    --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29871 --nproc-per-node 1 --no-python "$@" true > out 2>&1
  echo "${*:-without --local-addr}: status $?, $(grep -o 'failed to connect to.*\|client socket.*\|The IPv[46] network addresses of ([^)]*)' out | head -1)"
}
{ run; run --local-addr 127.0.0.1; } | tee said
grep -q 'without --local-addr: status 124.*no-such-host' said && grep -q 'local-addr 127.0.0.1: status 0' said
