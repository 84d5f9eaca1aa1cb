"""Hugging Face accelerate in a loop over Job.steps: mixed precision, clipping, gathering and trackers of the current world.

    import hvdrun.torch as hvd
    from hvdrun.accelerate import Accelerator       # in place of accelerate's

    job = hvd.init("gloo")
    accelerator = Accelerator(job, mixed_precision="bf16")
    net, optimizer = accelerator.prepare(net, optimizer)
    state = job.state(model=net, optimizer=optimizer, scheduler=scheduler, step=0)
    for step in job.steps(state, total=1000, batch=64, samples=len(data)):
        with step:
            with accelerator.autocast():
                loss = state.model(**collate([data[i] for i in step.indices])).loss
            optimizer.zero_grad()
            accelerator.backward(step.mean(loss))
            step.commit()

docs/huggingface.md is the guide.
"""
from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from hvdrun import _worker

_worker.greet("torch")

import accelerate
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState

import hvdrun.torch as hvd

__all__ = ["Accelerator", "adopt", "alone", "one_at_a_time"]

# Options of Accelerator, and variables of accelerate launch, that would shard or wrap the model for the first world.
_NOT_CARRIED = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin", "parallelism_config")
_NOT_CARRIED_ENV = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")

_adopted = None  # the job whose world accelerate has


def adopt(job: hvd.Job) -> None:
    """Makes accelerate use the world of a job in this process, now and in all later worlds.

    PartialState and AcceleratorState, and with them all of accelerate, get the rank and the size of the job. accelerate creates no
    process group of its own.

    Args:
        job: the result of hvdrun.torch.init.

    Raises:
        RuntimeError: accelerate already has a world, because an Accelerator or TrainingArguments was created before.
        ValueError: the environment requests DeepSpeed, FSDP, Megatron-LM or another way to shard a model.
    """
    global _adopted
    if job is _adopted:
        return
    shared = PartialState._shared_state
    if shared:
        raise RuntimeError(f"hvdrun: accelerate has a world of {shared.get('num_processes')} already, in which this process would train "
                           "alone: create the program's first Accelerator or TrainingArguments with hvdrun.accelerate or hvdrun.transformers")
    for name in _NOT_CARRIED_ENV:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            raise ValueError(f"hvdrun: {name}={os.environ[name]}: a sharded model cannot survive the loss of a rank: unset it, or use hvdrun torchrun")
    cuda = job.device.type == "cuda"
    shared.update(_cpu=not cuda, backend="nccl" if cuda else "gloo", debug=False, device=job.device, fork_launched=False,
                  distributed_type=DistributedType.MULTI_GPU if cuda else DistributedType.MULTI_CPU)
    _adopted = job
    _tell(job)
    job.on_reset(lambda: _tell(job))


def _tell(job):
    """Sets the numbers of the world in PartialState, and in AcceleratorState, which copies PartialState only once."""
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared or shared is PartialState._shared_state:
            shared.update(num_processes=job.size, process_index=job.rank, local_process_index=job.local_rank)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which this process is alone in accelerate's world, as the main one: for the work of one rank at the end of a job."""
    kept = [(shared, dict(shared)) for shared in (PartialState._shared_state, AcceleratorState._shared_state) if shared]
    for shared, _ in kept:
        shared.update(distributed_type=DistributedType.NO, num_processes=1, process_index=0, local_process_index=0)
    try:
        yield
    finally:
        for shared, old in kept:
            shared.update(old)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """A context that only one process of this host and user is in at a time. It replaces main_process_first, and blocks on entry.

    The first process creates what the others then find, such as a cache. A barrier would wait for ranks that already train.
    """
    name = f"hvdrun.{os.getuid()}.{os.environ.get('HVD_RUN_ID') or os.environ.get('TORCHELASTIC_RUN_ID') or 'alone'}.lock"
    lock = os.open(os.path.join(tempfile.gettempdir(), name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator whose world is that of a job.

    prepare does not wrap modules, because Job.state wraps them in each world, nor schedulers, because accelerate's wrapper steps them
    once for each process. A prepared DataLoader is for evaluation: it is divided among the ranks of the world in which it is iterated.
    """

    def __init__(self, job: hvd.Job, **options: Any) -> None:
        """Takes accelerate.Accelerator's options.

        Raises:
            ValueError: an option shards the model, or requests gradient accumulation by accelerate.
        """
        for name in _NOT_CARRIED:
            if options.get(name) is not None:
                raise ValueError(f"hvdrun: {name}: a sharded model cannot survive the loss of a rank: use hvdrun torchrun for it")
        if options.get("gradient_accumulation_steps", 1) != 1 or options.get("gradient_accumulation_plugin") is not None:
            raise ValueError("hvdrun: gradient_accumulation_steps is not supported: call backward several times in the body of a step, "
                             "the last time outside of state.model.no_sync()")
        adopt(job)
        self._job = job
        super().__init__(**options)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        return one_at_a_time()

    local_main_process_first = main_process_first

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        return scheduler

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        def prepare():
            prepared = super(Accelerator, self).prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
            self._dataloaders.remove(prepared)  # it serves one iteration only
            return prepared

        return _Sharded(self._job, data_loader, prepare)


class _Sharded(torch.utils.data.DataLoader):
    """A loader that is divided among the ranks of the world in which its iteration begins."""

    def __init__(self, job, base, prepare):
        self.__dict__.update(base.__dict__)
        self._hvdrun = job, prepare

    def __len__(self):
        return len(self._hvdrun[1]())

    def __iter__(self):
        job, prepare = self._hvdrun
        world = job.generation
        for batch in prepare():
            yield batch
            if job.generation != world:
                raise RuntimeError("hvdrun: the world has changed during an iteration of a prepared DataLoader, which is divided among the "
                                   "ranks of the last world: train by job.steps, which divides each step anew")
