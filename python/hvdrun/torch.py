"""Elastic training with PyTorch: when a process dies, the others keep running.

    import hvdrun.torch as hvd

    job = hvd.init("gloo")                               # in place of init_process_group
    state = job.state(model=net, optimizer=opt, step=0)  # what a newcomer gets
    for step in job.steps(state, total=1000, batch=256, samples=len(x)):
        with step:                                       # catches the error of a broken world
            loss = step.mean(lossf(state.model(x[step.indices]), y[step.indices]))
            opt.zero_grad()
            loss.backward()
            step.commit()                                # opt.step(), once all ranks have their gradients

Under hvdrun the step is repeated in the next world when a rank is lost. Under torchrun, or alone, the same program runs in a
single world. docs/pytorch.md is the guide.
"""
from __future__ import annotations

import ast
import atexit
import contextlib
import inspect
import linecache
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from hvdrun import _worker

_worker.greet("torch")

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from hvdrun import _environ, _indices
from hvdrun._data import Ahead, check
from hvdrun._state import PLAN, PlansDiffer, State, StateLost, differ
from hvdrun._transport import Anew, Broken, Reconfigured, Transport, own_gpu

__all__ = ["init", "run", "Job", "State", "Step", "Micro", "Plan", "Broken", "Changed", "PlansDiffer", "Removed", "StateLost"]

_Call = TypeVar("_Call", bound=Callable[[], object])
_Result = TypeVar("_Result")

_ABANDON = 0.05  # seconds after the loss of a rank in which a connect must end, before its thread is abandoned
_OWN = 2  # number of consecutive failures that this rank began while no rank was lost, after which the error is the program's
_FRAMES = 4  # number of frames searched for the loop over steps; tqdm's frames can be in between
_VAIN = 20  # like _OWN, for failures that any rank began
# Words in errors of connections that another rank has closed.
_CLOSED = re.compile(r"closed|reset|broken pipe|abort|timed out|connect|remote|peer", re.I)
# Marks in errors of a Work for which the program itself waits.
_NATIVE = re.compile(r"\bgloo/|ProcessGroup|\.(cc|cpp|cu|h):\d+")
# Modules whose errors can mean that the world is broken.
_WORLD = ("torch.distributed.", "torch.autograd", "torch._tensor", "torch.nn.parallel.distributed", "hvdrun.")
_NETWORK = tuple(getattr(dist, name) for name in ("DistBackendError", "DistNetworkError", "DistStoreError") if hasattr(dist, name))
_job = None  # the job of this process


def __dir__() -> list[str]:
    return __all__


class Changed(Exception):
    """Raised by the training function of hvdrun.torch.run after a commit, to enter the next world: see job.changed."""


class Removed(SystemExit):
    """This process gets no place in a further world. If it is not caught, it ends the program with status 0.

    Attributes:
        last: whether the job ends and this rank must save the state; hvdrun waits for it.
    """

    last: bool

    def __init__(self, last: bool = False) -> None:
        super().__init__(0)
        self.last = last


def init(backend: str = "gloo", timeout: timedelta = timedelta(minutes=30)) -> Job:
    """Returns this process's part in the job, in place of torch.distributed.init_process_group.

    Under hvdrun the process enters a world when Job.steps or run begins, so that others train while it prepares. Under torchrun, or
    alone, init blocks until all ranks have come, and makes the process group. A second call, for example when a notebook's cell
    runs again, returns the same job.

    Args:
        backend: "gloo", "nccl" or "hvdrun". With "nccl" the GPU of the local rank becomes the current one.
        timeout: the maximum time of a collective, for ranks that are silent and not reported as lost.

    Raises:
        ValueError: the job has another backend already.
        RuntimeError: the process group cannot be made, or hvdrun has ended.
    """
    global _job
    if _job is not None:
        if backend != _job._backend:
            raise ValueError(f"hvdrun: init was called with the backend {_job._backend!r}, and now with {backend!r}")
        return _job
    _job = _init(backend, timeout)
    _job._backend = backend
    return _job


