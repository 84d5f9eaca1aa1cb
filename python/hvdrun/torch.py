"""Elastic training with PyTorch: processes stay when others die, come or go.

    import hvdrun.torch as hvd

    job = hvd.init("gloo")                               # in place of init_process_group
    state = job.state(model=net, optimizer=opt, step=0)  # what a newcomer gets
    for step in job.steps(state, total=1000, batch=256, samples=len(x)):
        with step:                                       # takes the error of a broken world
            loss = step.mean(lossf(state.model(x[step.indices]), y[step.indices]))
            opt.zero_grad()
            loss.backward()
            step.commit()                                # have all the gradients? Then opt.step()

Under hvdrun the step is repeated in the next world when a rank is lost. Under torchrun, or alone, the same program runs in the one
world that there is. docs/pytorch.md is the guide.
"""
import atexit
import contextlib
import os
import re
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from hvdrun import _worker
from hvdrun._indices import Plan
from hvdrun._state import State, StateLost
from hvdrun._transport import Anew, Broken, Reconfigured, Transport, own_gpu

__all__ = ["init", "Job", "State", "Step", "Broken", "Removed", "StateLost"]

_TOLD = 1.0  # seconds in which hvdrun says that a rank is lost, after an error that is not known to be of a connection
_ABANDON = 0.05  # seconds in which a connect ends once a rank is lost; then its thread is abandoned
_VAIN = 5  # failures of one step in a row, without a loss, after which its error is the program's
_COMMUNICATION = re.compile(r"gloo|nccl|connection|broken pipe|socket|timed out|hvdrun", re.I)
_NETWORK = tuple(getattr(dist, name) for name in ("DistBackendError", "DistNetworkError", "DistStoreError") if hasattr(dist, name))


class Removed(SystemExit):
    """This process is in no further world. It ends the program with status 0 where nobody catches it.

    last says that the job ends, and that this rank is the one to save the state, which hvdrun waits for.
    """

    def __init__(self, last=False):
        super().__init__(0)
        self.last = last


def init(backend="gloo", timeout=timedelta(minutes=30)):
    """Returns this process's part in the job, in place of torch.distributed.init_process_group.

    backend is "gloo", "nccl" or "hvdrun". Under hvdrun the process enters a world when Job.steps begins, so that others train while
    it prepares. Under torchrun, or alone, there is a process group when init returns. timeout is that of collectives, for ranks
    that are silent and that nobody reports lost.
    """
    atexit.register(_worker.rest)
    worker = _worker.Worker.from_environment(f"torch {torch.__version__}")
    if backend == "hvdrun":
        from hvdrun import _backend

        _backend.register()
    if worker is None:
        transport = _Given(backend, timeout)
        job = Job(None, transport)
        job._world = {"generation": 0, "rank": dist.get_rank(), "size": dist.get_world_size()}
        return job
    # A process group of an earlier world may wait for the garbage collection. Its destructor waits for its threads, which a forked
    # process, as the worker of a DataLoader is, does not have.
    _worker.keep_garbage_of_parent()
    welcome = worker.hello()
    if backend == "hvdrun":
        transport = _backend.Transport(welcome, timeout)
    else:
        if "store" not in welcome:
            raise RuntimeError("hvdrun: it has no store for torch.distributed: it is older than this package")
        way = Reconfigured if backend == "gloo" and Reconfigured.possible() and not os.environ.get("HVD_TORCH_ANEW") else Anew
        transport = way(backend, welcome["store"], timeout)
    _worker.on_sigterm(worker)
    return Job(worker, transport)


class _Given(Transport):
    """The one world of torchrun, or of a process that is alone."""

    def __init__(self, backend, timeout):
        if "nccl" in backend:
            self.device = own_gpu()
        if "WORLD_SIZE" not in os.environ:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
            return
        try:
            dist.init_process_group(backend, timeout=timeout)
        except RuntimeError as err:
            if "libuv" not in str(err) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                raise
            # Torch that is built without libuv asks for it all the same where the agent has the store.
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout=timeout,
                                  wait_for_workers=False, use_libuv=False)
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            dist.init_process_group(backend, store=dist.PrefixStore(f"/worker/attempt_{attempt}", store),
                                    rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=timeout)


