#!/usr/bin/env python3
"""Trains a small network on handwritten digits with DistributedDataParallel. Processes keep running when others die, come or leave.

The same program runs under hvdrun, under torchrun, and alone.
"""
import argparse
import gzip
from pathlib import Path

import hvdrun.torch as hvd
import torch
from torch import nn

DIGITS = Path(__file__).resolve().parent.parent / "digits" / "dataset" / "digits.csv.gz"


def load(path):
    """Returns the images, with pixels from 0 to 1, and their labels."""
    with gzip.open(path, "rt") as f:
        rows = [[float(field) for field in line.split(",")] for line in f if line.strip()]
    table = torch.tensor(rows)
    return table[:, :-1] / 16, table[:, -1].long()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64, help="images of a step, on all processes together")
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints, one every 100 steps")
    args = parser.parse_args()

    job = hvd.init("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(1)
    images, labels = (t.to(job.device) for t in load(DIGITS))
    x, y = images[:1500], labels[:1500]
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(job.device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    lossf = nn.CrossEntropyLoss(reduction="none")

    state = job.state(model=net, optimizer=opt, step=0)
    if args.checkpoints and state.restore(args.checkpoints):
        print(f"continues at step {state.step}", flush=True)
    for step in job.steps(state, total=args.steps, batch=args.batch, samples=len(x)):
        with step:
            loss = step.mean(lossf(state.model(x[step.indices]), y[step.indices]))
            opt.zero_grad()
            loss.backward()
            step.commit()
            if job.rank == 0 and state.step % 100 == 0:
                print(f"step {state.step} loss {loss.item():.4f} processes {job.size}", flush=True)
                if args.checkpoints:
                    state.save(args.checkpoints)
    if job.rank == 0:
        with torch.no_grad():
            right = (net(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        print(f"accuracy {right.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