def _init(backend, timeout):
    atexit.register(_worker.rest)
    worker = _worker.Worker.from_environment(f"torch {torch.__version__}")
    if worker is not None:
        _rendezvous_handlers["env"] = _refuse
    if backend == "hvdrun":
        from hvdrun import _backend

        _backend.register()
    if worker is None:
        transport = _Given(backend, timeout)
        job = Job(None, transport)
        job._world = {"generation": 0, "rank": dist.get_rank(), "size": dist.get_world_size()}
        return job
    # The process group of an earlier world can be garbage that is not collected yet. Its destructor waits for its threads, which do
    # not exist in a forked process such as the worker of a DataLoader.
    _worker.keep_garbage_of_parent()
    welcome = worker.hello()
    if backend == "hvdrun":
        transport = _backend.Transport(welcome, timeout)
    else:
        if "store" not in welcome:
            raise RuntimeError("hvdrun has no store for torch.distributed, because it is older than this package: install the package of its "
                               "version, or none")
        way = Reconfigured if backend == "gloo" and Reconfigured.possible() and not os.environ.get("HVD_TORCH_ANEW") else Anew
        transport = way(backend, welcome["store"], timeout)
    _worker.on_sigterm(worker)
    _worker.tell_failures(worker, _NOT_YET)
    job = Job(worker, transport)
    atexit.register(job._explain_end, os.getpid())
    return job


_WORLDS = ("worlds begin with job.steps or hvdrun.torch.run, so that others train while this process prepares. Before that, use job.rank "
           "and job.size; put what needs collectives into a function of job.on_reset, and take samples by step.indices")
# Torch's error for a program that uses torch.distributed before the first world, and the remedy.
_NOT_YET = "Default process group has not been initialized", "hvdrun: " + _WORLDS


def _refuse(*args, **options):
    """Replaces torch's rendezvous "env", in which a newcomer would wait for ranks that have already met."""
    raise RuntimeError("hvdrun: the program or a library has called init_process_group, for example for a DeviceMesh or a Trainer (use "
                       f"hvdrun.transformers), but hvdrun creates the process group of each world: {_WORLDS}")


def run(state: State, train: Callable[[], _Result], more: bool = False) -> _Result:
    """Calls train() on all ranks of a world, again in the next world when the world breaks or changes, and returns its value.

    It is for loops of other libraries. train continues from the state: it calls state.begin before a step or another collective
    action, and state.commit when the action can be applied. After a commit, it raises Changed if job.changed, at a place where it can
    be called again.

    Args:
        state: a State, of Job.state.
        train: a function without arguments.
        more: whether collectives follow (Job.together, or another run): see Job.steps.

    Returns:
        the value of train.

    Raises:
        Removed: this process is in no further world.
        StateLost: no rank has a complete state any more.
        Exception: an error of train, unless a world has broken.
    """
    job = state._job
    job._come(state)
    while True:
        try:
            result = train()
        except Changed:
            cause = ""
        except Exception as err:
            if not job._broken(err, state):
                raise
            state.undo()
            cause = _first_line(err)
        else:
            job._clean()
            if job._end(state, more):
                return result
            continue
        job._enter(state, cause)


class _Given(Transport):
    """The only world of a job under torchrun, or of a process that runs alone."""

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
            # If the agent has the store, a torch built without libuv requests libuv too, and fails.
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout=timeout,
                                  wait_for_workers=False, use_libuv=False)
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            dist.init_process_group(backend, store=dist.PrefixStore(f"/worker/attempt_{attempt}", store),
                                    rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=timeout)


def _number(name, default):
    return int(os.environ.get(name) or default)


