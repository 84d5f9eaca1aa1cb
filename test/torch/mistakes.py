#!/usr/bin/python3
"""Mistakes of programs, alone, and what is said of them: a line of JSON for each, its name and the error."""
import json
import sys
import types

import hvdrun.torch as hvd
import torch

job = hvd.init("gloo")


def loop(body, total=2, samples=None, batch=4, each_epoch=(), every=None, evaluate=None, **parts):
    net = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {"model": net, "optimizer": opt, **parts}
    state = job.state(each_epoch=each_epoch, **{name: v(net, opt) if isinstance(v, types.FunctionType) else v for name, v in given.items() if v is not None})
    for step in job.steps(state, total=total, batch=batch, samples=samples, evaluate=evaluate, every=every):
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


MISTAKES = {
    "good": lambda: loop(commit),
    "good by epoch": lambda: loop(commit, total=6, samples=8, scheduler=scheduler, each_epoch=["scheduler"]),
    "optimizer in the body": lambda: loop(step_first),
    "parameters by hand": lambda: loop(by_hand),
    "commit twice": lambda: loop(twice),
    "no commit": lambda: loop(lambda *_: None),
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
