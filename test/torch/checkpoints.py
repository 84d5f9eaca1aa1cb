"""Measures state.save beside torch.save, and state.restore beside torch.load, in turns: python3 checkpoints.py MEGABYTES ROUNDS FOLDER.

The state is a model and the momentum of its optimizer. A line has the median of each, and of their ratios in a round, in wall-clock
time and in processor time. torch.save leaves the file in the page cache, and state.save waits for the disk: "synced" is torch.save with
an fsync. Files are in the page cache when they are read.
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


def synced():
    torch.save({"m": net.state_dict(), "o": opt.state_dict()}, other)
    fd = os.open(other, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


ways = {
    "state.save": lambda: state.save(own, keep=1), "torch.save": lambda: torch.save({"m": net.state_dict(), "o": opt.state_dict()}, other),
    "state.restore": restore, "torch.load": lambda: torch.load(other), "synced": synced,
}
pairs = (("state.save", "torch.save"), ("state.restore", "torch.load"), ("state.save", "synced"))
took = {(pair, name): [] for pair in pairs for name in pair}
for n in range(rounds + 1):
    for pair in pairs:
        for name in pair if n % 2 else pair[::-1]:
            begin, used = time.perf_counter(), time.process_time()
            ways[name]()
            took[pair, name].append((time.perf_counter() - begin, time.process_time() - used))
for pair in pairs:
    for unit, at in (("", 0), (" of processors", 1)):
        a, b = ([t[at] for t in took[pair, name][1:]] for name in pair)  # the first round warms up
        ratios = [x / y for x, y in zip(a, b)]
        print(f"{pair[0]} {statistics.median(a):.3f} s, {pair[1]} {statistics.median(b):.3f} s{unit}, ratio {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
print(f"{os.path.getsize(os.path.join(own, os.listdir(own)[0]))} and {os.path.getsize(other)} bytes, torch {torch.__version__}")
shutil.rmtree(own)
os.unlink(other)
