#!/usr/bin/python3
"""Typical training programs, whose result does not depend on deaths: recipes.py FOLDER NAME...

Alone it runs the trainings with these names, one after the other. Under hvdrun it runs one, in which rank 1 kills itself once, before
the commit of step 6 or in an evaluation; at step 9 the others wait for the new worker. Each process appends the result of the training
to FOLDER/NAME as a line of JSON. "all" means all names when it runs alone, and "list" prints them.
"""
import itertools
import json
import os
import signal
import sys
import time

import hvdrun.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

FOLDER = sys.argv[1]
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # so that the order of sums shows in the last digits only
TOTAL, BATCH, SAMPLES = 14, 8, 45
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True).sin()
RECIPES = {}


def recipe(call):
    RECIPES[call.__name__] = call
    return call


def mark(name):
    return os.path.join(FOLDER, f"{name}-{NAME}")


def die(rank=1):
    """Kills the rank, once in a training."""
    if job.rank == rank and job.size > 1:
        try:
            os.close(os.open(mark("died"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def newcomer(at, number):
    """Waits at a step for the worker that replaces the dead one."""
    while number == at and job.size == 1 and job._worker is not None and os.path.exists(mark("died")) and not job._worker.changed():
        time.sleep(0.01)


def net(*more, seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), *more, nn.Linear(5, 1))


def each(out, y):
    """Returns the loss of each sample."""
    return ((out - y) ** 2).mean(1)


def train(state, body, update=None, at=6, **more):
    """The loop of most recipes: body computes the gradients, and update returns what is passed to commit."""
    given = dict(total=TOTAL, batch=BATCH, samples=SAMPLES, seed=1)
    given.update(more)
    for step in job.steps(state, **given):
        with step:
            body(step)
            if step.number == at:
                die()
            newcomer(9, step.number)
            step.commit(update(step) if update else None)
    return state


def plain(state, *optimizers, before=lambda step: None):
    """A body: one forward and backward pass of state.model."""
    def body(step):
        for optimizer in optimizers:
            optimizer.zero_grad()
        step.mean(each(state.model(X[step.indices]), Y[step.indices])).backward()
        before(step)
    return body


def numbers(*those):
    """Returns the result that is compared."""
    found = []
    for one in those:
        if isinstance(one, nn.Module):
            found += [v.detach().double().flatten().tolist() for v in one.state_dict().values()]
        elif isinstance(one, torch.Tensor):
            found.append(one.detach().double().flatten().tolist())
        else:
            found.append(one)
    return found


def rates(*optimizers):
    return [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]


@recipe
def schedulers():
    """Schedulers of every kind, stepped per step and per epoch."""
    nets = [net(seed=i) for i in range(7)]
    opts = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.5) for n in nets]
    opts[0] = torch.optim.Adam(nets[0].parameters(), lr=0.01)
    parts = {f"net{i}": n for i, n in enumerate(nets)} | {f"opt{i}": o for i, o in enumerate(opts)}
    kinds = dict(
        one=lr_scheduler.OneCycleLR(opts[0], max_lr=0.05, total_steps=TOTAL + 1),
        warm=lr_scheduler.CosineAnnealingWarmRestarts(opts[1], T_0=4, T_mult=2),
        several=lr_scheduler.SequentialLR(opts[2], [lr_scheduler.LinearLR(opts[2], 0.1, total_iters=4), lr_scheduler.ExponentialLR(opts[2], 0.9)], [4]),
        chained=lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(opts[3], 0.5, total_iters=5), lr_scheduler.ExponentialLR(opts[3], 0.9)]),
        by_lambda=lr_scheduler.LambdaLR(opts[4], lambda step: 1 / (1 + step)),
        cyclic=lr_scheduler.CyclicLR(opts[5], 0.01, 0.1, step_size_up=3),
        epochs=lr_scheduler.StepLR(opts[6], 1, 0.7))
    state = job.state(each_epoch=["epochs"], **parts, **kinds)

    def body(step):
        for i, opt in enumerate(opts):
            opt.zero_grad()
            step.mean(each(getattr(state, f"net{i}")(X[step.indices]), Y[step.indices])).backward()

    train(state, body)
    return numbers(rates(*opts), opts[0].param_groups[0]["betas"][0], [o.param_groups[0]["momentum"] for o in opts[1:]], *nets)


