"""Measures state.save beside torch.save, and state.restore beside torch.load, in turns: python3 checkpoints.py MEGABYTES ROUNDS FOLDER.

The state is a model and the momentum of its optimizer. A line has the median of each, and of their ratios in a round. Files are in the
page cache when they are read.
"""
import os
import shutil
import statistics
import sys
import time

import torch

import hvdrun.torch as hvd

megabytes, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
job = hvd.init("gloo")
side = 1250
net = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(max(1, megabytes * 1000000 // (8 * side * side)))))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for p in net.parameters():
    p.grad = torch.randn_like(p)
opt.step()
opt.zero_grad()
state = job.state(model=net, optimizer=opt, step=1)
own, other = os.path.join(folder, "hvdrun"), os.path.join(folder, "torch.pt")


def restore():
    assert state.restore(own)


ways = {
    "state.save": lambda: state.save(own, keep=1), "torch.save": lambda: torch.save({"m": net.state_dict(), "o": opt.state_dict()}, other),
    "state.restore": restore, "torch.load": lambda: torch.load(other),
}
pairs = (("state.save", "torch.save"), ("state.restore", "torch.load"))
took = {name: [] for name in ways}
for n in range(rounds + 1):
    for pair in pairs:
        for name in pair if n % 2 else pair[::-1]:
            begin = time.perf_counter()
            ways[name]()
            took[name].append(time.perf_counter() - begin)
for ours, theirs in pairs:
    a, b = took[ours][1:], took[theirs][1:]  # the first round warms up
    print(f"{ours} {statistics.median(a):.3f} s, {theirs} {statistics.median(b):.3f} s, ratio {statistics.median(x / y for x, y in zip(a, b)):.2f} "
          f"({min(x / y for x, y in zip(a, b)):.2f} to {max(x / y for x, y in zip(a, b)):.2f})", flush=True)
print(f"{os.path.getsize(os.path.join(own, os.listdir(own)[0]))} and {os.path.getsize(other)} bytes, torch {torch.__version__}")
shutil.rmtree(own)
os.unlink(other)
