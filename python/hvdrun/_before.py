"""Undoes a failed step: restores the buffers, tensors, values, learning rates, gradients and objects of a state from the beginning of the step.

After a failed evaluation it restores the parameters and the schedulers too, because an evaluation may change them, for example to
averaged weights.
"""
import copy
import functools
import inspect
import weakref

import torch

SMALL = 1 << 20  # bytes; smaller tensors are copied in each step, to undo also writes through .data, which do not change their version
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def keep(value):
    """Returns a copy of a value that later changes of the value do not affect."""
    if isinstance(value, _PLAIN):
        return value
    if type(value) is tuple and set(map(type, value)) <= set(_PLAIN):
        return value
    if type(value) is list:
        return list(value) if set(map(type, value)) <= set(_PLAIN) else [keep(v) for v in value]
    if type(value) is dict:
        return {key: keep(v) for key, v in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value)


def put_back(live, kept):
    """Returns the kept value. A live list, dict or set gets the kept contents in place, because the program may refer to it elsewhere."""
    if type(live) is not type(kept):
        return kept
    if isinstance(live, list):
        live[:] = kept
    elif isinstance(live, (dict, set)):
        live.clear()
        live.update(kept)
    else:
        return kept
    return live


def snapshot(value):
    """Returns the value of a part that is sent, saved and restored."""
    if not hasattr(value, "state_dict"):
        return value
    of = value.state_dict()
    if is_scheduler(value):  # in torch 1.13 it can have methods of the scheduler
        of = {name: v for name, v in of.items() if not callable(v)}
    return of


def _size(tensor):
    return tensor.element_size() * tensor.numel()


def _small(tensor):
    return _size(tensor) <= SMALL


