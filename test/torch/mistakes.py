#!/usr/bin/python3
"""Makes mistakes of programs, without other ranks, and prints a line of JSON for each: its name and the error."""
import json
import os
import sys
import tempfile
import types

import hvdrun.torch as hvd
import torch

job = hvd.init("gloo")


def loop(body, total=2, samples=None, batch=4, each_epoch=(), every=None, evaluate=None, data=None, ddp={}, **parts):
    net = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {"model": net, "optimizer": opt, **parts}
    state = job.state(each_epoch=each_epoch, ddp=ddp, **{name: v(net, opt) if isinstance(v, types.FunctionType) else v for name, v in given.items() if v is not None})
    for step in job.steps(state, total=total, batch=batch, samples=samples, evaluate=evaluate, every=every, data=data):
        with step:
            loss = step.mean(state.model(torch.ones(len(step.indices), 2)).mean())
            opt.zero_grad()
            loss.backward()
            body(state, step, opt)
    return "done"


def commit(state, step, opt):
    step.commit()


def step_first(state, step, opt):
    opt.step()
    step.commit()


def by_hand(state, step, opt):
    with torch.no_grad():
        for p in state.model.parameters():
            p -= p.grad
    step.commit()


def by_data(state, step, opt):
    for p in state.model.parameters():
        p.data.add_(p.grad.data, alpha=-0.1)
    step.commit(lambda: None)


def twice(state, step, opt):
    step.commit()
    step.commit()


def epoch_ends(state, step, opt):
    step.commit()
    if step.number == 3:
        state.scheduler.step()


def tensor_for_a_number(state, step, opt):
    state.best = torch.ones(1)


def scheduler(net, opt):
    return torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


def loads(**options):
    """A loop whose samples come from a DataLoader."""
    return lambda: loop(commit, data=torch.utils.data.DataLoader(options.pop("of", list(range(8))), **options))


def weights(n):
    return torch.utils.data.WeightedRandomSampler([1.0] * n, n)


def checkpoint(saved, restored):
    with tempfile.TemporaryDirectory() as folder:
        job.state(**saved()).save(folder)
        return job.state(**restored()).restore(folder)


class Average:
    """The program's own part that is too large to be copied in each step."""

    def __init__(self):
        self.values = torch.zeros(1 << 19)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, values):
        self.values.copy_(values["values"])


def averages(state, step, opt):
    state.average.values.mul_(0.9)
    step.commit()


def replaced(evaluates):
    """A large object whose tensor an evaluation or a commit has replaced, and which the body of a later step changes."""
    average = Average()

    def replace():
        average.values = average.values * 0.9

    def body(state, step, opt):
        if step.number > 0:
            average.values.mul_(0.9)
        step.commit(None if evaluates else replace)

    return loop(body, average=average, evaluate=replace if evaluates else None, every=1 if evaluates else None)


def linear(n):
    return lambda: {"model": torch.nn.Linear(n, 1)}


def without(state, step, opt):
    """As after `continue` for a bad batch: the others wait for this rank's commit."""


