"""Programs that lose a rank or whose ranks differ, each with the right value: programs.py FOLDER NAME

A rank that has to die sends itself SIGKILL once, and creates a file in FOLDER to remember that. A rank with the right result prints
the line "all right" at the end; a wrong result is an AssertionError.
"""
import itertools
import os
import signal
import sys
import time
from datetime import timedelta

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
    """Kills the rank, once for each name, unless it is alone in its world."""
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


def train(state, opt, total=20, at=10, fault=die, update=None, **more):
    """Makes the steps on each rank; rank 1 dies within one, or has another fault."""
    for step in job.steps(state, total=total, batch=8, **more):
        with step:
            backward(state, step, opt)
            if step.number == at:
                fault()
            step.commit(update)


def trains(**more):
    """Calls train with a net whose weight is the number of steps at the end."""
    net = line()
    opt = sgd(net)
    train(job.state(model=net, optimizer=opt), opt, **more)
    assert net.weight.item() == -20, net.weight


def second():
    """Returns whether this process is the worker in the second slot, which a replacement is too."""
    return os.environ["HVD_SLOT"] == "1"


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
        every = [None] * job.size
        dist.all_gather_object(every, {"rank": job.rank})
        dist.barrier()
        assert one.item() == job.size and [of["rank"] for of in every] == [*range(job.size)]
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
    """A loop of the program's own, with hvdrun.torch.run."""
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


def naive_evaluation():
    """A collective between steps, where nothing handles its error."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)
    for step in job.steps(state, total=20, batch=8):
        with step:
            backward(state, step, opt)
            step.commit()
        if step.done and step.number == 10:
            die()
            dist.all_reduce(torch.ones(1))  # between steps


def naive_end():
    """A collective after the loop, where hvdrun counts the job as done."""
    trains(at=-1)
    die()
    dist.all_reduce(torch.ones(1))  # after the loop


def bare(update=None):
    """The program calls the module instead of the attribute of the state, so nothing averages the gradients."""
    net = line()
    opt = sgd(net, 0.1)
    state = job.state(model=net, optimizer=opt)
    x = torch.arange(80.0)[:, None]
    for step in job.steps(state, total=20, batch=8, samples=80):
        with step:
            opt.zero_grad()
            step.mean(net(x[step.indices]).mean()).backward()
            step.commit(update and (lambda: opt.step()))


def never_synchronized():
    """All passes are within no_sync."""
    net = line()
    opt = sgd(net, 0.1)
    state = job.state(model=net, optimizer=opt)
    for step in job.steps(state, total=20, batch=8, samples=80):
        with step:
            opt.zero_grad()
            with state.model.no_sync():
                step.mean(state.model(torch.tensor(step.indices, dtype=torch.float32)[:, None]).mean()).backward()
            step.commit()


def own_rate():
    """Each rank applies the gradients with a different rate."""
    net = line()
    state = job.state(model=net)
    for step in job.steps(state, total=200, batch=8):
        with step:
            net.zero_grad()
            step.mean(state.model(torch.ones(len(step.indices), 1)).mean()).backward()
            step.commit(lambda: net.weight.data.add_(net.weight.grad, alpha=-0.1 * (1 + job.rank)))


def torn_update():
    """A rank dies in a collective of the update, so no rank has the complete step."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)

    def update():
        opt.step()
        if state.step == 10:
            die()
        dist.all_reduce(torch.ones(1))

    train(state, opt, at=-1, update=update)


def of_its_own():
    """A plain loop sums its gradients itself."""
    w = torch.zeros(1)
    state = job.state(ddp=None, w=w)
    for step in job.steps(state, total=20, batch=8):
        with step:
            grad = torch.tensor([float(len(step.indices))])
            dist.all_reduce(grad)
            if step.number == 10:
                die()
            step.commit(lambda: w.sub_(grad / step.batch))
    assert w.item() == -20, w


def parts_differ():
    """One rank has created a part differently."""
    net = nn.Linear(2 if second() else 1, 1, bias=False)
    opt = sgd(net)
    train(job.state(model=net, optimizer=opt), opt)


# Faults of one rank, once or in each of its processes.