def _number(name, default):
    return int(os.environ.get(name) or default)


class Job:
    """This process's part in the job. Its methods are for the main thread.

    Before the first world, rank and size are those for which hvdrun has started the process.
    """

    def __init__(self, worker, transport):
        self._worker = worker
        self._transport = transport
        self._world = {}
        self._resets = []
        self._committed = 0  # the generation in which a commit has been reported
        self._stopped = False  # all ranks have agreed that no step follows
        self._trained = False  # this rank has made its last step
        self._over = False  # all have
        self._last = False  # the job ends, and this rank saves the state
        self._vain = 0
        if worker is not None:
            worker.on_lost = self._lose

    @property
    def rank(self):
        return self._world.get("rank", _number("RANK", 0))

    @property
    def size(self):
        return self._world.get("size", _number("WORLD_SIZE", 1))

    @property
    def local_rank(self):
        return self._world.get("local_rank", _number("LOCAL_RANK", 0))

    @property
    def local_size(self):
        return self._world.get("local_size", _number("LOCAL_WORLD_SIZE", 1))

    @property
    def cross_rank(self):
        return self._world.get("cross_rank", _number("GROUP_RANK", 0))

    @property
    def cross_size(self):
        return self._world.get("cross_size", _number("GROUP_WORLD_SIZE", 1))

    @property
    def generation(self):
        """The number of the world, which grows; 0 before the first, and without hvdrun."""
        return self._world.get("generation", 0)

    @property
    def device(self):
        """Where tensors are that all backends of the world can exchange."""
        return self._transport.device

    def on_reset(self, call):
        """Has call() called in each world, when the state is in step and before modules are wrapped; returns call.

        It may use collectives, and is the place for process groups of the program's own.
        """
        self._resets.append(call)
        return call

    def state(self, ddp=(), **parts):
        """Returns the State of these parts. ddp are options of DistributedDataParallel; None: modules are not wrapped."""
        return State(self, None if ddp is None else dict(ddp), parts)

    def steps(self, state, total, batch, samples=None, shuffle=True, seed=0):
        """Yields a Step until state.step is total; one that fails comes again, in the next world.

        batch is the number of samples of a step, on all ranks together. samples is the length of the data set, which is shuffled
        anew in each epoch; without it, indices go on without end.
        """
        plan = Plan(batch, samples, shuffle, seed, _shuffled)
        self._enter(state, "")
        while True:
            while state.step < total and not self._stopped:
                step = Step(self, state, plan)
                yield step
                if not step._entered:
                    raise RuntimeError("hvdrun: the body of the loop over job.steps begins with `with step:`")
                if step._failed is not None:
                    self._enter(state, step._failed)
                elif step._changed:
                    self._enter(state, "")
            if self._end(state):
                return

    # A world after the other.

    def _enter(self, state, cause):
        """Enters the next world, with the state in step. cause is why the last one ended, if it has failed."""
        if self._worker is None:
            state._settle()
            self._reset(state)
            return
        while True:
            try:
                self._next(state, cause)
                return
            except Exception as err:
                if isinstance(err, StateLost) or not self._broken(err):
                    raise
                cause = _first_line(err)

    def _next(self, state, cause):
        worker, transport = self._worker, self._transport
        state._unwrap()
        while True:
            worker.beat("joining", state.step)
            worker.ask(handle=transport.handle(), addresses=list(transport.addresses), commits=state.step, holds_state=state._holds,
                       trained=self._trained, lost=worker.lost_ranks(self.generation) if cause else [], cause=cause[:1000])
            transport.leave()  # while hvdrun waits for the others
            try:
                world = worker.answer()
            except _worker.Dismissed as dismissed:
                self._dismissed(state, dismissed)
            if world["is"] == "world":
                break
            transport.widen()
        worker.beat("connecting", state.step)
        transport.prepare(world)
        self._world = world
        connected = self._interruptible(lambda: transport.connect(world))
        transport.enter(world, connected)
        worker.beat("syncing", state.step)
        state._settle()
        self._reset(state)
        transport.settle()
        worker.beat("training", state.step)

    def _dismissed(self, state, dismissed):
        if self._trained and dismissed.why == "finished":
            raise _Over
        self._last = dismissed.last
        if not self._last:
            self._worker.report("leaving", state.step)
        raise Removed(self._last)

    def _reset(self, state):
        for call in self._resets:
            call()
        state._wrap()

    def _interruptible(self, call):
        """Calls in a thread, which is abandoned if the world loses a rank and the call does not end by the cut."""
        if self._worker is None:
            return call()
        generation, woken, outcome = self.generation, threading.Event(), []

        def run():
            try:
                outcome.append((call(), None))
            except BaseException as err:
                outcome.append((None, err))
            woken.set()

        self._woken = woken
        if not self._worker.lost(generation):
            threading.Thread(target=run, name="hvdrun", daemon=True).start()
            woken.wait()
            for _ in range(10):
                if outcome:
                    break
                self._transport.cut(told=True)  # also what has appeared since
                woken.clear()
                woken.wait(_ABANDON / 10)
        if not outcome:
            self._transport.abandon()
            raise Broken(f"hvdrun: world {generation} has lost a rank before its first step")
        result, err = outcome[0]
        if err is not None:
            raise err
        return result

    _woken = threading.Event()

    def _lose(self, generation, ranks):
        """The thread of the socket learns that a world cannot continue."""
        if generation == self._world.get("generation") and not self._over:
            self._transport.cut(told=True)
            self._woken.set()

    def _broken(self, err):
        """Whether an error is that of a broken world, which the next one repairs."""
        if self._worker is None or isinstance(err, (_worker.Error, _Over)):
            return False
        # What trips over anything that an operation has left raises anything.
        if not isinstance(err, RuntimeError) and not self._transport.silent:
            return False
        generation = self.generation
        told = self._worker.lost(generation)
        if not told and not isinstance(err, (Broken, *_NETWORK)) and not _COMMUNICATION.search(str(err)):
            told = self._worker.lost(generation, _TOLD)
            if not told:
                return False
        self._vain = 0 if told else self._vain + 1
        if self._vain >= _VAIN:
            return False
        # The peers that wait for this rank fail too, and at once.
        self._transport.cut()
        return True

    def _agree(self, *flags):
        """Whether any rank has each flag: collective. It raises if not all ranks are here, or what they have sent has not arrived."""
        self._check()
        # An operation of NCCL that is aborted ends without an error, and its result is anything: a number of the world tells.
        number = (self.generation + 1) * 0x9E3779B1 % (1 << 40)
        sums = torch.tensor([*flags, number], dtype=torch.int64, device=self.device)
        dist.all_reduce(sums)
        *counts, total = sums.tolist()
        self._check()
        if total != self.size * number:
            raise Broken(f"hvdrun: not all ranks of world {self.generation} have come to an agreement")
        return [count > 0 for count in counts]

    def _arrived(self):
        """Raises if what the ranks have sent each other has not arrived, where an operation does not: collective."""
        if self._transport.silent:
            self._agree()

    def _check(self):
        """Blocks until what this rank has asked for has ended, and raises if the world has lost a rank until then."""
        if self._worker is not None:
            self._transport.finish()
            if self._worker.lost(self.generation):
                raise Broken(f"hvdrun: world {self.generation} has lost a rank")

    def _end(self, state):
        """Reports that training is done, if all ranks of the world agree; else the next world goes on."""
        if self._worker is None:
            return True
        self._trained = True
        try:
            self._agree()
        except RuntimeError as err:
            if not self._broken(err):
                raise
            try:
                self._enter(state, _first_line(err))
            except _Over:
                self._over = True
                return True
            self._trained = False
            return False
        self._over = True
        self._worker.report("done", state.step)
        self._worker.beat("outside", state.step)
        return True

    @contextlib.contextmanager
    def _saving(self, commits):
        """Tells hvdrun of a checkpoint that is written within it, if that is the job's last one; its value is called with the bytes
        that are on disk."""
        if self._worker is None or not self._last and not (self._over and self.rank == 0):
            yield lambda written: None
            return
        self._worker.report("writing", commits)
        try:
            yield lambda written: self._worker.beat("saving", commits, written)
        except BaseException:
            self._worker.report("not_written", commits)
            raise
        self._worker.report("written", commits)


