"""A user's program for a type checker: mypy --strict must report the errors that comments name by E:, and no others."""
import datetime

import torch
import hvdrun
import hvdrun.torch as hvd
from hvdrun.torch import Broken, Changed, Job, Plan, PlansDiffer, Removed, State, StateLost, Step


def evaluate(job: Job, state: State) -> float:
    assert not isinstance(state.step, str)
    return float(state.best) * job.size


def train(folder: str) -> int:
    job = hvd.init("gloo", timeout=datetime.timedelta(seconds=30))
    net = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    state = job.state(ddp={"bucket_cap_mb": 1}, model=net, optimizer=opt, best=0.5)

    @job.on_reset
    def groups() -> None:
        print(job, job.rank, job.local_rank + job.cross_size, job.generation, job.device.type)

    state.restore(folder)
    try:
        for step in job.steps(state, total=10, batch=4, samples=100, shuffle=False, seed=3):
            with step:
                x = torch.ones(len(step.indices), 2)
                loss = step.mean(state.model(x)) * step.scale
                opt.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                if step.epoch > 0 and step.number + step.batch > 100:
                    step.stop()
                step.commit(update=lambda: opt.step())
            if step.done and step.ends_epoch:
                print(step)
    except Removed as removed:
        if removed.last:
            print(state.save(folder, keep=2).upper())
        raise
    except (StateLost, PlansDiffer, Broken) as err:
        print(err)
    return state.step + int(evaluate(job, state)) + len(hvdrun.__version__)


def other(job: Job, state: State, loader: torch.utils.data.DataLoader[torch.Tensor]) -> list[int]:
    plan = Plan(4, samples=10, seed=1)

    def loop() -> str:
        while state.step < 10:
            state.begin()
            print(plan.part(state.step, job.rank, job.size), plan.epoch(state.step), plan.count(state.step))
            state.commit(lambda: None)
            if job.changed:
                raise Changed
        return "done"

    print(hvd.run(state, loop, more=True).upper())
    for step in job.steps(state, 20, 4, data=loader, evaluate=loop, every="epoch", more=True):
        with step:
            print(step.data)
            for micro in step.micro(2):
                micro.mean(torch.zeros(len(micro.indices))).backward()  # type: ignore[no-untyped-call]
            step.commit()
    return job.together(state, lambda: [state.step])


def wrong(job: Job, state: State, step: Step) -> None:
    job.steps(state, totl=3, batch=1)  # E: "totl"
    job.steps(state, total="3", batch=1)  # E: "str"
    step.comit()  # E: "comit"
    hvd.run(state)  # E: "train"
    step.micro("2")  # E: "str"
    step.epochs  # E: "epochs"
    hvd.init(timeout=30)  # E: "int"
    hvd.initialize()  # E: "initialize"
    job.sise  # E: "sise"
    job.rank()  # E: "int"
    state.save()  # E: "folder"
    step.mean(1.0)  # E: "float"
    with step as entered:
        entered.commmit()  # E: "commmit"
