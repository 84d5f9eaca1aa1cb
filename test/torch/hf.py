#!/usr/bin/python3
"""Trains a tiny GPT-2 with hvdrun.transformers.Trainer: hf.py LEDGER STEPS [WAY...]

Appends lines to LEDGER as ledger.py describes: start, part (the samples of a rank in a step), commit, loss, evaluate,
save, trained, after and end. WAY
are any of:

  die:PLACE:RANK:STEP   the rank kills itself there, once: in backward, update, log, evaluate, save, epoch or after (the training)
  gate:STEP             before the step, ranks wait for a file LEDGER.STEP
  stop:STEP             the training stops there
  first                 an evaluation at the start
  after                 an evaluation after the training
  accumulate            two backward passes per step
  workers               the samples come from worker processes of a DataLoader
  stream                an IterableDataset
  mean                  BERT, whose loss is a plain mean
  odd                   a number of samples that is not a multiple of the batch
  plateau               a scheduler that follows the evaluations
  best                  load_best_model_at_end
  resume                continues from the newest checkpoint
  plain                 transformers' own Trainer
  paced                 a step takes at least 50 ms, and there are few logs, no evaluations and no checkpoints
"""
import multiprocessing
import os
import sys
import time

import hf_parts as hf
from hf_parts import LEDGER, STEPS, WAYS, WORDS, dies, gate, tell
from transformers import TrainerCallback

import hvdrun.torch as hvd

if "plain" in WAYS:
    from transformers import Trainer, TrainingArguments
else:
    from hvdrun.transformers import Trainer, TrainingArguments


class Tells(TrainerCallback):
    began = 0.0

    def on_step_begin(self, args, state, control, **options):
        self.seen = []
        if "paced" in WAYS:
            time.sleep(max(0.0, self.began + 0.05 - time.monotonic()))
            self.began = time.monotonic()
        gate(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **options):
        tell("part", step=state.global_step, indices=self.seen)

    def on_optimizer_step(self, args, state, control, **options):
        tell("commit", step=state.global_step)
        dies("update", state.global_step)

    def on_step_end(self, args, state, control, **options):
        control.should_training_stop |= f"stop:{state.global_step}" in WAYS

    def on_epoch_end(self, args, state, control, **options):
        dies("epoch", state.global_step)

    def on_save(self, args, state, control, **options):
        dies("save", state.global_step)
        if state.is_world_process_zero:
            tell("save", step=state.global_step)

    def on_log(self, args, state, control, logs, **options):
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            tell("loss", step=state.global_step, sum=logs["loss"], rate=logs["learning_rate"])
        if "eval_loss" in logs and trainer.is_in_train:
            tell("evaluate", step=state.global_step, sum=logs["eval_loss"])


class Mine(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        counts = getattr(self, "_hvd_counts", None)
        if counts is None or counts[0][0]:
            tells.seen += (inputs["input_ids"][:, 0] * WORDS + inputs["input_ids"][:, 1]).tolist()
        loss = super().training_step(model, inputs, num_items_in_batch)
        dies("backward", self.state.global_step)
        return loss

    def prediction_step(self, *args, **options):
        dies("evaluate" if self.is_in_train else "after", self.state.global_step)
        return super().prediction_step(*args, **options)

    def store_flos(self):
        if self.control.should_log:
            dies("log", self.state.global_step)
        super().store_flos()


if __name__ == "__main__":
    more = {}
    if "workers" in WAYS:
        multiprocessing.set_start_method("fork")  # a fork server imports everything once more
    if "plateau" in WAYS:
        more.update(lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "threshold": 0.5}, metric_for_best_model="loss")
    if "best" in WAYS:
        more.update(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False)
    if "first" in WAYS:
        more.update(eval_on_start=True)
    if "plain" in WAYS:
        more.update(ddp_backend="gloo")
    if "paced" in WAYS:
        more.update(logging_steps=100, eval_strategy="no", save_strategy="no")
    more = {"logging_steps": 1, "eval_strategy": "steps", "save_strategy": "steps", **more}
    args = TrainingArguments(
        output_dir=LEDGER + ".out", max_steps=STEPS, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        eval_steps=6, save_steps=6, save_total_limit=2, use_cpu=True, report_to=[], disable_tqdm="best" not in WAYS, learning_rate=1e-2, seed=3,
        dataloader_pin_memory=False, gradient_accumulation_steps=2 if "accumulate" in WAYS else 1,
        dataloader_num_workers=1 if "workers" in WAYS else 0, **more)
    hf.where, hf.job = args, None if "plain" in WAYS else hvd.init("gloo")
    tells = Tells()
    tells.seen = []
    trainer = Mine(model=hf.model(), args=args, train_dataset=hf.Stream() if "stream" in WAYS else hf.Samples(hf.SAMPLES), eval_dataset=hf.Samples(96),
                   callbacks=[tells])
    with args.main_process_first():
        tell("start")
    result = trainer.train(resume_from_checkpoint="resume" in WAYS)
    tell("trained", step=result.global_step, sum=result.training_loss)
    if "after" in WAYS:
        tell("after", step=result.global_step, sum=trainer.evaluate()["eval_loss"])
    trainer.save_model()
    tell("end", step=result.global_step, sum=sum(p.double().abs().sum().item() for p in trainer.model.parameters()))
