#!/usr/bin/python3
"""Trains with the parts of hvdrun.accelerate over job.steps: hf_accelerate.py LEDGER STEPS [scaled] [gate:STEP] [die:PLACE:RANK:STEP...]

Appends the same lines to LEDGER as hf.py, and uses its model and samples. A rank dies in backward or in evaluate. With scaled, losses
are scaled as with mixed_precision="fp16" on a GPU, and the scale doubles every four steps. Before the step of a gate, ranks wait for a
file LEDGER.STEP.
"""
import sys

import torch

import hvdrun.torch as hvd
from hvdrun.accelerate import Accelerator

job = hvd.init("gloo")
accelerator = Accelerator(job, cpu=True)

import hf_parts as hf  # noqa: E402

hf.where, hf.job = accelerator, job
if "scaled" in hf.WAYS:
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
net = hf.model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=hf.STEPS)
held = torch.utils.data.DataLoader(hf.Samples(96), batch_size=8)
net, optimizer, scheduler, held = accelerator.prepare(net, optimizer, scheduler, held)
data = hf.Samples(500)
state = job.state(model=net, optimizer=optimizer, scheduler=scheduler, scaler=accelerator.scaler, step=0)


def collate(indices):
    return torch.utils.data.default_collate([data[i] for i in indices])


def evaluate(number):
    """Returns the mean over the samples of all ranks, before a step is applied."""
    net.eval()
    losses = []
    with torch.no_grad():
        for batch in held:
            hf.dies("evaluate", number)
            losses.append(accelerator.gather_for_metrics(net(**batch).loss.repeat(len(batch["labels"]))))
    net.train()
    return torch.cat(losses).mean().item()


hf.tell("start")
for step in job.steps(state, total=hf.STEPS, batch=24, samples=500):
    hf.gate(step.number)
    with step:
        with accelerator.autocast():
            loss = state.model(**collate(step.indices)).loss
        optimizer.zero_grad()
        accelerator.backward(step.mean(loss))
        hf.dies("backward", step.number)
        if accelerator.scaler is not None:
            accelerator.scaler.unscale_(optimizer.optimizer)  # accelerate does so with fp16
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        mean = accelerator.reduce(step.mean(loss.detach()), "mean").item()
        rate = scheduler.get_last_lr()[0]
        held_out = evaluate(step.number) if step.number % 6 == 5 else None
        hf.tell("part", step=step.number, indices=step.indices)
        step.commit()
    if step.done:
        hf.tell("commit", step=step.number)
        if accelerator.is_main_process:
            hf.tell("loss", step=state.step, sum=mean, rate=rate)
            if held_out is not None:
                hf.tell("evaluate", step=state.step, sum=held_out)
hf.tell("end", sum=sum(p.double().abs().sum().item() for p in net.parameters()))