MISTAKES = {
    "good": lambda: loop(commit),
    "good by epoch": lambda: loop(commit, total=6, samples=8, scheduler=scheduler, each_epoch=["scheduler"]),
    "optimizer in the body": lambda: loop(step_first),
    "parameters by hand": lambda: loop(by_hand),
    "parameters by data": lambda: loop(by_data),
    "parameters by data in commit": lambda: loop(lambda s, step, opt: step.commit(lambda: [p.data.add_(p.grad) for p in s.model.parameters()])),
    "a large object in the body": lambda: loop(averages, average=Average()),
    "a large object in commit": lambda: loop(lambda s, step, opt: step.commit(lambda: s.average.values.add_(1)), average=Average()),
    "commit replaces a large object": lambda: replaced(False),
    "evaluate replaces a large object": lambda: replaced(True),
    "the model in commit": lambda: loop(lambda s, step, opt: step.commit(lambda: s.model(torch.ones(1, 2)))),
    "commit twice": lambda: loop(twice),
    "no commit": lambda: loop(without),
    "commit of nothing": lambda: loop(lambda s, step, opt: step.commit(lambda: None)),
    "a module that is no part": lambda: loop(commit, optimizer=lambda net, opt: torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=1)),
    "an optimizer that calls the loss": lambda: loop(commit, optimizer=lambda net, opt: torch.optim.LBFGS(net.parameters())),
    "layers without shapes": lambda: job.state(model=torch.nn.LazyLinear(1)),
    "a sampler by weights": loads(sampler=weights(8)),
    "a sampler that repeats": loads(sampler=torch.utils.data.RandomSampler(range(8), replacement=True)),
    "batches of its own": loads(batch_sampler=[[0, 1], [2, 3]]),
    "a sampler of others": loads(sampler=torch.utils.data.SubsetRandomSampler([1, 2])),
    "a stream": loads(of=Stream()),
    "a loader that shuffles": loads(shuffle=True, batch_size=2, drop_last=True),
    "a loader of a rank": loads(sampler=torch.utils.data.DistributedSampler(range(8), 2, 1)),
    "batch 0": lambda: loop(commit, batch=0),
    "no samples": lambda: loop(commit, samples=0),
    "an unknown option": lambda: loop(commit, ddp={"nonsense": 1}),
    "mean of a number": lambda: loop(lambda s, step, opt: step.mean(1.0)),
    "an unknown value": lambda: loop(lambda s, step, opt: setattr(s, "loss", 1)),
    "a module is assigned": lambda: loop(lambda s, step, opt: setattr(s, "model", 1)),
    "a checkpoint of other shapes": lambda: checkpoint(linear(2), linear(3)),
    "a checkpoint without a part": lambda: checkpoint(linear(2), lambda: {**linear(2)(), "best": 1.0}),
    "a folder that is not there": lambda: job.state(w=torch.zeros(1)).restore(os.path.join(tempfile.gettempdir(), "nothing", "here")),
    "no optimizer": lambda: loop(commit, optimizer=None),
    "optimizers in a list": lambda: loop(commit, optimizer=None, optimizers=lambda net, opt: [opt]),
    "optimizers in a dict": lambda: loop(commit, optimizer=None, optimizers=lambda net, opt: {"a": opt}),
    "scheduler by the program too": lambda: loop(epoch_ends, total=6, scheduler=scheduler),
    "scheduler in the body": lambda: loop(lambda s, step, opt: (s.scheduler.step(), step.commit()), scheduler=scheduler),
    "each_epoch of no scheduler": lambda: loop(commit, each_epoch=["optimizer"]),
    "tensor for a number": lambda: loop(tensor_for_a_number, best=1.0),
    "part named save": lambda: loop(commit, save=1),
    "part named _x": lambda: loop(commit, _x=1),
    "wrapped model": lambda: loop(commit, model=lambda net, opt: torch.nn.parallel.DistributedDataParallel(net)),
    "step of a tensor": lambda: loop(commit, step=torch.zeros(1)),
    "total of a float": lambda: loop(commit, total=2.0),
    "batch of a float": lambda: loop(commit, batch=2.5),
    "every without evaluate": lambda: loop(commit, every=2),
    "epochs without samples": lambda: loop(commit, every="epoch", evaluate=lambda: None),
    "together in the loop": lambda: loop(lambda s, step, opt: job.together(s, lambda: 1)),
    "init of another backend": lambda: hvd.init("nccl"),
    "init twice": lambda: hvd.init("gloo") is job,
}
for name, call in MISTAKES.items():
    try:
        said = str(call())
    except Exception as err:
        said = f"{type(err).__name__}: {err}"
    print(json.dumps({"name": name, "said": said}))
sys.stdout.flush()