@recipe
def plateau():
    """ReduceLROnPlateau by a measure of all ranks, one of which dies after it was stepped."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sched = lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=0.5, factor=0.5)
    state = job.state(model=model, optimizer=opt, scheduler=sched, best=1e9, measures=[])

    def evaluate():
        part = torch.arange(job.rank, SAMPLES, job.size)
        with torch.no_grad():
            total = each(model(X[part]), Y[part]).sum()
        dist.all_reduce(total)
        state.measures.append(total.item())
        state.best = min(state.best, total.item())
        sched.step(total.item())
        if state.step == 6:
            die()

    train(state, plain(state, opt), at=-1, evaluate=evaluate, every=3)
    return numbers(rates(opt), sched.num_bad_epochs, state.best, state.measures, model)


@recipe
def swa():
    """An average of the weights from step 5 on, with its own schedule."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    average, slow, fast = AveragedModel(model), SWALR(opt, swa_lr=0.05, anneal_epochs=3), lr_scheduler.ExponentialLR(opt, 0.95)
    state = job.state(model=model, optimizer=opt, average=average, slow=slow, fast=fast)

    def update(step):
        def call():
            opt.step()
            if step.number < 5:
                fast.step()
            else:
                average.update_parameters(model)
                slow.step()
        return call

    train(state, plain(state, opt), update)
    return numbers(rates(opt), model, average)


class Shadow:
    """A program's own average of the weights, as many programs have it."""

    def __init__(self, model):
        self.model, self.values, self.live = model, {name: p.detach().clone() for name, p in model.named_parameters()}, {}

    def update(self):
        for name, p in self.model.named_parameters():
            self.values[name].mul_(0.7).add_(p.detach(), alpha=0.3)

    def swap_in(self):
        for name, p in self.model.named_parameters():
            self.live[name], p.data = p.data, self.values[name]

    def swap_out(self):
        for name, p in self.model.named_parameters():
            p.data = self.live.pop(name)

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        for name, value in values.items():
            self.values[name].copy_(value)


@recipe
def swapped():
    """An evaluation by averaged weights, which are swapped in and out; a rank dies in between."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shadow = Shadow(model)
    state = job.state(model=model, optimizer=opt, shadow=shadow, losses=[])

    def evaluate():
        shadow.swap_in()
        if state.step == 6:
            die()
        part = torch.arange(job.rank, SAMPLES, job.size)
        with torch.no_grad():
            loss = each(model(X[part]), Y[part]).sum()
        dist.all_reduce(loss)
        shadow.swap_out()
        state.losses.append(loss.item())

    train(state, plain(state, opt), lambda step: lambda: (opt.step(), shadow.update()), at=-1, evaluate=evaluate, every=3)
    return numbers(state.losses, *shadow.values.values(), model)


@recipe
def changed_in_evaluation():
    """An evaluation that steps schedulers, averages weights, and goes back to the best weights; a rank dies after it has done so."""
    model, best = net(), net()
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    average, slower = AveragedModel(model), lr_scheduler.StepLR(opt, 1, 0.9)
    state = job.state(model=model, best=best, optimizer=opt, average=average, slower=slower, least=1e9, backs=[])

    def evaluate():
        part = torch.arange(job.rank, SAMPLES, job.size)
        with torch.no_grad():
            loss = each(model(X[part]), Y[part]).sum()
        dist.all_reduce(loss)
        slower.step()
        average.update_parameters(model)
        if loss.item() < state.least * 0.99:
            state.least = loss.item()
            best.load_state_dict(model.state_dict())
        else:
            state.backs.append(state.step)
            model.load_state_dict(best.state_dict())
        if state.step == 8:
            die()
        dist.barrier()

    train(state, plain(state, opt), lambda step: opt.step, at=-1, evaluate=evaluate, every=2)
    assert state.backs, "no evaluation was worse"
    return numbers(state.backs, state.least, rates(opt), slower.last_epoch, model, best, average)


class Normalizer:
    """Running statistics of the inputs, as programs of reinforcement learning have them."""

    def __init__(self, size):
        self.mean, self.count = torch.zeros(size), 0

    def update(self, x, count):
        self.count += count
        self.mean += (x - self.mean * count) / self.count

    def state_dict(self):
        return dict(mean=self.mean, count=self.count)

    def load_state_dict(self, state):
        self.mean.copy_(state["mean"])
        self.count = state["count"]


@recipe
def normalized():
    """An object of the program's own that changes in the body of a step."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    normalizer = Normalizer(4)
    state = job.state(model=model, optimizer=opt, normalizer=normalizer)

    def body(step):
        total = X[step.indices].sum(0)
        dist.all_reduce(total)
        normalizer.update(total, step.batch)
        opt.zero_grad()
        step.mean(each(state.model(X[step.indices] - normalizer.mean), Y[step.indices])).backward()

    train(state, body)
    return numbers(normalizer.count, normalizer.mean, model)


