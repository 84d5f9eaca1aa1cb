#!/bin/bash
# accelerate 1.14.0, automatic_checkpoint_naming: load_state() of the newest checkpoint does not set the number of the next one, so a
# restarted program saves checkpoint_0 again. With total_limit, the next start loads what the first run saved; without it, save_state raises.
# Guess: the numbers continue, and each start loads what the last one saved.
. "$(dirname "$0")/debian.bash"
packages python3-torch python3-accelerate
cat > t.py <<'PY'
import os, sys, torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
folder, limit, steps = sys.argv[1], int(sys.argv[1]) or None, int(sys.argv[2])
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=limit))
model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
begin = 0
if os.path.isdir(folder + "/checkpoints"):
    accelerator.load_state()
    begin = int(model.weight.item())
try:
    for step in range(begin + 1, begin + 1 + steps):
        with torch.no_grad(): model.weight.fill_(step)
        accelerator.save_state()
    print("begins after step", begin, "and saves step", step, "of", *sorted(os.listdir(folder + "/checkpoints")), flush=True)
except ValueError as e:
    print("begins after step", begin, "and raises:", str(e).split(") ")[-1][:20], flush=True)
PY
for limit in 2 0; do
  for steps in 3 2 2; do sid env OMP_NUM_THREADS=1 python3 -W ignore t.py $limit $steps 2> err | grep '^begins' | sed "s/^/total_limit $limit: /"; done
done | tee out
[ "$(wc -l < out)" = 6 ] || { tail -3 err; exit 2; }
[ "$(grep -c '2: begins after step 3 and saves step 5' out)" = 2 ] && [ "$(grep -c '0: begins after step 3 and raises' out)" = 2 ]