def leaves(how, once_only=True):
    def fault():
        if job.rank == 1 and (not once_only or once("left")) or how == "stop":
            {"exit": lambda: sys.exit(0), "_exit": lambda: os._exit(0), "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
             "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV), "term": lambda: os.kill(os.getpid(), signal.SIGTERM)}[how]()
            time.sleep(0.01)  # the handler of a signal runs
    trains(fault=fault)


def breaks():
    """All ranks leave the loop before its end."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)
    for step in job.steps(state, total=20, batch=8):
        with step:
            backward(state, step, opt)
            step.commit()
        if step.number == 10:
            break  # before the end


def by_islice():
    """A loop over epochs around a loop over steps: in its count of steps, a repeated step counts twice."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)
    steps = job.steps(state, total=20, batch=8, samples=80)
    for _ in range(2):
        for step in itertools.islice(steps, 10):
            with step:
                backward(state, step, opt)
                if step.number == 10:
                    die()
                step.commit()


def skips_bad():
    """One rank skips a bad batch with `continue`."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)
    for step in job.steps(state, total=20, batch=8):
        with step:
            if step.number == 10 and second():
                continue
            backward(state, step, opt)
            step.commit()


def skips_together():
    """All ranks skip a step because one has a bad batch."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)
    for step in job.steps(state, total=20, batch=8):
        with step:
            loss = backward(state, step, opt)
            bad = torch.tensor([float(step.number == 10 and job.rank == 1)])
            dist.all_reduce(bad)
            if step.number == 11:
                die()
            step.commit(None if bad.item() == 0 else lambda: None)
    assert net.weight.item() == -19 and loss is not None, net.weight


def prints():
    """The last lines of a killed rank are printed although the program does not flush them."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)
    for step in job.steps(state, total=20, batch=8):
        with step:
            backward(state, step, opt)
            print("rank", job.rank, "is at step", step.number)
            if step.number == 10:
                die()
            step.commit()


def progress(those):
    """A progress bar of a library."""
    yield from those


def enumerated():
    """A loop whose code after the context is not under step.done, wrapped in other iterators."""
    net = line()
    opt = sgd(net)
    state = job.state(model=net, optimizer=opt)
    for i, step in enumerate(progress(job.steps(state, total=20, batch=8))):
        with step:
            backward(state, step, opt)
            step.commit()
        assert i >= 0  # after the context


class Bad(Squares):
    def __getitem__(self, i):
        if 32 <= i < 40 and os.environ["HVD_SLOT"] == "1":
            raise ValueError(f"bad sample {i}")
        return super().__getitem__(i)


class Dying(Squares):
    def __getitem__(self, i):
        if i >= 40 and once("worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


def loads(kind):
    net = line()
    opt = sgd(net, 1e-6)
    state = job.state(model=net, optimizer=opt, seen=[])
    data = torch.utils.data.DataLoader(kind(), num_workers=1, multiprocessing_context="fork")
    for step in job.steps(state, total=20, batch=8, data=data, shuffle=False):
        with step:
            x, _ = step.data
            opt.zero_grad()
            step.mean(state.model(x).mean()).backward()
            state.seen.append(step.number)
            step.commit()
    assert state.seen == [*range(20)], state.seen


def by_sampler():
    """DistributedSampler and a loop over epochs of the program's own, which starts its epoch again in each world."""
    net = line()
    opt = sgd(net, 1e-4)
    state = job.state(model=net, optimizer=opt, epoch=0, seen=[])
    data = Squares()

    def loop():
        sampler = torch.utils.data.DistributedSampler(data, job.size, job.rank, seed=3)
        while state.epoch < 3:
            sampler.set_epoch(state.epoch)
            state.seen = []
            for x, i in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
                state.begin()
                opt.zero_grad()
                state.model(x).mean().backward()
                if state.step == 10:
                    die()
                every = [None] * job.size
                dist.all_gather_object(every, i.tolist())
                state.seen = state.seen + sum(every, [])
                if state.commit():
                    raise hvd.Changed
            assert set(state.seen) == set(range(80)), state.seen
            state.begin()
            state.epoch += 1
            state.commit(lambda: None, step=False)

    hvd.run(state, loop)
    assert state.epoch == 3


def operations():
    """Each collective of torch.distributed in a step, in which the last rank dies before it."""
    w = torch.zeros(1)
    state = job.state(ddp=None, w=w)
    groups = []

    @job.on_reset
    def make():
        groups[:] = [dist.new_group([r for r in range(job.size) if r % 2 == k]) for k in range(min(2, job.size))]

    def gather_object(n):
        all_of = [None] * n
        dist.all_gather_object(all_of, {"rank": job.rank})
        return [of["rank"] for of in all_of] == [*range(n)]

    def broadcast_object(n):
        those = [{"step": state.step}] if job.rank == 0 else [None]
        dist.broadcast_object_list(those, src=0)
        return those == [{"step": state.step}]

    def all_to_all(n):
        got = [torch.empty(1, dtype=torch.int64) for _ in range(n)]
        dist.all_to_all(got, [torch.tensor([job.rank])] * n)
        return [t.item() for t in got] == [*range(n)]

    def neighbours(n):
        got = torch.ones(1)
        if n > 1:
            for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), (job.rank + 1) % n),
                                                   dist.P2POp(dist.irecv, got, (job.rank - 1) % n)]):
                request.wait()
        return got.item() == 1

    def in_groups(n):
        one = torch.ones(1)
        dist.all_reduce(one, group=groups[job.rank % 2])
        return one.item() == len(range(job.rank % 2, n, 2))

    def later(n):
        many = torch.ones(1 << 16)
        dist.all_reduce(many, async_op=True).wait()
        return many[-1].item() == n

    def gather(n):
        all_of = [torch.empty(1) for _ in range(n)] if job.rank == 0 else None
        dist.gather(torch.tensor([float(job.rank)]), all_of, dst=0)
        return job.rank > 0 or [t.item() for t in all_of] == [*range(n)]

    def reduce(n):
        one = torch.ones(1)
        dist.reduce(one, dst=0)
        return job.rank > 0 or one.item() == n

    def scatter(n):
        got = torch.empty(1)
        dist.scatter(got, [torch.tensor([float(r)]) for r in range(n)] if job.rank == 0 else None, src=0)
        return got.item() == job.rank

    def barrier(n):
        return dist.barrier() is None

    def monitored(n):
        return dist.monitored_barrier(timeout=timedelta(minutes=5)) is None

    all_of = [gather_object, broadcast_object, all_to_all, neighbours, in_groups, later, gather, reduce, scatter, barrier, monitored]
    if not hasattr(dist, "_reconfigure"):
        all_of.remove(all_to_all)  # gloo of old torch has none
    for step in job.steps(state, total=3 * len(all_of), batch=8):
        operation = all_of[step.number // 3]
        with step:
            if step.number % 3 == 1:
                while job.size == 1 and not job._worker.changed():
                    time.sleep(0.01)  # until somebody can die
                if job.size > 1:
                    die(job.size - 1, operation.__name__)
            assert operation(job.size), operation
            step.commit(lambda: w.add_(1))
    assert w.item() == 3 * len(all_of), w
    if job.rank == 0:
        dead = {name for name in os.listdir(FOLDER)}
        assert len(dead) > len(all_of) // 2, dead


def before_the_loop(how):
    {"barrier": dist.barrier, "sampler": lambda: torch.utils.data.DistributedSampler(Squares()), "rank": dist.get_rank,
     "wrapper": lambda: nn.parallel.DistributedDataParallel(line()), "init": lambda: dist.init_process_group("gloo"),
     "neither": lambda: None}[how]()


PROGRAMS = {**{of.__name__: of for of in (
    alternating, evaluation, at_the_end, own_loop, cell_twice, naive_evaluation, naive_end, bare, never_synchronized, own_rate, torn_update,
    of_its_own, parts_differ, breaks, by_islice, skips_bad, skips_together, by_sampler, operations, prints, enumerated)},
            **{f"differ_{name}": lambda name=name, value=value: differ(**{name: value})
               for name, value in dict(batch=16, total=25, samples=88).items()},
            **{f"loader_{context}": lambda context=context: loader(context) for context in ("forkserver", "spawn")},
            **{f"leaves_{how}": lambda how=how: leaves(how) for how in ("exit", "_exit", "interrupt", "segv", "term")},
            **{f"before_{how}": lambda how=how: before_the_loop(how) for how in ("barrier", "sampler", "rank", "wrapper", "init", "neither")},
            "always_exits": lambda: leaves("exit", once_only=False), "bare_update": lambda: bare(True),
            "bad_sample": lambda: loads(Bad), "dying_loader": lambda: loads(Dying)}

if __name__ == "__main__":
    job = hvd.init("gloo")
    PROGRAMS[NAME]()
    print("all right", flush=True)
