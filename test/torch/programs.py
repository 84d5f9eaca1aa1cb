"""Programs that lose a rank or whose ranks differ, each with the value that is right: programs.py FOLDER NAME

A rank that has to die sends itself SIGKILL once, and makes a file in FOLDER for that. A rank that has what is right ends with the line
"all right"; what is wrong is an AssertionError.
"""
import os
import signal
import sys

import hvdrun.torch as hvd
import torch
import torch.distributed as dist
from torch import nn

FOLDER, NAME = sys.argv[1:3]
torch.set_num_threads(1)


def once(name):
    try:
        os.close(os.open(os.path.join(FOLDER, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


def die(rank=1, name="dead"):
    """The rank dies here, once for each name; the last one of a world does not."""
    if job.rank == rank and job.size > 1 and once(name):
        os.kill(os.getpid(), signal.SIGKILL)


def line():
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    return net


def sgd(net, lr=1.0):
    return torch.optim.SGD(net.parameters(), lr=lr)


def backward(state, step, opt):
    """The gradient of the weight is 1."""
    loss = step.mean(state.model(torch.ones(len(step.indices), 1)).mean())
    opt.zero_grad()
    loss.backward()
    return loss


def train(state, opt, total=20, at=10, **more):
    """Each rank makes the steps, and rank 1 dies within one."""
    for step in job.steps(state, total=total, batch=8, **more):
        with step:
            backward(state, step, opt)
            if step.number == at:
                die()
            step.commit()


def cell_twice():
    for _ in range(2):
        state_of = hvd.init("gloo")
        assert state_of is job
        net = line()
        opt = sgd(net)
        state = job.state(model=net, optimizer=opt)
        train(state, opt, total=3)
        assert net.weight.item() == -3


def alternating():
    """A GAN: the second network's loss needs the first one's update."""
    d, g = line(), line()
    od, og = sgd(d), sgd(g)
    state = job.state(d=d, g=g, od=od, og=og)
    for step in job.steps(state, total=20, batch=8):
        with step:
            x = torch.ones(len(step.indices), 1)
            if step.number % 2 == 0:
                od.zero_grad()
                step.mean(state.d(x).mean()).backward()
                if step.number == 10:
                    die()
                step.commit(od.step)
            else:
                og.zero_grad()
                step.mean(state.g(x).mean() * d.weight.detach().item()).backward()
                if step.number == 15:
                    die(0, "dead too")
                step.commit(og.step)
    assert (d.weight.item(), g.weight.item()) == (-10, 55), (d.weight, g.weight)


def evaluation():
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt, evaluations=[])

    def evaluate():
        if state.step == 10:
            die()
        if state.step == 30:
            die(0, "dead too")
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == job.size
        state.evaluations.append(state.step)

    train(state, opt, total=30, at=-1, samples=80, evaluate=evaluate, every="epoch")
    assert state.evaluations == [10, 20, 30], state.evaluations


def at_the_end():
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)
    train(state, opt, more=True)

    def metric():
        die(2, "dead at the end")
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item(), job.size

    total, size = job.together(state, metric)
    assert total == size, (total, size)
    assert job.together(state, lambda: "second") == "second"


def differ(**other):
    state = job.state(w=torch.zeros(1))
    given = dict(total=20, batch=8, samples=80, seed=0)
    if os.environ["HVD_SLOT"] == "1":
        given.update(other)
    for step in job.steps(state, **given):
        with step:
            step.commit(lambda: None)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i


def loader(context):
    net = line()
    opt = sgd(net, 1e-6)
    state = job.state(model=net, optimizer=opt, used=[])
    data = torch.utils.data.DataLoader(Squares(), num_workers=2, multiprocessing_context=context)
    for step in job.steps(state, total=20, batch=8, data=data):
        with step:
            x, i = step.data
            assert i.tolist() == step.indices and x.flatten().tolist() == [float(n) for n in step.indices]
            opt.zero_grad()
            step.mean(state.model(x).mean()).backward()
            every = [None] * job.size
            dist.all_gather_object(every, i.tolist())
            if step.number == 13:
                die()
            state.used = state.used + sum(every, [])
            step.commit()
    assert sorted(state.used[:80]) == sorted(state.used[80:]) == [*range(80)], state.used


def own_loop():
    """A loop that is not ours, by hvdrun.torch.run."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt, seen=[])
    plan = hvd.Plan(8, 80)

    def loop():
        while state.step < 20:
            state.begin()
            indices = plan.part(state.step, job.rank, job.size)
            opt.zero_grad()
            loss = state.model(torch.ones(len(indices), 1)).sum() * job.size / plan.count(state.step)
            loss.backward()
            state.seen.append(state.step)
            if state.step == 10:
                die()
            if state.commit():
                raise hvd.Changed
        return "trained"

    assert hvd.run(state, loop) == "trained"
    assert net.weight.item() == -20 and state.seen == [*range(20)], (net.weight, state.seen)


def too_early():
    dist.barrier()


PROGRAMS = {**{of.__name__: of for of in (alternating, evaluation, at_the_end, own_loop, too_early, cell_twice)},
            **{f"differ_{name}": lambda name=name, value=value: differ(**{name: value})
               for name, value in dict(batch=16, total=25, samples=88).items()},
            **{f"loader_{context}": lambda context=context: loader(context) for context in ("forkserver", "spawn")}}

if __name__ == "__main__":
    job = hvd.init("gloo")
    PROGRAMS[NAME]()
    print("all right", flush=True)
