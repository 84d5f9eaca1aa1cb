#!/bin/bash
# transformers 5.12.1, enable_jit_checkpoint: after SIGTERM, train() returns as if training were done, and the process ends with status 0, so
# a launcher does not start it again. The model it returns is a step ahead of the checkpoint.
# Guess: the process ends by the signal or with another status.
. "$(dirname "$0")/debian.bash"
packages python3-torch python3-transformers python3-accelerate
cat > t.py <<'PY'
import os, signal, time, torch, transformers
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return dict(x=torch.ones(1), labels=torch.ones(1))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def forward(self, x, labels=None, **more): return dict(loss=(self.layer(x) - labels).pow(2).mean())
class Ends(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == 3: os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step >= 3: time.sleep(1)
args = transformers.TrainingArguments(output_dir="model", max_steps=30, per_device_train_batch_size=1, save_strategy="no", enable_jit_checkpoint=True, use_cpu=True, report_to=[], disable_tqdm=True)
trainer = transformers.Trainer(model=Net(), args=args, train_dataset=Numbers(), callbacks=[Ends()])
step = trainer.train().global_step
saved = [int(name.split("-")[1]) for name in os.listdir("model")]
print("train() returns at step", step, "of 30, the checkpoint is of step", *saved, "ahead by", *[step - s for s in saved], flush=True)
PY
OMP_NUM_THREADS=1 sid python3 -W ignore t.py > said 2> err; rc=$?
{ grep '^train()' said; echo "status $rc"; } | tee out
grep -q 'returns at step [1-9]* of 30.* ahead by 1$' out && grep -q 'status 0' out