class Job:
    """This process's part in the job. Its methods are for the main thread.

    Before the first world, rank and size are those for which hvdrun has started the process. They change with each world: read
    them where you use them.

    Attributes:
        changed: whether all ranks have agreed, in the last commit, that the hosts have changed.
    """

    changed: bool

    def __init__(self, worker, transport):
        self._worker = worker
        self._transport = transport
        self._world = {}
        self._resets = []
        self._reported = 0  # the generation in which a commit has been reported
        self._state = None  # the state that has entered the world
        self._calls = 0  # number of calls of together
        self._done = False  # this rank has reported that it is done
        self.changed = False
        self._stopped = False  # all ranks have agreed that no step follows
        self._trained = False  # this rank has made its last step
        self._over = False  # all ranks have
        self._last = False  # the job ends and this rank saves the state
        self._dismissed_why = ""
        self._left = ""  # the line at which the program has left the loop over steps
        self._vain = self._own = 0
        if worker is not None:
            worker.on_lost = self._lose

    @property
    def rank(self) -> int:
        """This process's number in the world, from 0 to size - 1."""
        return self._world.get("rank", _number("RANK", 0))

    @property
    def size(self) -> int:
        """The number of processes of the world."""
        return self._world.get("size", _number("WORLD_SIZE", 1))

    @property
    def local_rank(self) -> int:
        """This process's number among those of its host, from 0."""
        return self._world.get("local_rank", _number("LOCAL_RANK", 0))

    @property
    def local_size(self) -> int:
        """The number of processes of the world on this host."""
        return self._world.get("local_size", _number("LOCAL_WORLD_SIZE", 1))

    @property
    def cross_rank(self) -> int:
        """The number of this host among those that have a process with this local rank, from 0."""
        return self._world.get("cross_rank", _number("GROUP_RANK", 0))

    @property
    def cross_size(self) -> int:
        """The number of hosts that have a process with this local rank."""
        return self._world.get("cross_size", _number("GROUP_WORLD_SIZE", 1))

    @property
    def generation(self) -> int:
        """The number of the world, which grows; 0 before the first, and without hvdrun."""
        return self._world.get("generation", 0)

    @property
    def device(self) -> torch.device:
        """The device of tensors that all backends of the world can exchange."""
        return self._transport.device

    def on_reset(self, call: _Call) -> _Call:
        """Registers a function that is called in each world, the first included, after the sync of the state and before modules are wrapped.

        Create process groups of your own there. A registered function is not added again.

        Args:
            call: a function without arguments, which may use collectives; all ranks call the same.

        Returns:
            call, so that on_reset is a decorator too.
        """
        if call not in self._resets:
            self._resets.append(call)
        return call

    def report(self, **numbers: float) -> None:
        """Sends numbers such as loss=0.5 to the page, the status and the metrics of the job.

        It does not block. The page draws the numbers of rank 0. Without hvdrun it does nothing.

        Args:
            numbers: the newest values; a program has at most 16 names.
        """
        if self._worker is not None:
            self._worker.figures({name: float(value) for name, value in numbers.items()})

    def __repr__(self) -> str:
        return f"<hvdrun.torch.Job: rank {self.rank} of {self.size}, generation {self.generation}>"

    def state(self, ddp: Mapping[str, Any] | None = {}, each_epoch: Iterable[str] = (), **parts: Any) -> State:
        """Returns the State of these parts, which must be the same on all ranks. It does not block.

        Args:
            ddp: options of DistributedDataParallel; None: modules are not wrapped.
            each_epoch: names of schedulers that commit steps at the end of an epoch instead of in each step.
            **parts: what a newcomer gets; see State. step is 0 by default.

        Raises:
            TypeError: a part contains something that the state cannot track, or a checkpoint cannot have; the error names it.
            ValueError: a part has a name that State has, two tensors have the same name, or each_epoch names no scheduler.
        """
        return State(self, None if ddp is None else dict(ddp), parts, tuple(each_epoch))

    def steps(self, state: State, total: int, batch: int, samples: int | None = None, shuffle: bool = True, seed: int = 0,
              evaluate: Callable[[], object] | None = None, every: int | str | None = None,
              data: torch.utils.data.DataLoader[Any] | None = None, more: bool = False) -> Iterator[Step]:
        """Yields a Step until state.step is total; a step that fails is repeated in the next world.

        It blocks between steps while a world forms. All ranks must give the same numbers.

        Args:
            state: what a step changes, of Job.state.
            total: the value of state.step after the last step: a number of steps, counted from the start of the training.
            batch: the number of samples of a step, on all ranks together.
            samples: the length of the data set, which each epoch shuffles again; None: that of data, or, without data, indices
                without an end.
            shuffle: whether each epoch has another order.
            seed: the seed of that order.
            evaluate: a function that all ranks call every few steps (every), and after the last. It may use collectives, and is
                called again in the next world if a rank is lost meanwhile.
            every: a number of steps, or "epoch"; None: only after the last step.
            data: a DataLoader whose data set, worker processes and collate_fn make step.data in advance. Its own sampler and batch
                size are not used.
            more: whether collectives follow, by Job.together or hvdrun.torch.run. This rank then counts as done when its process
                ends; the others have --finish-timeout after the end of the first one.

        Yields:
            a Step, which the body enters by `with step:` and commits.

        Raises:
            Removed: this process is in no further world.
            StateLost: no rank has a whole state any more.
            PlansDiffer: the ranks have given different numbers.
            TypeError: a number is no int, or data has an IterableDataset or a sampler of its own.
            ValueError: batch or samples is less than 1, every does not fit, or the ranks' states have other parts.
            RuntimeError: the body has not entered or not committed its step, or hvdrun has ended.
        """
        if data is not None:
            check(data)
            samples = len(data.dataset) if samples is None else samples
        if isinstance(total, bool) or not isinstance(total, int):
            raise TypeError(f"hvdrun: total={total!r}: the number of steps must be an int")
        if self._trained and self._worker is not None:
            raise RuntimeError("hvdrun: a program can have only one loop over job.steps, in which a newcomer finds the others: step.epoch counts "
                               "the epochs, and evaluate= is called between steps")
        self._trained = self._stopped = False
        plan = Plan(batch, samples, shuffle, seed)
        period = -1 if every is None else 0 if every == "epoch" else every
        if evaluate is None and every is not None or isinstance(period, bool) or not isinstance(period, int) or period < -1:
            raise ValueError(f"hvdrun: every={every!r}: it must be a number of steps, or 'epoch', and needs evaluate")
        if period == 0 and samples is None:
            raise ValueError("hvdrun: every='epoch' needs samples: without them an epoch has no end")
        state.__dict__["_plan"] = [("total", total), ("batch", batch), ("samples", -1 if samples is None else samples),
                                   ("shuffle", int(shuffle)), ("seed", int(seed) & (1 << 62) - 1), ("every", period)]
        ahead = Ahead(data, plan, self) if data is not None else None
        tail = _tail(sys._getframe(1)) if self.rank == 0 else None
        if tail:
            print(f"hvdrun: {tail}: code after `with step` also runs after a step that has failed and is repeated: put it under "
                  "`if step.done:`", file=sys.stderr, flush=True)
        self._come(state)

        def due():
            at = state.step
            ends = self._stopped or at >= total or (plan.ends_epoch(at - 1) if period == 0 else period > 0 and at % period == 0)
            return evaluate is not None and at > 0 and not state._acts and ends

        while True:
            while due() or state.step < total and not self._stopped:
                if due():
                    self._act(state, evaluate)
                    continue
                step = Step(self, state, plan, total, ahead)
                try:
                    yield step
                except GeneratorExit:
                    frame = sys._getframe(1)
                    self._left = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    raise
                if not step._entered:
                    raise RuntimeError("hvdrun: the body of the loop over job.steps must begin with `with step:`")
                if step._failed is not None:
                    self._enter(state, step._failed)
                elif self.changed and not due():
                    self._enter(state, "")
            if self._end(state, more):
                return

    def together(self, state: State, call: Callable[[], _Result]) -> _Result:
        """Calls call() on all ranks after the training, and again in the next world if a rank is lost meanwhile.

        It follows job.steps(…, more=True) or run(…, more=True). A rank that comes later skips the calls that the others have completed,
        and gets their value, which is sent by pickle.

        Args:
            state: that of the training.
            call: a function without arguments, which may use collectives.

        Returns:
            the value of call.

        Raises:
            RuntimeError: the training has not ended, or more was not given.
            Removed: this process is in no further world.
            Exception: what call raises, unless a world has broken.
        """
        if self._state is not state or not self._trained:
            raise RuntimeError("hvdrun: job.together follows job.steps(…, more=True); between steps, give job.steps evaluate")
        if self._over and self._worker is not None:
            raise RuntimeError("hvdrun: job.together needs job.steps(…, more=True): hvdrun was told that training is done")
        number, self._calls = self._calls, self._calls + 1
        while len(state._results) <= number:
            self._act(state, lambda: state._results.append(call()))
        return state._results[number]

    def _act(self, state, call):
        """Calls call() on all ranks as an act of the state, which all ranks complete, or none."""
        results, trained = len(state._results), self._trained
        try:
            state.begin(step=False)
            call()
            state.commit(lambda: None, step=False)
        except Exception as err:
            del state._results[results:]
            if not self._broken(err, state):
                raise
            state.undo()
            cause = _first_line(err)
        else:
            self._clean()
            if self.changed and not trained:
                self._enter(state, "")
            return
        self._enter(state, cause)
        # A newcomer first runs its loop to the end.
        while trained and not self._agree_on_end(state):
            if self._over:
                raise Removed()
        self._trained = trained

    # From one world to the next.

    def _come(self, state):
        """Enters a world with the state. If this process is in a world already, by another state, it only synchronises the state."""
        if self._state is state and not self.changed:
            return
        if self._state is None or self.changed or self._worker is None:
            return self._enter(state, "")
        try:
            state._settle()
            state._wrap()
            self._state = state
            return
        except Exception as err:
            if not self._broken(err, state):
                raise
            cause = _first_line(err)
        self._enter(state, cause)

    def _enter(self, state, cause):
        """Enters the next world and synchronises the state. cause is the error that ended the last world; empty: it did not fail."""
        if self._worker is None:
            first = self._state is None
            state._settle()
            self._reset(state) if first else state._wrap()
            self._state, self.changed = state, False
            return
        while True:
            try:
                self._next(state, cause)
                self._state, self.changed = state, False
                return
            except Exception as err:
                if isinstance(err, (StateLost, PlansDiffer)) or not self._broken(err, state):
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
        _environ.tell(world)
        worker.beat("syncing", state.step)
        state._settle()
        self._reset(state)
        transport.settle()
        worker.beat("training", state.step)

    def _dismissed(self, state, dismissed):
        self._dismissed_why = dismissed.why
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
        """Calls call() in a thread, which is abandoned if the world loses a rank and cutting the connections does not end the call."""
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
                self._transport.cut(told=True)  # also connections that have appeared since
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
        """Ends the waits in a world that cannot continue. The thread of the socket calls it."""
        if generation == self._world.get("generation") and not self._over:
            self._transport.cut(told=True)
            self._woken.set()

    def _broken(self, err, state):
        """Reports whether an error means that the world is broken, so that the next world can repeat the step."""
        if self._worker is None or any(isinstance(e, (_worker.Error, _Over, StateLost, PlansDiffer)) for e in _chain(err)):
            return False
        generation = self.generation
        told = self._worker.lost(generation)
        if not told:
            worldly = [e for e in _chain(err) if isinstance(e, (Broken, *_NETWORK)) or isinstance(e, RuntimeError) and
                       (_raised_in(e, _WORLD) or _NATIVE.search(str(e)))]
            # Code that uses the result of a failed operation can raise any error.
            if not worldly and (self._transport.silent or isinstance(err, RuntimeError)):
                told = self._worker.lost(generation, _worker.TOLD)
            if not told and not worldly:
                return False
        if told:
            self._vain = self._own = 0
        else:
            self._vain += 1
            # If ranks fail although no rank is lost, the first of them has its own error, and the others see the connections that it
            # has closed.
            own = not any(isinstance(e, Broken) or _CLOSED.search(str(e)) for e in worldly)
            self._own += own
            if self._own >= _OWN or self._vain >= _VAIN:
                return False
            if own or self._vain > _OWN:
                print(f"hvdrun: rank {self.rank}: step {state.step} has failed, though no rank is known to be lost, and is repeated: "
                      f"{_first_line(err)}", file=sys.stderr, flush=True)
        # The cut makes the peers that wait for this rank fail too, at once.
        self._transport.cut()
        return True

    def _clean(self):
        """Resets the counts of failures, after the body of a step has ended without an error."""
        self._vain = self._own = 0

    def _agree(self, *flags, same=()):
        """Returns for each flag whether it is set on any rank, then for each number of same whether it differs between ranks: collective.

        It raises if some rank has not called it, or if data that was sent before has not arrived.
        """
        self._check()
        counts = self._transport.agree([*flags, *same, *(n * n for n in same)], self.generation, self.size, bits=not same)
        self._check()
        sums, squares = counts[len(flags):len(flags) + len(same)], counts[len(flags) + len(same):]
        return [count > 0 for count in counts[:len(flags)]] + [differ(self.size, *both) for both in zip(sums, squares)]

    def _arrived(self):
        """Raises if data that the ranks have sent has not arrived, where the transport's operations do not raise: collective."""
        if self._transport.silent:
            self._agree()

    def _check(self):
        """Blocks until the operations of this rank have ended, and raises if the world has lost a rank by then."""
        if self._worker is not None:
            self._transport.finish()
            if self._worker.lost(self.generation):
                raise Broken(f"hvdrun: world {self.generation} has lost a rank")

    def _end(self, state, more):
        """Reports that training is done if all ranks of the world agree. Otherwise the next world continues."""
        self._trained = True
        if self._worker is None:
            return True
        if not self._agree_on_end(state):
            return self._over
        if more:
            atexit.register(self._tell_done, state)  # registered after _worker.rest, so it runs first
            return True
        self._over = True
        self._tell_done(state)
        return True

    def _agree_on_end(self, state):
        """Reports whether all ranks of the world are at the end. If not, this rank has entered the next world, or the job is done (_over)."""
        try:
            self._agree()
            return True
        except Exception as err:
            if not self._broken(err, state):
                raise
            cause = _first_line(err)
        try:
            self._enter(state, cause)
        except _Over:
            self._over = True
            return False
        self._trained = False
        return False

    def _explain_end(self, pid):
        """Prints a message at the end of a process that has left its loop too early."""
        if self._trained or self._dismissed_why or self._worker.failed or pid != os.getpid():
            return
        if self._state is None:
            if self.rank == 0:
                print("hvdrun: the program has called hvd.init, and neither job.steps nor hvdrun.torch.run, so hvdrun has connected no "
                      "ranks, and no training would have survived the death of a rank (hvdrun.transformers has an elastic Trainer)",
                      file=sys.stderr, flush=True)
            return
        text = f"the program has left the loop over job.steps after step {self._state.step}, before its end"
        print(f"hvdrun: {self._left and self._left + ': '}{text}: step.stop(), before step.commit(), makes a step the last one on all ranks",
              file=sys.stderr, flush=True)
        self._worker.tell_failure(text, self._left)

    def _tell_done(self, state):
        if self._done or self._worker.failed:
            return
        self._done = self._worker.done = True
        self._worker.report("done", state.step)
        self._worker.beat("outside", state.step)

    @contextlib.contextmanager
    def saving(self, commits: int) -> Iterator[Callable[[int], None]]:
        """A context in which a checkpoint is written. If it is the job's last one, hvdrun waits for its end.

        State.save does this itself.

        Args:
            commits: the number of steps in the checkpoint.

        Yields:
            a function to call with the number of bytes that are on disk so far.
        """
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
    """Returns the type and the first line of an error, without the frames of C++."""
    return f"{type(err).__name__}: {err}".split("\n")[0]


