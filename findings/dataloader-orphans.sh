#!/bin/bash
# Python 3.14.8, PyTorch 2.14.1: after the death of a trainer, its DataLoader workers never end. They check whether the id of
# their parent changes, and their parent is Python's fork server. Guess: they end within five seconds, as with the start
# method fork, which was the default on Linux up to Python 3.13.
. "$(dirname "$0")/debian.bash"
packages python3 python3-torch
cat > t.py <<'PY'
import os, sys, time, torch.utils.data as data
class Numbers(data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): return i
if __name__ == "__main__":
    batches = iter(data.DataLoader(Numbers(), batch_size=1, num_workers=2, multiprocessing_context=sys.argv[1] if len(sys.argv) > 1 else None))
    next(batches)
    print(os.getpid(), *[w.pid for w in batches._workers], flush=True)
    time.sleep(600)
PY
try() {
  rm -f said; sid python3 -W ignore t.py $1 > said 2> err & until [ -s said ] || ! kill -0 $!; do sleep 0.2; done
  [ -s said ] || { tail -3 err; exit 2; }
  read trainer workers < said; kill -9 $trainer; sleep 20
  left=0; for w in $workers; do grep -qs '^State:.[^Z]' /proc/$w/status && { left=$((left + 1)); kill -9 $w; }; done
  echo "${1:-the default}: $left of 2 workers are there 20 s after their trainer was killed"
}
try | tee out; try fork | tee out2
grep -q '^the default: 2' out && grep -q '^fork: 0' out2
