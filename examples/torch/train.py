#!/usr/bin/env python3
"""Trains a small network on handwritten digits, by DistributedDataParallel.

It continues from its last checkpoint: when a process dies or the number of processes changes, at most one epoch is lost.
"""
import argparse
import gzip
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DIGITS = Path(__file__).resolve().parent.parent / "digits" / "dataset" / "digits.csv.gz"


def load(path):
    """Returns the images, with pixels from 0 to 1, and their labels."""
    with gzip.open(path, "rt") as f:
        rows = [[float(field) for field in line.split(",")] for line in f if line.strip()]
    table = torch.tensor(rows)
    return table[:, :-1] / 16, table[:, -1].long()


def save(path, model, optimizer, epoch):
    """Writes the checkpoint atomically, so that the old one stays if the process dies."""
    part = path.with_suffix(".part")
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, part)
    os.replace(part, path)


@record
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images of each process in a step")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
        if rank == 0:
            print(f"continues at epoch {first} with {world} processes", flush=True)

    images, labels = load(DIGITS)
    train = TensorDataset(images[:1500], labels[:1500])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            save(args.checkpoint, model, optimizer, epoch)
            print(f"epoch {epoch} loss {loss.item():.4f} processes {world}", flush=True)

    if rank == 0:
        with torch.no_grad():
            right = (model.module(images[1500:].to(device)).argmax(1).cpu() == labels[1500:]).float().mean()
        print(f"accuracy {right.item():.3f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
