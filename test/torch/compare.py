#!/usr/bin/python3
"""Measures hvdrun torchrun beside PyTorch's torchrun, in turns, on this machine.

compare.py [-n RUNS] [-limit SECONDS] HVDRUN [SCENARIO...]

  launch2, launch4  from the start of a job with 2 or 4 workers to its first step
  kill              one of 4 workers sends itself SIGKILL: to the first step after the restart
  join              a node of 2 workers joins one that trains: to the first step of all four
  leave             one of two nodes of 2 workers gets SIGTERM: to the first step of the other alone
  lost              the same with SIGKILL, for the agent and its workers
  host              the same for the node at the endpoint, which runs the store

torchrun runs with --monitor_interval 0.1, the interval at which newer versions check for exits; both have a last call of 2 s.
It prints a line for each run, then the median, minimum and maximum of each. Both use Debian's python3-torch.
"""
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON = "/usr/bin/python3"
ENV = dict(os.environ, PYTHON_EXEC=PYTHON, GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    """The agents of one job, and the log of its workers."""

    def __init__(self, launcher, folder, nnodes, workers, more=()):
        self.log = os.path.join(folder, "log")
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.args = list(launcher) + [
            "--nnodes", nnodes, "--nproc_per_node", str(workers), "--rdzv_backend", "c10d", "--rdzv_id", "compare",
            "--rdzv_endpoint", self.endpoint, "--rdzv_conf", "last_call_timeout=2", "--max_restarts", "3",
            "--monitor_interval", "0.1"]
        self.script = [os.path.join(HERE, "worker.py"), self.log, "100000", *map(str, more)]
        self.agents = []

    def start(self):
        at = time.time()
        with open(self.log + ".err", "a") as err:
            self.agents.append(subprocess.Popen(self.args + self.script, env=ENV, stdout=subprocess.DEVNULL, stderr=err,
                                                start_new_session=True))
        return at

    def await_endpoint(self):
        """Blocks until the first agent listens, so that this agent and no other runs the store."""
        host, port = self.endpoint.split(":")
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.01)

    def events(self):
        if not os.path.exists(self.log):
            return []
        with open(self.log) as f:
            rows = [line.rstrip("\n").split("\t") for line in f]
        return [(float(r[0]), r[1], int(r[2]), int(r[4]), int(r[5]), int(r[6])) for r in rows if len(r) == 7]

    def await_event(self, limit, test):
        """Returns the time of the first event that passes the test."""
        end = time.time() + limit
        while time.time() < end:
            for e in self.events():
                if test(e):
                    return e[0]
            time.sleep(0.01)
        raise TimeoutError

    def stop(self):
        for sig in (signal.SIGTERM, signal.SIGKILL):
            for agent in self.agents:
                try:
                    os.killpg(agent.pid, sig)
                    agent.wait(5)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
        for e in self.events():
            try:
                os.kill(e[2], signal.SIGKILL)
            except ProcessLookupError:
                pass


def step(world, after=0.0, restart=0, number=0):
    return lambda e: e[1] == "step" and e[3] == world and e[0] > after and e[4] >= restart and e[5] >= number


def measure(name, launcher, folder, limit):
    if name.startswith("launch"):
        workers = int(name[len("launch"):])
        job = Job(launcher, folder, "1", workers)
    elif name == "kill":
        job = Job(launcher, folder, "1", 4, (3, random.randint(50, 450)))
    else:
        job = Job(launcher, folder, "1:2", 2)
    try:
        began = job.start()
        if name.startswith("launch"):
            return job.await_event(limit, step(workers)) - began
        if name == "kill":
            killed = job.await_event(60, lambda e: e[1] == "kill")
            return job.await_event(limit, step(4, killed, 1)) - killed
        job.await_endpoint()
        if name == "join":
            job.await_event(90, step(2, number=50))
            began = job.start()
            return job.await_event(limit, step(4, began)) - began
        job.start()
        job.await_event(90, step(4, number=50))
        time.sleep(random.uniform(0, 2))
        ended = time.time()
        if name == "leave":
            job.agents[1].terminate()
        else:
            own = {e[2] for e in job.events() if os.path.exists(f"/proc/{e[2]}")}
            gone = job.agents[0 if name == "host" else 1]
            gone.kill()
            for pid in own:
                if parent(pid) in (1, gone.pid):
                    os.kill(pid, signal.SIGKILL)
        return job.await_event(limit, step(2, ended)) - ended
    finally:
        job.stop()


def parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return int(f.read().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def main():
    args, runs, limit = sys.argv[1:], 5, 60
    while args and args[0] in ("-n", "-limit"):
        if args[0] == "-n":
            runs = int(args[1])
        else:
            limit = int(args[1])
        args = args[2:]
    if not args:
        raise SystemExit(__doc__)
    launchers = {"hvdrun": [os.path.abspath(args[0]), "torchrun"], "torchrun": [PYTHON, os.path.join(HERE, "torchrun.py")]}
    for name in args[1:] or ["launch2", "launch4", "kill", "join", "leave", "lost", "host"]:
        took = {who: [] for who in launchers}
        for run in range(runs):
            for who, launcher in launchers.items():
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        seconds = measure(name, launcher, folder, limit)
                        took[who].append(seconds)
                        print(name, who, run, f"{seconds:.3f}", sep="\t", flush=True)
                    except TimeoutError:
                        print(name, who, run, f"more than {limit}", sep="\t", flush=True)
        for who, all_of in took.items():
            if all_of:
                print(name, who, "median", f"{statistics.median(all_of):.3f}", f"least {min(all_of):.3f}", f"most {max(all_of):.3f}",
                      f"{len(all_of)} of {runs}", sep="\t", flush=True)


if __name__ == "__main__":
    main()
