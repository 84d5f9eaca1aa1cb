#!/bin/bash
# torchrun 2.14.1, c10d, --nnodes 1:2: when a second node joins a running world of one node, the whole job ends. The first node
# restarts its workers, they wait until read_timeout for the store of the previous round, and both launchers end with status 1.
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 avoids it. Guess: the world continues with two nodes, as the page on elastic launches says.
. "$(dirname "$0")/debian.bash"
packages python3-torch; without_libuv
cat > w.py <<'PY'
import datetime, os, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
t = torch.ones(1); dist.all_reduce(t)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "sum", t.item(), flush=True)
time.sleep(30 if t.item() == 1 else 3)
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
try() {
  rm -f one two; port=$((20000 + RANDOM % 20000))
  node() { sid env "${more[@]}" timeout 240 python3 -W ignore -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --local-addr 127.0.0.1 --rdzv-backend c10d --rdzv-endpoint localhost:$port --rdzv-id x --rdzv-conf last_call_timeout=2,read_timeout=15 w.py > $1 2>&1; echo "status $?" >> $1; }
  : > one; node one & until grep -q '^rank 0 of 1\|^status' one; do sleep 0.2; done; node two & wait
  for f in one two; do echo "$1, node $f: $(grep -h '^rank\|^status' $f | tr '\n' ';')"; done
}
more=(A=1); try "as it is" | tee out
more=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1); try "store not shared" | tee out2
[ "$(grep -c "status 1;" out)" = 2 ] && ! grep -q "of 2" out && [ "$(grep -c 'of 2 sum 2.0.*status 0' out2)" = 2 ]