def _first_line(err):
    """An error without the frames of C++."""
    return f"{type(err).__name__}: {err}".split("\n")[0]


class _Over(Exception):
    """The job is done, and this rank has done all of it."""


def _shuffled(n, seed, epoch):
    generator = torch.Generator()
    generator.manual_seed((seed * 1000003 + epoch) & (1 << 63) - 1)
    order = torch.randperm(n, generator=generator)
    return _Slices(order)


class _Slices:
    """A tensor of indices whose slices are lists."""

    def __init__(self, order):
        self._order = order

    def __getitem__(self, at):
        return self._order[at].tolist()


class Step:
    """One step of the training: an update of the state from one batch. It is a context that takes the error of a broken world."""

    def __init__(self, job, state, plan):
        self._job, self._state = job, state
        self.number = state.step
        self.epoch = plan.epoch(self.number)
        # The number of samples of the step, on all ranks together.
        self.batch = plan.count(self.number)
        # The samples of this rank.
        self.indices = plan.part(self.number, job.rank, job.size)
        self._entered = self._done = self._changed = False
        self._stop = False
        self._failed = None

    @property
    def scale(self):
        """By which a sum over this rank's samples is multiplied, so that the mean over ranks is the mean over the batch."""
        return self._job.size / self.batch

    def mean(self, loss):
        """The loss whose gradients, averaged over ranks as DistributedDataParallel does, are those of the mean over the batch.

        loss is the mean over this rank's samples, or has an element for each. Parts may be uneven, or empty.
        """
        if loss.dim() == 0:
            # The mean over nothing is not a number, and so would be its gradients.
            return loss * (len(self.indices) * self.scale) if self.indices else torch.nan_to_num(loss * 0)
        return loss.sum() * self.scale

    def stop(self):
        """Makes this step the last one, if any rank says so before it commits."""
        self._stop = True

    def commit(self, update=None):
        """Applies the step when all ranks have come so far: collective, the last thing in the context.

        It calls update(), by default a step of all optimizers of the state, then of its schedulers. A rank that is lost before makes
        it raise, and nothing is applied.
        """
        job, state = self._job, self._state
        worker = job._worker
        changed, stop = job._agree(worker is not None and worker.changed(), self._stop)
        state.__dict__["_torn"] = True
        (update or state._update)()
        state._parts["step"] = self.number + 1
        state.__dict__["_torn"] = False
        self._done, self._changed = True, changed
        job._stopped = stop
        job._vain = 0
        if worker is not None:
            if job._committed != job.generation:
                job._committed = job.generation
                worker.report("committed", state.step)
            worker.beat("training", state.step)

    def __enter__(self):
        self._entered = True
        self._state._buffers.save()
        return self

    def __exit__(self, kind, err, trace):
        if err is None:
            if not self._done:
                raise RuntimeError("hvdrun: the step ends without step.commit()")
            return False
        if not isinstance(err, Exception) or not self._job._broken(err):
            return False
        if not self._done:
            self._state._undo()
        self._failed = _first_line(err)
        return True