@recipe
def lbfgs():
    """An optimizer that calls the loss itself: all ranks compute the same, without collectives."""
    model = net()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    state = job.state(ddp=None, model=model, optimizer=opt)
    plan = hvd.Plan(BATCH, SAMPLES, seed=1)

    def update(step):
        whole = plan.part(step.number, 0, 1)

        def closure():
            opt.zero_grad()
            loss = each(model(X[whole]), Y[whole]).mean()
            loss.backward()
            return loss

        return lambda: opt.step(closure)

    train(state, lambda step: None, update)
    return numbers(model)


@recipe
def clipped():
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)
    state = job.state(model=model, optimizer=opt, norms=[])

    def clip(step):
        state.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        nn.utils.clip_grad_value_(model.parameters(), 0.05)

    train(state, plain(state, opt, before=clip))
    return numbers(state.norms, model)


@recipe
def sparse():
    """Sparse gradients of an embedding, with their own optimizer."""
    torch.manual_seed(1)
    words = nn.Embedding(SAMPLES, 4, sparse=True)
    head = nn.Linear(4, 1)
    rare, often = torch.optim.SparseAdam(words.parameters(), lr=0.05), torch.optim.SGD(head.parameters(), lr=0.1)
    state = job.state(words=words, head=head, rare=rare, often=often)

    def body(step):
        rare.zero_grad()
        often.zero_grad()
        step.mean(each(state.head(state.words(torch.tensor(step.indices, dtype=torch.int64))), Y[step.indices])).backward()

    train(state, body)
    return numbers(words, head)


@recipe
def two_models():
    """An encoder and a decoder, each with its own optimizer, and a teacher that is not trained."""
    torch.manual_seed(2)
    encoder, decoder, teacher = nn.Linear(4, 3), nn.Linear(3, 4), net()
    teacher.requires_grad_(False)
    first, second = torch.optim.Adam(encoder.parameters(), lr=0.02), torch.optim.RMSprop(decoder.parameters(), lr=0.01)
    state = job.state(encoder=encoder, decoder=decoder, teacher=teacher, first=first, second=second)

    def body(step):
        for opt in (first, second):
            opt.zero_grad()
        x = X[step.indices]
        out = state.decoder(state.encoder(x))
        step.mean(each(out, x) + each(state.teacher(out), state.teacher(x))).backward()

    train(state, body)
    return numbers(encoder, decoder, teacher)


