"""The state that the ranks of a job share: its parts, their transfer from one rank to the others, and checkpoints."""
from __future__ import annotations

import inspect
import io
import math
import operator
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hvdrun import _checkpoint, _values
from hvdrun._before import Before, is_scheduler, pace, put_back, snapshot, watch

_BUCKET = 32 << 20  # bytes of one broadcast
_ALIGN = 16
_EACH = 16  # ranks compare gradients in the first commits of a world, and then in every _EACH-th
PLAN = 6  # numbers of a plan, which must be the same on all ranks
_SAME = 1 << 7  # largest difference of the measures of equal gradients: 0.4 to 0.8 %


_trains = operator.attrgetter("requires_grad")


class _Pickler(pickle.Pickler):
    """Pickles a value without its tensors, which are sent separately."""

    def __init__(self, file):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors = []

    def persistent_id(self, obj):
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided or obj.is_quantized:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1, obj.dtype, tuple(obj.shape), obj.device.type


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, tensors):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid):
        return self._tensors[pid[0]]


class _Scanner(pickle.Unpickler):
    """Collects the types and shapes of the tensors that are sent separately."""

    def __init__(self, file):
        super().__init__(file)
        self.found = []

    def persistent_load(self, pid):
        self.found.append(pid)
        return None


def _buckets(sizes):
    """Yields the ranges of tensors that are sent together: the first index, the offset of each tensor, and the total length."""
    begin, offsets, total = 0, [], 0
    for i, size in enumerate(sizes):
        if offsets and total + size > _BUCKET:
            yield begin, offsets, total
            begin, offsets, total = i, [], 0
        offsets.append(total)
        total += -(-size // _ALIGN) * _ALIGN
    if offsets:
        yield begin, offsets, total


def broadcast(values, root, rank, device, arrived):
    """Sends values from the root to all ranks, and returns them: collective. On the other ranks their tensors are new, on device.

    All ranks call arrived(), which raises if the data has not arrived.
    """
    text = torch.zeros(0, dtype=torch.uint8)
    tensors = []
    if rank == root:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(values)
        text, tensors = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8), pickler.tensors
    length = torch.tensor([text.numel()], dtype=torch.int64, device=device)
    dist.broadcast(length, src=root)
    arrived()
    text = text.to(device) if rank == root else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(text, src=root)
    arrived()
    if rank == root:
        flat = [_values.bytes_of(t) for t in tensors]
        sizes = [f.numel() for f in flat]
    else:
        raw = _raw(text)
        scanner = _Scanner(io.BytesIO(raw))
        scanner.load()
        found = [(dtype, shape) for _, dtype, shape, _ in scanner.found]
        sizes = [torch.empty(0, dtype=dtype).element_size() * _count(shape) for dtype, shape in found]
    received = []
    for begin, offsets, total in _buckets(sizes):
        bucket = torch.empty(total, dtype=torch.uint8, device=device)
        if rank == root:
            for i, offset in enumerate(offsets):
                bucket[offset:offset + sizes[begin + i]] = flat[begin + i]
        dist.broadcast(bucket, src=root)
        if rank != root:
            for i, offset in enumerate(offsets):
                dtype, shape = found[begin + i]
                received.append(bucket[offset:offset + sizes[begin + i]].view(dtype).reshape(shape))
    arrived()
    return values if rank == root else _Unpickler(io.BytesIO(raw), received).load()


def _raw(text):
    """Returns the content of a tensor of bytes without numpy."""
    text = text.cpu()
    raw = bytearray(text.numel())
    torch.frombuffer(raw, dtype=torch.uint8).copy_(text)
    return bytes(raw)


def _count(shape):
    n = 1
    for side in shape:
        n *= side
    return n


