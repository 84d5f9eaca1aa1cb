"""Measures a training loop of hvdrun.torch beside the same loop with DistributedDataParallel under torchrun, in turns.

	python3 paces.py [-n ROUNDS] HVDRUN [SCENARIO...]

	tiny2, tiny4      a model of 4,810 parameters with 2 or 4 workers, in the default environment
	small1 to small4  the same model with 1 to 4 workers, one thread each
	large2, large4    a model of 25 million parameters with 2 or 4 workers, one thread each

A scenario prints the median step (of all steps from the 20th on), the time from the command to the end of the first step on rank 0, and
the ratios of both, each as the median of the rounds with the minimum and the maximum. Both loops do the same work: batches of 64
samples in all, a forward and a backward pass, an all-reduce of the gradients by gloo and a step of SGD with momentum.
"""
import argparse
import os
import statistics
import subprocess
import sys
import time

from compare import free_port

# TORCHRUN runs PyTorch's torchrun whether or not torch is built with libuv; Debian's is not.
TORCHRUN = """
import functools
import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend as c10d
import torch.distributed.run
c10d.TCPStore = torch.distributed.TCPStore = functools.partial(torch.distributed.TCPStore, use_libuv=False)
torch.distributed.run.main()
"""


def worker(way, size, steps):
    if way == "hvdrun":
        import hvdrun.torch as hvd
        job = hvd.init("gloo")
    import torch
    import torch.distributed as dist
    from torch import nn

    if way == "torchrun":
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    if size == "large":
        net = nn.Sequential(nn.Linear(1250, 5000), nn.ReLU(), nn.Linear(5000, 3000), nn.ReLU(), nn.Linear(3000, 1250), nn.ReLU(),
                            nn.Linear(1250, 10))
    else:
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(512, net[0].in_features), torch.randint(0, 10, (512,))
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.functional.cross_entropy
    ends = []
    if way == "hvdrun":
        state = job.state(model=net, optimizer=opt, step=0)
        for step in job.steps(state, total=steps, batch=64, samples=512):
            with step:
                loss = step.mean(loss_of(state.model(x[step.indices]), y[step.indices]))
                opt.zero_grad()
                loss.backward()
                step.commit()
            if step.done:
                ends.append((time.time(), time.perf_counter()))
        rank = job.rank
    else:
        rank, world = dist.get_rank(), dist.get_world_size()
        ddp = nn.parallel.DistributedDataParallel(net)
        for n in range(steps):
            begin = n * 64 % 512
            mine = range(begin + rank * 64 // world, begin + (rank + 1) * 64 // world)
            loss = loss_of(ddp(x[list(mine)]), y[list(mine)])
            opt.zero_grad()
            loss.backward()
            opt.step()
            ends.append((time.time(), time.perf_counter()))
        dist.destroy_process_group()
    if rank == 0:
        took = [b[1] - a[1] for a, b in zip(ends, ends[1:])][20:]
        print(f"RESULT {ends[0][0]} {statistics.median(took)} {torch.get_num_threads()} {torch.__version__}", flush=True)


def run(hvdrun, way, size, workers, steps, threads):
    env = dict(os.environ, GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    env.pop("OMP_NUM_THREADS", None)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    args = ["worker", way, size, str(steps)]
    if way == "hvdrun":
        command = [hvdrun, "-np", str(workers), "--min-np", "1", "-H", f"localhost:{workers}", sys.executable, __file__, *args]
    else:
        command = [sys.executable, "-c", TORCHRUN, "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1",
                   "--nproc_per_node", str(workers), __file__, *args]
    begin = time.time()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    for line in done.stdout.splitlines():
        if "RESULT" in line:
            words = line.split("RESULT ")[1].split()
            return float(words[0]) - begin, float(words[1]), f"{words[2]} threads, torch {words[3]}"
    sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def median(values, unit=1, digits=2):
    return f"{statistics.median(values) * unit:.{digits}f} ({min(values) * unit:.{digits}f} to {max(values) * unit:.{digits}f})"


def measure():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=5)
    parser.add_argument("hvdrun")
    parser.add_argument("scenarios", nargs="*")
    args = parser.parse_args()
    for name in args.scenarios or ["tiny2", "tiny4", "small1", "small2", "small4", "large2", "large4"]:
        size, workers = name[:-1], int(name[-1])
        steps, threads = (60, 1) if size == "large" else (1000, 0 if size == "tiny" else 1)
        first, step = {"hvdrun": [], "torchrun": []}, {"hvdrun": [], "torchrun": []}
        for n in range(args.n):
            for way in ("hvdrun", "torchrun") if n % 2 else ("torchrun", "hvdrun"):
                a, b, how = run(args.hvdrun, way, size, workers, steps, threads)
                first[way].append(a)
                step[way].append(b)
        print(f"{name} ({how}, {args.n} rounds)")
        for what, took, unit in (("step, ms", step, 1e3), ("command to first step, s", first, 1)):
            ratios = [a / b for a, b in zip(took["hvdrun"], took["torchrun"])]
            more = [a - b for a, b in zip(took["hvdrun"], took["torchrun"])]
            print(f"  {what}: hvdrun {median(took['hvdrun'], unit)}, torchrun {median(took['torchrun'], unit)}, ratio {median(ratios)}, "
                  f"difference {median(more, unit)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        measure()