def _tensors(value):
    """Yields the tensors of a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _tensors(v)


def _address(parameter):
    return parameter.data_ptr() if type(parameter) is torch.nn.Parameter else None


class _Places:
    """The tensors in some dicts, and copies of them."""

    def __init__(self):
        self._rows = []  # (dict, name, tensor, address, version, copy)
        self._names = []  # (dict, number of its names)
        self._small = [], []  # copies of small tensors, and the tensors themselves

    def save(self, dicts):
        """Copies the tensors of the dicts, except large ones that have not changed since the last copy."""
        if not self._same(dicts):
            self._look(dicts)
            return
        _copy(*self._small)
        self._rows = [row if row[4] == row[2]._version else
                      (*row[:4], row[2]._version, row[5] if _small(row[2]) else row[2].detach().clone()) for row in self._rows]

    def _same(self, dicts):
        """Reports whether the dicts have the same tensors as at the last copy."""
        return len(dicts) == len(self._names) and all(
            of is was and len(of) == count for of, (was, count) in zip(dicts, self._names)) and all(
            of.get(name) is live and live.data_ptr() == address for of, name, live, address, _, _ in self._rows)

    def _look(self, dicts):
        kept = {(id(of), name): (live, version, copy) for of, name, live, _, version, copy in self._rows}
        self._rows, self._names, self._small = [], [(of, len(of)) for of in dicts], ([], [])
        for of in dicts:
            for name, live in of.items():
                if not isinstance(live, torch.Tensor):
                    continue
                was = kept.get((id(of), name))
                if was is not None and was[0] is live and was[1] == live._version and not _small(live):
                    copy = was[2]
                else:
                    copy = live.detach().clone()
                self._rows.append((of, name, live, live.data_ptr(), live._version, copy))
                if _small(live):
                    self._small[0].append(copy)
                    self._small[1].append(live.detach())

    def restore(self):
        with torch.no_grad():
            for of, name, live, _, version, copy in self._rows:
                if _small(live) or live._version != version:
                    if live.shape == copy.shape:
                        live.data.copy_(copy)
                    else:
                        live.data = copy.clone()
                of[name] = live


def _copy(onto, those):
    if onto and hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(onto, those)
        return
    for a, b in zip(onto, those):
        a.copy_(b)


def is_scheduler(value):
    """Reports whether commit steps a part. The program itself steps schedulers that need a metric, such as ReduceLROnPlateau."""
    return _kind(type(value)) == "scheduler"


def is_plateau(value):
    return _kind(type(value)) == "plateau"


def _is_object(value):
    """Reports whether a part is a loader or has a class of the program, such as an average of weights or running statistics."""
    return hasattr(value, "state_dict") and not isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) and not is_scheduler(value) and \
        not hasattr(value, "unscale_") and not hasattr(value, "hvd_undone")


@functools.lru_cache(maxsize=None)
def _kind(of):
    if issubclass(of, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return "plateau"
    if not all(hasattr(of, name) for name in ("get_last_lr", "step", "load_state_dict")):
        return ""
    parameters = list(inspect.signature(of.step).parameters.values())[1:]
    needs = any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    return "plateau" if needs else "scheduler"


def pace(scheduler):
    """Returns how often a scheduler was stepped: a number, or a list of these for a scheduler that combines others."""
    if hasattr(scheduler, "last_epoch"):
        return scheduler.last_epoch
    inner = getattr(scheduler, "scheduler", None)  # of accelerate's wrapper
    return [pace(each) for each in ([inner] if inner is not None else getattr(scheduler, "_schedulers", ()))]


class Before:
    """The state at the beginning of a step."""

    def __init__(self, parts):
        self._parts = parts
        self._buffers, self._tensors = _Places(), _Places()
        self._values, self._schedulers = {}, {}
        self._objects = []  # (part with load_state_dict, copy of its state)
        self._large = {}  # [(tensor, version)] of each part that is too large for a copy in each step, by its name
        self._rates = []  # (optimizer, the entries of each of its groups except params)
        self._weights = []  # (parameter, address, copy), in an evaluation
        self._modules, self._versions = [], []
        self._least = []  # (part, name, parameter): the smallest parameter of each module that requires gradients
        self._looks = []  # copies of these parameters, which reveal writes through .data
        self._leaves = []  # (part, name, parameter), or (part, "", tensor) for a part that is a tensor
        self._left = []  # those whose gradients the last commit has left for the next step
        self._gradients = []  # (parameter or tensor, gradient, copy of the gradient) for each of these
        self.open = False

    def look(self):
        """Finds the modules and parameters of the state. It is called in each world, before the first step."""
        self._modules, self._leaves = [], []
        for part, value in self._parts.items():
            if isinstance(value, torch.nn.Module):
                self._modules += [m._buffers for m in value.modules()]
                self._leaves += [(part, name, p) for name, p in value.named_parameters()]
            elif isinstance(value, torch.Tensor) and value.is_leaf:
                self._leaves.append((part, "", value))
        least = {}
        for row in self._leaves:
            part, name, p = row
            if name and p.requires_grad and type(p) is torch.nn.Parameter and (part not in least or p.numel() < least[part][2].numel()):
                least[part] = row
        self._least = list(least.values())

    def replaced(self):
        """Makes the next save look for the tensors of objects again, because the program may have replaced them."""
        self._large = {}

    def least(self):
        """Returns the smallest parameter of each module that trains, with its part. All ranks have the same values in it."""
        return [(part, p.detach()) for part, _, p in self._least]

    def save(self, act=False):
        parts = self._parts
        values = {name: v for name, v in parts.items() if not isinstance(v, torch.Tensor) and not hasattr(v, "load_state_dict")}
        self._values = {name: keep(v) for name, v in values.items()}
        self._objects = []
        if act:
            self.replaced()
        self._large = {name: [(t, t._version) for t, _ in tensors] for name, tensors in self._large.items()}
        for name, v in parts.items():
            if name in self._large:
                continue
            if is_plateau(v) or act and is_scheduler(v) or _is_object(v):
                state = snapshot(v)
                tensors = list(_tensors(state))
                if act or hasattr(v, "__iter__") or sum(map(_size, tensors)) <= SMALL:
                    self._objects.append((v, keep(state)))
                else:
                    self._large[name] = [(t, t._version) for t in tensors]
        self._schedulers = {name: pace(v) for name, v in parts.items() if is_scheduler(v)}
        self._rates = [(v, [{name: keep(v) for name, v in group.items() if name != "params"} for group in v.param_groups])
                       for v in parts.values() if isinstance(v, torch.optim.Optimizer)]
        self._weights = [(p, _address(p), p.detach().clone()) for _, name, p in self._leaves if name] if act else []
        self._tensors.save([parts])
        self._buffers.save(self._modules)
        self._gradients = [(p, p.grad, p.grad.clone()) for _, _, p in self._left if p.grad is not None]
        self.note()
        self.open = True

    def restore(self):
        """Undoes what has changed since save."""
        self.open = False
        self._buffers.restore()
        self._tensors.restore()
        for name, kept in self._values.items():
            self._parts[name] = put_back(self._parts[name], keep(kept))
        for part, kept in self._objects:
            part.load_state_dict(keep(kept))
        for optimizer, groups in self._rates:
            for group, kept in zip(optimizer.param_groups, groups):
                for name, value in kept.items():
                    if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = keep(value)
        with torch.no_grad():
            for p, address, kept in self._weights:
                if _address(p) == address:
                    p.copy_(kept)
                else:
                    p.data = kept  # the program may use the parameter's present memory elsewhere
        self._weights = []

    def close(self):
        """Ends the step, whose changes stay."""
        self.open, self._weights = False, []

    def note(self):
        """Records the parameters as they are. A later write to one counts as applying the step."""
        self._versions = [p._version for _, _, p in self._leaves]
        self._looks = [(*row, row[2].detach().clone()) for row in self._least if _small(row[2])]

    def leave(self):
        """Notes, after a step is applied, the gradients of unchanged parameters: they may be the beginning of a sum over several steps."""
        self._left = [row for row, version in zip(self._leaves, self._versions) if row[2]._version == version and row[2].grad is not None]

    def left(self):
        """Returns the gradients that the last commit has left for the next step, by part and name."""
        return {(part, name): p.grad for part, name, p in self._left if p.grad is not None}

    def take(self, gradients):
        """Replaces all gradients by those that the last commit has left on another rank."""
        self.look()
        self._left = [row for row in self._leaves if row[:2] in gradients]
        for part, name, p in self._leaves:
            grad = gradients.get((part, name))
            p.grad = None if grad is None else grad.to(p.device)

    def forget(self):
        """Drops all gradients except those that the last commit has left. If a step is open, these get the values from its beginning."""
        kept = [(p, copy) for p, _, copy in self._gradients] if self.open else [(p, p.grad) for _, _, p in self._left]
        for _, _, p in self._leaves:
            p.grad = None
        for p, grad in kept:
            p.grad = grad

    def added(self):
        """Returns copies of the gradients from before the step, except where the step has replaced them."""
        return [copy for p, grad, copy in self._gradients if p.grad is grad]

    def check(self):
        """Raises RuntimeError if the program has applied the step before its commit."""
        changed = [row for row, version in zip(self._leaves, self._versions) if row[1] and row[2]._version != version]
        changed += [row[:3] for row in self._looks if not torch.equal(row[2], row[3]) and not torch.isnan(row[3]).any()]
        for part, name, _ in changed:
            raise RuntimeError(
                f"hvdrun: the parameter {name!r} of the part {part!r} has changed since the step began, and a failed step could not "
                "undo this: let step.commit() step the optimizers of the state, or pass it a function that changes the parameters: "
                "step.commit(update)")
        for name, tensors in self._large.items():
            if any(t._version != version for t, version in tensors):
                raise RuntimeError(f"hvdrun: the part {name!r} has changed since the step began, and is too large to be copied in each step: "
                                   "pass commit a function that changes it: step.commit(update)")
        for name, before in self._schedulers.items():
            if pace(self._parts[name]) != before:
                raise RuntimeError(f"hvdrun: the program has stepped the scheduler {name!r} within the step, but step.commit() steps it; to step "
                                   "it less often, name it in job.state(each_epoch=[…]), or step it in step.commit(update)")


def watch(name, optimizer, before):
    """Makes optimizer.step() raise within a step that is not committed, if torch has hooks for that."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has no hooks
    if not hasattr(optimizer, "register_step_pre_hook"):
        return
    of = weakref.ref(before)

    def refuse(*_):
        step = of()
        if step is not None and step.open:
            raise RuntimeError(f"hvdrun: the program steps the optimizer {name!r} within the step, but step.commit() steps it once all "
                               f"ranks have their gradients: remove the call, or pass it to commit: step.commit({name}.step)")

    optimizer.register_step_pre_hook(refuse)