class _Over(Exception):
    """The job is done, and this rank has completed it."""


def _chain(err):
    """Returns an error and the errors from which it was raised."""
    seen = []
    while err is not None and err not in seen:
        seen.append(err)
        err = err.__cause__ or err.__context__
    return seen


def _raised_in(err, modules):
    """Reports whether an error was raised in one of these modules, by the innermost Python frame."""
    trace = err.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").startswith(modules)


def _tail(frame):
    """Returns the place of code after `with step` that is not under `if step.done`, in the loop over steps of a frame or its callers.

    Returns None if there is no such code.
    """
    for _ in range(_FRAMES):
        if frame is None:
            return None
        loop, name, offset = _loop(frame)
        if loop is not None:
            break
        frame = frame.f_back
    else:
        return None
    after = False
    for n in loop.body:
        if after:
            if not isinstance(n, ast.If) or f"{name}.done" not in ast.unparse(n.test):
                return f"{frame.f_code.co_filename}:{n.lineno + offset}"
            if isinstance(n.body[-1], ast.Continue):
                return None
        after = after or _enters(n, {name}) is not None
    return None


def _loop(frame):
    """Returns the innermost loop around a frame's current line whose body enters the yielded value, the value's name, and the offset of
    its line numbers.
    """
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    first = 1
    try:
        if code.co_name != "<module>":
            first = code.co_firstlineno
            lines = inspect.getblock(lines[first - 1:])
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (SyntaxError, IndentationError):
        return None, "", 0  # a cell of a notebook, or the source is missing
    at = frame.f_lineno - first + 1
    for n in reversed([n for n in ast.walk(tree) if isinstance(n, ast.For) and n.lineno <= at <= n.end_lineno]):
        names = {t.id for t in ast.walk(n.target) if isinstance(t, ast.Name)}
        name = next((name for name in (_enters(inner, names) for inner in n.body) if name is not None), None)
        if name is not None:
            return n, name, first - 1
    return None, "", 0


