"""Records the steps of PyTorch programs for the tests: a line of JSON for each event, in the file sys.argv[1]."""
import json
import os
import sys
import time

import hvdrun.torch as hvd

BATCH, SAMPLES, SEED = 24, 1000, 5
_OUT = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def tell(event, **more):
    os.write(_OUT, (json.dumps(dict(more, event=event, time=time.time(), pid=os.getpid())) + "\n").encode())


class Steps:
    """The steps of a job. The mean gradient of a step is the mean of 1 + index over its samples."""

    def __init__(self, job):
        self._job = job
        self._plan = hvd.Plan(BATCH, SAMPLES, seed=SEED)

    def world(self):
        self._tell("world")

    def begin(self, state, total):
        return self._job.steps(state, total=total, batch=BATCH, samples=SAMPLES, seed=SEED)

    def part(self, step):
        """Must be called before the commit. The step is the last one if there is a file LEDGER.stop."""
        if os.path.exists(sys.argv[1] + ".stop"):
            step.stop()
        self._tell("part", step=step.number, indices=step.indices)

    def made(self, step, *means):
        """Checks after the commit that the means of the gradients are right. In a failed step, NCCL can leave any values there."""
        want = 1 + sum(sum(self._plan.part(step.number, rank, self._job.size)) for rank in range(self._job.size)) / step.batch
        for got in means:
            if abs(got / want - 1) > 1e-5:
                self._tell("wrong", step=step.number, got=got, want=want)
                os._exit(3)
        self._tell("commit", step=step.number)

    def end(self, total):
        self._tell("end", sum=total)

    def _tell(self, event, **more):
        tell(event, generation=self._job.generation, rank=self._job.rank, size=self._job.size, **more)