class State:
    """The parts of the state that all ranks share, as attributes. Job.state creates it.

    A part is a module, which the attribute returns wrapped in DistributedDataParallel while it is in a world; a tensor; anything
    with state_dict and load_state_dict, such as an optimizer, a scheduler or a GradScaler; or a value, which may be assigned.

    Attributes:
        step: the number of completed steps.
    """

    step: int

    def __init__(self, job, ddp, parts, each_epoch=()):
        parts.setdefault("step", 0)
        for name in parts:
            if name.startswith("_") or hasattr(State, name):
                raise ValueError(f"hvdrun: a state cannot have a part named {name!r}: the name begins with an underscore, or is that of "
                                 "an attribute of State")
        if isinstance(parts["step"], bool) or not isinstance(parts["step"], int):
            raise TypeError(f"hvdrun: step={parts['step']!r}: the number of completed steps must be an int")
        for name, value in parts.items():
            if isinstance(value, torch.nn.parallel.DistributedDataParallel):
                raise TypeError(f"hvdrun: the part {name!r} is wrapped in DistributedDataParallel, but the state wraps its modules itself, "
                                "in each world: give it the module")
            if isinstance(value, torch.nn.Module) and any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in value.parameters()):
                raise ValueError(f"hvdrun: the part {name!r} has layers whose shape is not known yet: call the module once before job.state")
            hidden = _hidden(value)
            if hidden is not None:
                raise TypeError(f"hvdrun: the part {name!r} is a {type(value).__name__} that contains a {type(hidden).__name__}, which the "
                                "state would not track: make each a part of its own")
        owned = {id(p) for v in parts.values() for p in (v.parameters() if isinstance(v, torch.nn.Module) else [v])}
        for name, value in parts.items():
            strange = isinstance(value, torch.optim.Optimizer) and next(
                (p for group in value.param_groups for p in group["params"] if id(p) not in owned), None)
            if isinstance(strange, torch.Tensor):
                raise ValueError(f"hvdrun: the optimizer {name!r} steps a parameter of shape {tuple(strange.shape)} that no part of the state "
                                 "has, so the ranks would not share it: give job.state its module too, or the tensor")
            scaler = _own_scaler(value)
            if scaler is not None and not any(v is scaler for v in parts.values()):
                raise ValueError(f"hvdrun: the optimizer {name!r} has a GradScaler that is not a part of the state, so a newcomer would have "
                                 "another scale: give job.state scaler=accelerator.scaler")
        for name in each_epoch:
            if not is_scheduler(parts.get(name)):
                raise ValueError(f"hvdrun: each_epoch names {name!r}, but no part of that name is a scheduler")
        _values.check({name: snapshot(value) for name, value in parts.items()})
        self.__dict__.update(_job=job, _ddp=ddp, _parts=parts, _wrapped={}, _trains={}, _holds=False, _torn=False, _acts=[], _results=[], _plan=[],
                             _each_epoch=frozenset(each_epoch), _paces={}, _before=Before(parts), _committed=False, _commits=0, _stepped=[],
                             _closures=[name for name, v in parts.items() if isinstance(v, torch.optim.Optimizer) and _needs_closure(v)])
        for name, value in parts.items():
            if isinstance(value, torch.optim.Optimizer):
                watch(name, value, self._before)

    def __getattr__(self, name: str) -> Any:
        parameters, trained = self._trains.get(name, ((), []))
        if list(map(_trains, parameters)) != trained:
            if self._before.open:
                self._before.check()
            self._wrap_one(name)
            self._before.note()  # the wrapper of an old torch writes the same values to all parameters
        try:
            return self._wrapped.get(name) or self._parts[name]
        except KeyError:
            raise AttributeError(f"hvdrun: the state has no part {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        old = self._parts.get(name)
        if name not in self._parts or isinstance(old, torch.Tensor) or hasattr(old, "load_state_dict"):
            raise AttributeError(f"hvdrun: {name!r} is not a value of the state and cannot be assigned: write to a tensor with copy_")
        if isinstance(value, torch.Tensor):
            raise TypeError(f"hvdrun: the value {name!r} of the state cannot become a tensor: assign a number (.item()), or use a tensor "
                            "from the beginning, and write to it")
        self._parts[name] = value

    def __repr__(self) -> str:
        return f"<hvdrun.torch.State at step {self.step}: {', '.join(self._parts)}>"

    def __dir__(self) -> list[str]:
        return sorted([*(name for name in super().__dir__() if name[0] != "_"), *self._parts])

    def _modules(self):
        return [v for v in self._parts.values() if isinstance(v, torch.nn.Module)]

    def _of(self, kind):
        return [v for v in self._parts.values() if isinstance(v, kind)]

    # A step.

    def begin(self, step: bool = True) -> None:
        """Begins a step, or an act such as an evaluation, and keeps copies of what undo restores.

        A Step calls it. Other loops call it themselves (see hvdrun.torch.run).

        Args:
            step: whether this is a step. An evaluation may change parameters and schedulers, so copies of them are kept too.
        """
        self._before.save(act=not step)
        self.__dict__["_committed"] = False

    def undo(self) -> None:
        """Undoes the changes of a failed step: gradients, buffers, tensors, values and objects of the state, and records of a GradScaler.

        Gradients that the previous step has left for this one stay. After commit, undo only drops gradients.
        """
        self._before.forget()
        for value in self._parts.values():
            if hasattr(value, "_per_optimizer_states"):
                value._per_optimizer_states.clear()
        if self._before.open:
            self._before.restore()

    def commit(self, update: Callable[[], object] | None = None, step: bool = True) -> bool:
        """Applies the step once all ranks have called it: collective.

        Args:
            update: a function without collectives that applies the step; None: commit steps all optimizers of the state, then its schedulers.
            step: whether this is a step. Other acts, such as an evaluation, are counted separately: of two ranks with the same number of
                steps, the one with more acts is ahead.

        Returns:
            job.changed: whether the hosts have changed, so that all ranks should leave the world together.

        Raises:
            RuntimeError: a rank was lost before all ranks had called commit, so nothing is applied; or the step has not begun; or there
                is nothing to apply.
            ValueError: the gradients or the parameters differ between ranks.
        """
        return self._commit(update, step, False, False)

    def _commit(self, update, step, stop, ends_epoch):
        job, before = self._job, self._before
        worker = job._worker
        measures, parameters = [], []
        if not before.open:
            raise RuntimeError("hvdrun: commit is called twice in a step, or outside of one" if self._committed else
                               "hvdrun: commit is called before the step has begun (state.begin)")
        if step:
            before.check()
        if update is None:
            self._check_update()
        self.__dict__["_commits"] += 1
        if step and job.size > 1 and (self._commits <= _EACH or self._commits % _EACH == 0):
            measures = [(name, _measure(p.grad for p in parameters)) for name, parameters in self._stepped]
            if not self._wrapped:
                measures.append(("", _measure(before.added())))
            parameters = [(name, _measure([p])) for name, p in before.least()]
        changed, stopped, *differ = job._agree(worker is not None and worker.changed(), stop, same=[m for _, m in (*parameters, *measures)])
        for name, _ in parameters:
            if differ.pop(0):
                raise ValueError(
                    f"hvdrun: the parameters of the part {name!r} differ from rank to rank, so each rank would train its own model: "
                    "step.commit(update) must change them in the same way on all ranks. A newcomer gets only the parts of the state: give "
                    "job.state each number that changes during the training, such as a learning rate, and the inner optimizer of an optimizer")
        if not self._wrapped and differ and differ.pop():
            raise ValueError(
                "hvdrun: this step adds to gradients that the last step has left and that differ from rank to rank, so the share of a lost "
                "rank would be missing: average them before each step.commit(), or divide the batch of one step by step.micro(n)")
        # update need not step all optimizers, and the gradients of the others are arbitrary.
        if differ and (any(differ) if update is None else all(differ) and self._wrapped):
            name = measures[differ.index(True)][0]
            raise ValueError(
                f"hvdrun: the gradients of the optimizer {name!r} differ from rank to rank, so each rank would train its own model: "
                "call the module as an attribute of the state, such as state.model(x), which averages the gradients; a program that averages "
                "them itself does so before step.commit(), and gives job.state ddp=None; for several passes in a step, use step.micro(n) "
                "instead of no_sync")
        before.close()
        self.__dict__.update(_torn=True, _committed=True)
        if update is None:
            self._update(ends_epoch)
        else:
            update()
            before.replaced()
        if step:
            self._parts["step"] += 1
            self._acts.clear()
            before.leave()
        else:
            self._acts.append(None)
        self.__dict__["_torn"] = False
        job.changed, job._stopped = changed, job._stopped or stopped
        if worker is not None:
            if step and job._reported != job.generation:
                job._reported = job.generation
                worker.report("committed", self.step)
            worker.beat("training", self.step)
        return changed

    def _check_update(self):
        """Raises if a commit without update would do nothing, or would step a scheduler that the program steps too."""
        for name in self._closures:
            raise RuntimeError(
                f"hvdrun: the optimizer {name!r} needs a closure: step.commit(lambda: {name}.step(closure)), where closure takes all samples "
                "of the batch on each rank, without collectives, with ddp=None in job.state")
        if self._modules() and not self._of(torch.optim.Optimizer):
            raise RuntimeError("hvdrun: commit has nothing to step, since no part of the state is an optimizer: give job.state the "
                               "optimizer, or call step.commit(update)")
        for name, value in self._parts.items():
            if is_scheduler(value) and self._paces.get(name, pace(value)) != pace(value):
                raise RuntimeError(
                    f"hvdrun: the program steps the scheduler {name!r}, and step.commit() steps it too, once in each step: remove the call; "
                    f"job.state(each_epoch=[{name!r}], …) makes commit step it at the end of each epoch instead")

    def _update(self, ends_epoch):
        """Steps all optimizers, then the schedulers."""
        scalers = [v for v in self._parts.values() if hasattr(v, "unscale_") and hasattr(v, "get_scale")]
        optimizers = self._of(torch.optim.Optimizer)
        own = [scaler for scaler in map(_own_scaler, optimizers) if scaler is not None]  # their optimizers call their step and update
        for optimizer in optimizers:
            scalers[0].step(optimizer) if scalers and _own_scaler(optimizer) is None else optimizer.step()
        for scaler in scalers:
            if not any(scaler is o for o in own):
                scaler.update()
        for name, value in self._parts.items():
            if is_scheduler(value):
                if ends_epoch or name not in self._each_epoch:
                    value.step()
                self._paces[name] = pace(value)

    # Entering a world.

    def _unwrap(self):
        self._wrapped.clear()
        self._trains.clear()

    def _wrap(self):
        """Wraps the modules again: collective. A wrapper of an earlier world would divide by the size of that world."""
        self._unwrap()
        self._before.look()
        self.__dict__["_commits"] = 0
        self.__dict__["_stepped"] = [
            (name, sorted((p for group in v.param_groups for p in group["params"]), key=torch.numel))
            for name, v in self._parts.items() if isinstance(v, torch.optim.Optimizer)]
        for name, value in self._parts.items():
            if self._ddp is not None and isinstance(value, torch.nn.Module) and not isinstance(value, torch.optim.swa_utils.AveragedModel):
                self._wrap_one(name)

    def _wrap_one(self, name):
        """Wraps a module for the parameters that require gradients now: collective."""
        module = self._parts[name]
        self._wrapped.pop(name, None)
        parameters = list(module.parameters())
        self._trains[name] = parameters, list(map(_trains, parameters))
        if True not in self._trains[name][1]:
            return
        options = dict(self._ddp)
        if "init_sync" in torch.nn.parallel.DistributedDataParallel.__init__.__code__.co_varnames:
            options.setdefault("init_sync", False)  # all ranks have the same state already
        wrapper = self._wrapped[name] = torch.nn.parallel.DistributedDataParallel(module, **options)
        wrapper.register_forward_pre_hook(lambda *_: self._refuse_in_update(name))

    def _refuse_in_update(self, name):
        if self._torn:
            raise ValueError(f"hvdrun: state.{name} is called within step.commit(update), where the loss of a rank would leave the others with "
                             "half a step: for a second pass with other weights, as in SAM, call torch.func.functional_call(state.model, …) in "
                             "the body of the step")

    def _settle(self):
        """Gives all ranks the state of the rank that is furthest ahead, or of the lowest of several such ranks: collective.

        Before any rank has trained, the rank that has restored the newest checkpoint is ahead.
        """
        job = self._job
        plan = self._plan or [("", 0)] * PLAN
        mine = torch.tensor([self._holds and not self._torn, self._parts["step"], len(self._acts), self._torn, job._stopped,
                             *(number for _, number in plan), *job._transport.address()], dtype=torch.int64, device=job.device)
        all_of = [torch.empty_like(mine) for _ in range(job.size)]
        dist.all_gather(all_of, mine)
        job._arrived()
        all_of = [t.tolist() for t in all_of]
        self._compare(plan, [t[5:-3] for t in all_of])
        job._transport.meet(job.generation, [tuple(t[-3:]) for t in all_of])
        told = [tuple(t[:3]) for t in all_of]
        best = max(told)
        if not best[0] and any(t[3] for t in all_of):
            raise StateLost(f"hvdrun: no rank has the whole state of step {best[1]}: each rank failed while it applied the step. "
                            "The function in step.commit(update) must not use collectives, which fail when a rank is lost")
        if best[0] == 0 or min(told) != best:
            root = told.index(best)
            mine = {name: snapshot(value) for name, value in self._parts.items()} if job.rank == root else None
            # If a rank dies while it sends much data, gloo waits for the rest forever: the thread of the broadcast is abandoned then.
            trains = {name: [p.requires_grad for p in v.parameters()] for name, v in self._parts.items() if isinstance(v, torch.nn.Module)}
            values, trains, acts, results, gradients = job._interruptible(
                lambda: broadcast((mine, trains, self._acts, self._results, self._before.left()), root, job.rank, job.device, job._arrived))
            if job.rank != root and (best[0] == 0 or told[job.rank] != best):
                self._load(values)
                for name, flags in trains.items():  # layers that were frozen, or are no longer
                    for p, flag in zip(self._parts[name].parameters(), flags):
                        p.requires_grad_(flag)
                self._before.take(gradients)
                self._acts[:], self._results[:] = acts, results
        # Of the ranks that have made the last step, some may have lost the world before they learned that it was the last one.
        job._stopped = any(t[4] for t, at in zip(all_of, told) if at == best)
        self.__dict__.update(_holds=True, _torn=False)

    def _compare(self, plan, all_of):
        """Raises on all ranks if their plans differ, because they would use wrong samples, or leave the loop one by one."""
        for i, (name, _) in enumerate(plan):
            values = [numbers[i] for numbers in all_of]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                name = name or "the arguments of job.steps"
                raise PlansDiffer(f"hvdrun: {name} must be the same on all ranks: rank 0 has {values[0]}, rank {other} has "
                                  f"{values[other]} (-1 stands for None)")

    def _load(self, values):
        if values.keys() != self._parts.keys():
            raise ValueError(f"hvdrun: the state of this rank has the parts {sorted(self._parts)}, "
                             f"that of another {sorted(values)}")
        self.__dict__["_torn"] = True
        self._before.replaced()
        with torch.no_grad():
            for name, value in values.items():
                part = self._parts[name]
                if isinstance(part, torch.Tensor):
                    part.copy_(value)
                elif hasattr(part, "load_state_dict"):
                    try:
                        part.load_state_dict(value)
                    except (RuntimeError, ValueError, KeyError) as err:
                        raise ValueError(f"hvdrun: the part {name!r} does not fit that of the other ranks, or of the checkpoint: {err}") from err
                else:
                    self._parts[name] = put_back(part, value)
        self._paces.clear()
        self.__dict__["_torn"] = False

    # Checkpoints.

    def save(self, folder: str | os.PathLike[str], keep: int = 3) -> str:
        """Writes a checkpoint, a safetensors file in the format of elastic/checkpoint that only this user can read. It blocks until the
        file is on disk.

        One rank calls it, after a commit, when all ranks have the same state. The others continue, and wait for this rank at their next
        collective. It needs no second copy of the state in memory.

        Args:
            folder: the folder of the checkpoints, which is created if it does not exist.
            keep: how many checkpoints the folder keeps, including this one. Checkpoints of later steps do not count, and stay.

        Returns:
            the path of the file.

        Raises:
            OSError: the disk is full, or the folder is not writable; earlier checkpoints stay.
            TypeError: a part has a value, assigned since Job.state, that a checkpoint cannot have.
        """
        parts = []
        for name, value in self._parts.items():
            parts += _values.encode(name, snapshot(value))
        with self._job.saving(self.step) as progress:
            path = _checkpoint.write(folder, self.step, self._job.size, parts, progress)
        _checkpoint.prune(folder, keep, self.step)
        return path

    def restore(self, folder: str | os.PathLike[str]) -> bool:
        """Loads the newest whole checkpoint of a folder. It is called before the loop.

        Every rank may call it, or only rank 0, whose state the others get. Newer checkpoints, which are damaged, are renamed.

        Args:
            folder: the folder of save, which need not exist.

        Returns:
            whether there was a checkpoint.

        Raises:
            ValueError: all checkpoints are damaged, or the newest is of a program with other parts.
            PermissionError: another user can write the checkpoint, or owns it.
        """
        return _checkpoint.restore(
            folder, lambda file: self._load(_values.decode(file, {name: snapshot(value) for name, value in self._parts.items()})))


def _hidden(value):
    """Returns a module, an optimizer or the like inside a container; None: the container has none."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple, set)):
        return None
    for v in value:
        found = v if hasattr(v, "load_state_dict") else _hidden(v)
        if found is not None:
            return found
    return None


def _own_scaler(value):
    """Returns the GradScaler that an optimizer uses in its own step, like accelerate's wrapper; None: it uses no scaler."""
    return getattr(value, "scaler", None) if isinstance(value, torch.optim.Optimizer) else None


def _needs_closure(optimizer):
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _measure(gradients):
    """Returns a number of 23 bits for the norm of the first gradient that is a plain tensor; 0: no gradient is.

    Norms with a relative difference of 2^-15 or more have different numbers.
    """
    for grad in gradients:
        if type(grad) is torch.Tensor and grad.layout == torch.strided:
            size = torch.linalg.vector_norm(grad.detach() if grad.is_complex() else grad.detach().float()).item()
            return struct.unpack("<I", struct.pack("<f", size if math.isfinite(size) else math.inf))[0] >> 8
    return 0


def differ(size, total, squares):
    """Reports whether the numbers of _measure differ between the ranks, given the number of ranks, the sum and the sum of squares."""
    return size * squares - total * total > size * _SAME * _SAME


class PlansDiffer(ValueError):
    """Ranks have called Job.steps with different arguments."""


class StateLost(RuntimeError):
    """No rank has a complete state any more."""