def _enters(node, names):
    """Returns the first of the names that a with statement enters; None: it enters no such name, or is another statement."""
    entered = [getattr(item.context_expr, "id", "") for item in node.items] if isinstance(node, ast.With) else []
    return next((name for name in entered if name in names), None)


def _shuffled(n, seed, epoch):
    generator = torch.Generator()
    generator.manual_seed((seed * 1000003 + epoch) & (1 << 63) - 1)
    return _Slices(torch.randperm(n, generator=generator))


class _Slices:
    """A tensor of indices whose slices are lists."""

    def __init__(self, order):
        self._order = order

    def __getitem__(self, at):
        return self._order[at].tolist()


class Plan(_indices.Plan):
    """The batches of a training, whose size does not depend on the number of ranks. Job.steps makes one; other loops make their own.

    Args:
        batch: the number of samples of a step, on all ranks together.
        samples: the length of the data set, of which each epoch uses each sample once; None: indices without an end.
        shuffle: whether each epoch has another order, by torch.randperm.
        seed: the seed of that order.

    Raises:
        TypeError: batch or samples is not an int.
        ValueError: batch or samples is less than 1.
    """

    def __init__(self, batch: int, samples: int | None = None, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(batch, samples, shuffle, seed, _shuffled)


class Micro:
    """The samples of one forward and backward pass of a step: see Step.micro.

    Attributes:
        indices: the samples of this rank in this pass; the list may be empty.
    """

    indices: list[int]

    def __init__(self, step, indices):
        self._step = step
        self.indices = indices

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Step.mean for the samples of this pass.

        Args:
            loss: the mean over the samples of this pass, without a dimension; or one with an element for each sample.

        Returns:
            a tensor without a dimension, for backward.
        """
        return self._step._weigh(loss, len(self.indices))


class Step:
    """One step of the training: an update of the state from one batch. It is a context that catches the error of a broken world.

    Attributes:
        number: the value of state.step before it, from 0.
        epoch: the pass over the data set to which it belongs, from 0.
        ends_epoch: whether it is the last step of its epoch.
        batch: its number of samples, on all ranks together; the last step of an epoch may have fewer.
        indices: the samples of this rank; the list may be empty.
        done: whether it is committed. Put code after the context, such as a log line, under `if step.done`.
    """

    number: int
    epoch: int
    ends_epoch: bool
    batch: int
    indices: list[int]
    done: bool

    def __init__(self, job, state, plan, total, ahead):
        self._job, self._state, self._ahead, self._total = job, state, ahead, total
        self.number = state.step
        self.epoch = plan.epoch(self.number)
        self.ends_epoch = plan.ends_epoch(self.number)
        self.batch = plan.count(self.number)
        self.indices = plan.part(self.number, job.rank, job.size)
        self.done = False
        self._entered = self._stop = False
        self._data = self._failed = None

    def __repr__(self) -> str:
        return f"<hvdrun.torch.Step {self.number}: {len(self.indices)} of {self.batch} samples, {'' if self.done else 'not '}committed>"

    @property
    def data(self) -> Any:
        """The batch that the DataLoader data of Job.steps has loaded for indices; None for a rank without samples in this step. Blocks
        until it is ready."""
        if self._ahead is None:
            raise AttributeError("hvdrun: step.data needs job.steps(data=DataLoader(…))")
        if self._data is None:
            self._data = self._ahead.take(self.number, self._total)
        return self._data

    @property
    def scale(self) -> float:
        """The factor by which a sum over this rank's samples must be multiplied so that the mean over the ranks is that over the batch."""
        return self._job.size / self.batch

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss whose gradients, averaged over ranks as DistributedDataParallel does, are those of the mean over the batch.

        Parts may be uneven or empty. For several passes a step, use Micro.mean.

        Args:
            loss: the mean over this rank's samples, without a dimension; or one with an element for each sample.

        Returns:
            a tensor without a dimension, for backward.

        Raises:
            TypeError: loss is not a tensor.
        """
        return self._weigh(loss, len(self.indices))

    def _weigh(self, loss, count):
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"hvdrun: step.mean of a {type(loss).__name__}: it must be a tensor with gradients")
        if loss.dim() == 0:
            # The mean over no samples is NaN, and so would its gradients be.
            return loss * (count * self.scale) if count else torch.nan_to_num(loss * 0)
        return loss.sum() * self.scale

    def micro(self, passes: int) -> Iterator[Micro]:
        """Divides this rank's samples over several passes, whose gradients add up, and yields a Micro for each.

        Ranks exchange gradients only in the last pass, as with DistributedDataParallel.no_sync.

        Args:
            passes: their number, the same on all ranks.
        """
        n = len(self.indices)
        for i in range(passes):
            with contextlib.ExitStack() as stack:
                if i + 1 < passes:
                    for module in self._state._wrapped.values():
                        stack.enter_context(module.no_sync())
                yield Micro(self, self.indices[n * i // passes:n * (i + 1) // passes])

    def stop(self) -> None:
        """Makes this step the last one on all ranks. Call it before commit, on any rank."""
        self._stop = True

    def commit(self, update: Callable[[], object] | None = None) -> None:
        """Applies the step when all ranks have called it: a collective, and the last call in the context.

        Args:
            update: a function that applies the step, instead of stepping all optimizers of the state and then its schedulers. It uses
                no collectives: a rank that is lost meanwhile would leave the others with half a step.

        Raises:
            RuntimeError: a rank was lost before, so nothing is applied, and the context catches the error; or commit is called twice,
                or outside of the context, or has nothing to apply.
            ValueError: the gradients or the parameters differ between ranks.
        """
        if not self._entered:
            raise RuntimeError("hvdrun: step.commit() must be called within `with step:`")
        self._state._commit(update, True, self._stop, self.ends_epoch)
        self.done = True

    def __enter__(self) -> Step:
        self._entered = True
        self._state.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None) -> bool:
        if err is None:
            if not self.done:
                raise RuntimeError("hvdrun: the step has ended without step.commit(), which all ranks must call in each step: to skip a step, call "
                                   "step.commit(lambda: None)")
            self._job._clean()
            return False
        if not isinstance(err, Exception) or not self._job._broken(err, self._state):
            return False
        if not self.done:
            self._state.undo()
        self._failed = _first_line(err)
        return True