@recipe
def thawed():
    """Layers that train from step 4 on."""
    model = net()
    model[0].requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = job.state(model=model, optimizer=opt)
    body = plain(state, opt)

    def thaw(step):
        model[0].requires_grad_(step.number >= 4)
        body(step)

    train(state, thaw)
    return numbers(model)


@recipe
def norms():
    """Parametrizations, and statistics of batches, which are the same on all ranks as all samples of a step are."""
    torch.manual_seed(1)
    weight_norm = getattr(nn.utils.parametrizations, "weight_norm", nn.utils.weight_norm)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.BatchNorm1d(5, momentum=None), nn.Tanh(),
                          nn.BatchNorm1d(5), weight_norm(nn.Linear(5, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = job.state(model=model, optimizer=opt)

    def body(step):
        opt.zero_grad()
        n = max(len(step.indices), 2)  # one sample has no variance
        rows = X[step.number].expand(n, 4)
        step.mean(each(state.model(rows), Y[step.number].expand(n, 1)).mean()).backward()

    train(state, body)
    return numbers(model)


@recipe
def weighted():
    """Like WeightedRandomSampler: samples are drawn by weight, again in each epoch."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = job.state(model=model, optimizer=opt)
    weights = torch.arange(1.0, SAMPLES + 1)

    def body(step):
        order = torch.multinomial(weights, SAMPLES, replacement=True, generator=torch.Generator().manual_seed(step.epoch))
        drawn = order[step.indices]
        opt.zero_grad()
        step.mean(each(state.model(X[drawn]), Y[drawn])).backward()

    train(state, body)
    return numbers(model)


@recipe
def wrapped_loop():
    """tqdm and enumerate around the loop, with lines of a log after the commit and after the context."""
    try:
        from tqdm import tqdm
    except ImportError:
        def tqdm(those, **options):
            yield from those
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = job.state(model=model, optimizer=opt)
    inside, after = [], []
    body = plain(state, opt)
    for i, step in enumerate(tqdm(job.steps(state, total=TOTAL, batch=BATCH, samples=SAMPLES, seed=1), total=TOTAL, disable=True)):
        with step:
            body(step)
            if step.number == 6:
                die()
            newcomer(9, step.number)
            step.commit()
            inside.append(step.number)
        if step.done:
            after.append(step.number)
    first = inside[0]  # of a newcomer that of the others
    assert inside == after == [*range(first, TOTAL)], (inside, after)
    return numbers(model)


@recipe
def stops_early():
    """Early stopping: after an evaluation without improvement, the next step is the last one."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = job.state(model=model, optimizer=opt, best=1e9, bad=0)

    def evaluate():
        loss = each(model(X), Y).mean().item()
        state.bad, state.best = (0, loss) if loss < state.best * 0.97 else (state.bad + 1, state.best)
        if state.step == 6:
            die()

    for step in job.steps(state, total=100, batch=BATCH, samples=SAMPLES, seed=1, evaluate=evaluate, every=2):
        with step:
            plain(state, opt)(step)
            newcomer(9, step.number)
            if state.bad >= 3:
                step.stop()
            step.commit()
    return numbers(state.step, state.bad, state.best, model)


@recipe
def scaled():
    """A GradScaler: the gradient of step 3 is not finite, so its update is skipped and the scale is halved."""
    if not hasattr(torch.amp, "GradScaler"):
        return None
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    state = job.state(model=model, optimizer=opt, scaler=scaler)

    def body(step):
        opt.zero_grad()
        loss = step.mean(each(state.model(X[step.indices]), Y[step.indices]))
        scaler.scale(loss * (float("inf") if step.number == 3 else 1)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    train(state, body)
    return numbers(scaler.get_scale(), model)


@recipe
def accumulated():
    """Several passes per step, options of DistributedDataParallel, and gradients that are dropped at the end of a step."""
    model = net()
    opt = torch.optim.NAdam(model.parameters(), lr=0.02)
    state = job.state(ddp=dict(gradient_as_bucket_view=True, bucket_cap_mb=1), model=model, optimizer=opt)

    def body(step):
        for micro in step.micro(3):
            micro.mean(each(state.model(X[micro.indices]), Y[micro.indices])).backward()

    def update(step):
        return lambda: (opt.step(), opt.zero_grad())

    train(state, body, update)
    return numbers(model)


@recipe
def accumulated_over_steps():
    """Four steps add up their gradients, and the fourth applies them; an independent optimizer is stepped in each step."""
    model, other = net(), net(seed=2)
    opt, each_step = torch.optim.Adam(model.parameters(), lr=0.02), torch.optim.SGD(other.parameters(), lr=0.1)
    state = job.state(model=model, other=other, optimizer=opt, each_step=each_step)

    def body(step):
        each_step.zero_grad()
        step.mean(each(state.model(X[step.indices]), Y[step.indices]) / 4 + each(state.other(X[step.indices]), Y[step.indices])).backward()

    def update(step):
        def call():
            each_step.step()
            if step.number % 4 == 3:
                opt.step()
                opt.zero_grad()
        return call

    train(state, body, update)
    return numbers(model, other, *(p.grad for p in model.parameters()))


@recipe
def accumulated_by_hand():
    """Gradients of a tensor that the program averages itself, over steps."""
    weights = torch.zeros(4, 1, requires_grad=True)
    opt = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    state = job.state(ddp=None, weights=weights, optimizer=opt)

    def body(step):
        if step.number % 4 == 0:
            opt.zero_grad(set_to_none=False)
        loss = step.mean(each(X[step.indices] @ weights, Y[step.indices]))
        grad, = torch.autograd.grad(loss, weights)
        dist.all_reduce(grad)
        weights.grad = grad / job.size if weights.grad is None else weights.grad + grad / job.size

    train(state, body, lambda step: opt.step if step.number % 4 == 3 else lambda: None)
    return numbers(weights, weights.grad)


@recipe
def never_stepped():
    """A layer without an optimizer, whose gradient is never cleared, and which counts when gradients are clipped."""
    model = net()
    opt = torch.optim.SGD(model[2].parameters(), lr=0.1)
    state = job.state(model=model, optimizer=opt, norms=[])

    def clip(step):
        state.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())

    train(state, plain(state, opt, before=clip))
    return numbers(state.norms, model)


@recipe
def hooked():
    """A communication hook, which the wrapper of each world gets."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = job.state(model=model, optimizer=opt)
    hooked = []

    def halves(group, bucket):
        work = dist.all_reduce(bucket.buffer().div_(2 * job.size), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    def body(step):
        if hooked != [job.generation]:
            state.model.register_comm_hook(None, halves)
            hooked[:] = [job.generation]
        plain(state, opt)(step)

    train(state, body)
    return numbers(model)


@recipe
def rates_by_hand():
    """Rates that the body sets, and one that it changes from step to step."""
    model = net()
    opt = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.1}], lr=0.1)
    state = job.state(model=model, optimizer=opt)

    def before(step):
        opt.param_groups[0]["lr"] = 0.1 * (1 + step.number) / TOTAL
        opt.param_groups[1]["lr"] *= 0.9

    train(state, plain(state, opt, before=before))
    return numbers(rates(opt), model)


@recipe
def values():
    """Values that people keep beside the model."""
    import collections
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = job.state(model=model, optimizer=opt, history=[], counts=collections.Counter(), table={"best": [0, None]}, seen=torch.zeros(SAMPLES),
                      places=set(), name="run")

    def body(step):
        plain(state, opt)(step)
        state.history.append({"step": step.number, "epoch": step.epoch})
        state.counts[step.epoch] += step.batch
        state.table["best"][0] += 1
        state.places.add(step.number % 3)
        state.seen[step.number] += 1
        state.name += str(step.epoch)

    train(state, body)
    return numbers([h["step"] for h in state.history], sorted(state.counts.items()), state.table["best"][0], sorted(state.places), state.seen,
                   state.name == "run" + "0" * 6 + "1" * 6 + "2" * 2, model)


@recipe
def tied():
    """A weight that two layers share."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    state = job.state(model=model, optimizer=opt)

    def body(step):
        opt.zero_grad()
        step.mean(each(state.model(X[step.indices]), X[step.indices])).backward()

    train(state, body)
    assert model[2].weight is model[0].weight
    return numbers(model)


class Trainer:
    """A class of the program's own, as tutorials have it."""

    def __init__(self):
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = job.state(model=self.model, optimizer=self.optimizer)

    def _batch(self, step):
        self.optimizer.zero_grad()
        loss = step.mean(each(self.state.model(X[step.indices]), Y[step.indices]))
        loss.backward()
        return loss

    def _apply(self, step):
        step.commit()

    def train(self):
        for step in job.steps(self.state, total=TOTAL, batch=BATCH, samples=SAMPLES, seed=1):
            self._step(step)

    def _step(self, step):
        with step:
            self._batch(step)
            if step.number == 6:
                die()
            newcomer(9, step.number)
            self._apply(step)


@recipe
def nested():
    trainer = Trainer()
    trainer.train()
    return numbers(trainer.model)


@recipe
def without_source():
    """As a cell of a notebook: there is no file with the lines."""
    scope = dict(globals())
    exec(compile("""
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
state = job.state(model=model, optimizer=opt)
for step in job.steps(state, total=TOTAL, batch=BATCH, samples=SAMPLES, seed=1):
    with step:
        plain(state, opt)(step)
        if step.number == 6:
            die()
        newcomer(9, step.number)
        step.commit()
""", "<cell 1>", "exec"), scope)
    return numbers(scope["model"])


@recipe
def seeds():
    """Dropout and seeds by rank: in the end the weights are the same on all ranks, but their values cannot be predicted."""
    model = net(nn.Dropout(0.5))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(100 + job.rank)
    state = job.state(model=model, optimizer=opt)
    train(state, plain(state, opt), more=True)

    def gather():
        all_of = [None] * job.size
        dist.all_gather_object(all_of, numbers(model))
        return all_of

    all_of = job.together(state, gather)
    return all(one == all_of[0] for one in all_of)


@recipe
def language_model():
    """A recurrent model whose hidden state goes from batch to batch, with an update by hand and a rate that falls, as the word language
    model has them. A step takes the next words of BATCH texts, and each rank some of the texts."""
    torch.manual_seed(1)
    words = torch.randint(0, 6, (TOTAL + 1, 3, BATCH), generator=torch.Generator().manual_seed(2))
    model = nn.ModuleDict(dict(embed=nn.Embedding(6, 4), rnn=nn.GRU(4, 5), head=nn.Linear(5, 6)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x, hidden):
            out, hidden = self.parts["rnn"](self.parts["embed"](x), hidden)
            return self.parts["head"](out), hidden

    model_ = Model()
    state = job.state(model=model_, hidden=torch.zeros(1, BATCH, 5), rate=1.0, best=None)

    def body(step):
        texts = [i % BATCH for i in step.indices]
        model_.zero_grad()
        out, hidden = state.model(words[step.number][:, texts], state.hidden[:, texts])
        loss = nn.functional.cross_entropy(out.transpose(1, 2), words[step.number + 1][:, texts], reduction="none").mean(0)
        step.mean(loss).backward()
        nn.utils.clip_grad_norm_(model_.parameters(), 0.25)
        whole = torch.zeros_like(state.hidden)
        whole[:, texts] = hidden.detach()
        dist.all_reduce(whole)
        state.hidden.copy_(whole)

    def update(step):
        return lambda: [p.data.add_(p.grad, alpha=-state.rate) for p in model_.parameters()]

    def evaluate():
        loss = sum(p.abs().sum().item() for p in model_.parameters())
        if state.best is not None and loss > state.best:
            state.rate /= 4
        state.best = loss

    train(state, body, update, samples=None, evaluate=evaluate, every=3)
    return numbers(state.rate, state.hidden, model_)


@recipe
def contrastive():
    """The embeddings of all ranks are in the loss of each."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = job.state(model=model, optimizer=opt)

    def body(step):
        own = state.model(X[step.indices]).tanh()
        size = -(-step.batch // job.size)
        padded = torch.full((size, 1), float("nan"))
        padded[:len(own)] = own.detach()
        all_of = [torch.empty_like(padded) for _ in range(job.size)]
        dist.all_gather(all_of, padded)
        others = torch.cat(all_of)
        others = others[~others.isnan()]
        opt.zero_grad()
        step.mean(torch.logsumexp(own * others, 1) - (own * own.detach()).sum(1)).backward()

    train(state, body)
    return numbers(model)


@recipe
def dcgan():
    """Two steps for each batch: real and made samples for the discriminator, then the generator."""
    torch.manual_seed(3)
    g, d = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)), nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1))
    g_opt, d_opt = (torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in (g, d))
    state = job.state(generator=g, discriminator=d, g_opt=g_opt, d_opt=d_opt, d_losses=[])
    criterion = nn.BCEWithLogitsLoss(reduction="none")

    def body(step):
        n = len(step.indices)
        noise = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(step.number // 2))[step.indices]
        if step.number % 2 == 0:
            d_opt.zero_grad()
            real = criterion(state.discriminator(X[step.indices]), torch.ones(n, 1)).mean(1)
            step.mean(real).backward()
            made = criterion(state.discriminator(g(noise).detach()), torch.zeros(n, 1)).mean(1)
            step.mean(made).backward()
            total = (real + made).detach().sum()
            dist.all_reduce(total)
            state.d_losses.append(total.item() / step.batch)
        else:
            g_opt.zero_grad()
            step.mean(criterion(d(state.generator(noise)), torch.ones(n, 1)).mean(1)).backward()

    train(state, body, lambda step: g_opt.step if step.number % 2 else d_opt.step)
    return numbers(state.d_losses, g, d)


@recipe
def reinforce():
    """Episodes in place of samples, several calls of the model for one backward pass, and a running reward."""
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    state = job.state(model=model, optimizer=opt, running=0.0)

    def body(step):
        losses, rewards = [], []
        for episode in step.indices:
            dice = torch.Generator().manual_seed(episode)
            at, chosen, gained = torch.zeros(4), [], 0.0
            for _ in range(5):
                right = state.model(at).sigmoid()
                goes = torch.rand(1, generator=dice) < right
                chosen.append(torch.where(goes, right, 1 - right).log())
                at = at.roll(1)
                at[0] += 1.0 if goes else -1.0
                gained += at.sum().item()
            losses.append(-(torch.cat(chosen).sum() * (gained - state.running)))
            rewards.append(gained)
        opt.zero_grad()
        step.mean(torch.stack(losses)).backward()
        total = torch.tensor(sum(rewards))
        dist.all_reduce(total)
        state.running = 0.95 * state.running + 0.05 * total.item() / step.batch

    train(state, body, samples=None)
    return numbers(state.running, model)


@recipe
def sharpness():
    """An optimizer with two passes, of which the first moves the weights: two steps, with the weights before them as a part."""
    import copy
    model = net()
    before = copy.deepcopy(model)
    before.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = job.state(model=model, before=before, optimizer=opt)
    samples = {}

    def body(step):
        if step.number % 2 == 0 or not samples:
            samples["at"] = hvd.Plan(BATCH, SAMPLES, seed=1).part(step.number // 2, 0, 1)
        mine = samples["at"][len(samples["at"]) * job.rank // job.size:len(samples["at"]) * (job.rank + 1) // job.size]
        opt.zero_grad()
        (each(state.model(X[mine]), Y[mine]).sum() * job.size / len(samples["at"])).backward()

    def update(step):
        @torch.no_grad()
        def climb():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for p, old in zip(model.parameters(), before.parameters()):
                old.copy_(p)
                p.add_(p.grad, alpha=0.05 / norm.item())

        @torch.no_grad()
        def descend():
            for p, old in zip(model.parameters(), before.parameters()):
                p.copy_(old)
            opt.step()

        return descend if step.number % 2 else climb

    train(state, body, update)
    return numbers(model)


@recipe
def sharpness_by_call():
    """The same by one step: the second pass calls the model with other weights, and leaves the parameters as they are."""
    if not hasattr(torch, "func"):
        return None
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = job.state(model=model, optimizer=opt)

    def body(step):
        plain(state, opt)(step)
        rho = 0.05 / torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = {f"module.{name}": p + rho * p.grad for name, p in model.named_parameters()}
        opt.zero_grad()
        out = torch.func.functional_call(state.model, moved, (X[step.indices],))
        step.mean(each(out, Y[step.indices])).backward()

    train(state, body)
    return numbers(model)


@recipe
def recomputed():
    """Activations that the backward pass computes again, in a static graph of which a step uses a part."""
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.unused = net(), nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False)

    torch.manual_seed(4)
    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = job.state(ddp=dict(static_graph=True), model=model, optimizer=opt)
    train(state, plain(state, opt))
    return numbers(model)


class Meter:
    """As in the ImageNet example."""

    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count])
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()

    @property
    def average(self):
        return self.sum / self.count


@recipe
def imagenet():
    """Meters that all ranks add up, the best result, and a checkpoint by rank 0 in each epoch."""
    import shutil
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    state = job.state(model=model, optimizer=opt, scheduler=lr_scheduler.StepLR(opt, 1, gamma=0.1), each_epoch=["scheduler"], best=-1e9, losses=[])
    path = os.path.join(FOLDER, "imagenet-checkpoint")

    def validate():
        model.eval()
        meter = Meter()
        with torch.no_grad():
            for i in range(job.rank * 4, SAMPLES, job.size * 4):
                part = X[i:i + 4]
                meter.update(-each(model(part), Y[i:i + 4]).mean().item(), len(part))
        meter.all_reduce()
        model.train()
        if state.step == 6:
            die()
        best, state.best = meter.average > state.best, max(meter.average, state.best)
        state.losses.append(meter.average)
        if job.rank == 0:
            torch.save({"model": model.state_dict(), "best": state.best}, path)
            if best:
                shutil.copyfile(path, path + "-best")

    train(state, plain(state, opt), at=-1, evaluate=validate, every="epoch")
    return numbers(state.best, state.losses, rates(opt), model)


@recipe
def checkpoints():
    """Rank 0 saves at the end of each epoch, and the training goes on from there, by another number of ranks."""
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    sched = lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=TOTAL + 1)
    state = job.state(model=model, optimizer=opt, scheduler=sched, losses=[])
    state.restore(os.path.join(FOLDER, "checkpoints-folder"))
    body = plain(state, opt)
    for step in job.steps(state, total=int(os.environ.get("TOTAL", TOTAL)), batch=BATCH, samples=SAMPLES, seed=1):
        with step:
            body(step)
            if step.number == 6:
                die()
            state.losses.append(step.epoch)
            step.commit()
        if step.done and step.ends_epoch and job.rank == 0:
            state.save(os.path.join(FOLDER, "checkpoints-folder"))
    return numbers(state.step, state.losses, rates(opt), model)


if __name__ == "__main__":
    if sys.argv[2:] == ["list"]:
        print(*RECIPES, sep="\n")
        sys.exit()
    job = hvd.init("gloo")
    for NAME in RECIPES if sys.argv[2:] == ["all"] else sys.argv[2:]:
        result = RECIPES[NAME]()
        if result is None:
            continue
        with open(os.path.join(FOLDER, NAME), "a") as f:
            f.write(json.dumps(result) + "\n")
