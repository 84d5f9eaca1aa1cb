"""Hugging Face's Trainer, whose processes continue when others die, come or go.

    from hvdrun.transformers import Trainer, TrainingArguments    # in place of transformers'

    args = TrainingArguments(output_dir="out", max_steps=1000, per_device_train_batch_size=16)
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()

A step has the samples of per_device_train_batch_size * gradient_accumulation_steps * the number of processes with which the job
has begun, in each world and after each resumption. docs/huggingface.md is the guide.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import os
import types
from typing import Any

from hvdrun import _worker

_worker.greet("torch")

import torch
import torch.distributed as dist
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_callback import ExportableState, ProgressCallback, TrainerCallback

import hvdrun.torch as hvd
from hvdrun import accelerate

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]

_job = None
_trainings = 0  # number of trainings that this process has begun
_COUNTS = "hvdrun"  # a key in batches, and in the state of a trainer
_STATE = "trainer_state.json"  # the file of a checkpoint that is written last
_TOLD = "batch", "epochs", "begun"
_FLAGS = "should_log", "should_evaluate", "should_save"


class _Arguments:
    def __post_init__(self) -> None:
        global _job
        for name, why in _not_carried(self):
            raise ValueError(f"hvdrun: TrainingArguments({name}=…): {why}")
        if _job is None:
            gpu = torch.cuda.is_available() and not self.use_cpu
            _job = hvd.init(self.ddp_backend or ("nccl" if gpu else "gloo"))
            accelerate.adopt(_job)
        config = self.accelerator_config
        if isinstance(config, str):
            with open(config, encoding="utf-8") as f:
                config = json.load(f)
        elif config is not None and not isinstance(config, dict):
            config = config.to_dict()
        self.accelerator_config = dict(config or {}, use_configured_state=True)
        super().__post_init__()

    def main_process_first(self, local: bool = True, desc: str = "work") -> Any:
        """Returns a context that the processes of a host enter one by one: none can wait for a first rank that already trains."""
        return accelerate.one_at_a_time()


_SHARDS = "a sharded model cannot survive the loss of a rank: train it with hvdrun torchrun"


def _not_carried(args):
    """Yields the arguments that an elastic Trainer does not support, as pairs of a name and a reason."""
    config = args.accelerator_config if isinstance(args.accelerator_config, dict) else vars(args.accelerator_config or object)
    optim = str(getattr(args.optim, "value", args.optim))
    for name, given, why in (
        ("deepspeed", args.deepspeed, _SHARDS),
        ("fsdp", args.fsdp, _SHARDS),
        ("parallelism_config", args.parallelism_config, _SHARDS),
        ("torch_compile", args.torch_compile or args.torch_compile_backend or args.torch_compile_mode,
         "a model compiled for Trainer has not been tried in a second world"),
        ("auto_find_batch_size", args.auto_find_batch_size, "the batch of a step is the same in all worlds"),
        ("ignore_data_skip", args.ignore_data_skip, "the next world would see samples again; samples are skipped without loading them"),
        ("average_tokens_across_devices", not args.average_tokens_across_devices, "must be True: the loss would depend on the world"),
        ("optim", "lomo" in optim or "layerwise" in optim, f"{optim} updates in the backward pass, before all ranks have the gradients"),
        ("accelerator_config", config.get("split_batches") or config.get("dispatch_batches"),
         "split_batches and dispatch_batches divide the batch by accelerate, which hvdrun does"),
        ("enable_jit_checkpoint", getattr(args, "enable_jit_checkpoint", False), "hvdrun handles SIGTERM: the others continue without the process"),
    ):
        if given:
            yield name, why


@dataclasses.dataclass
class TrainingArguments(_Arguments, transformers.TrainingArguments):
    """transformers.TrainingArguments whose world is that of the job. They call hvdrun.torch.init.

    The default of ddp_backend is gloo on CPUs and nccl on GPUs.

    Raises:
        ValueError: an elastic Trainer does not support an argument, such as deepspeed or fsdp, which the error names.
        RuntimeError: accelerate already has another world.
    """


@dataclasses.dataclass
class Seq2SeqTrainingArguments(_Arguments, transformers.Seq2SeqTrainingArguments):
    """transformers.Seq2SeqTrainingArguments; see TrainingArguments."""


class _Batches:
    """The indices of this rank: a list for each backward pass of an epoch, from the current position of the training."""

    drop_last = False

    def __init__(self, sampler, batch, seed, drop_last, place):
        samples = len(sampler) // batch * batch if drop_last else len(sampler)
        if samples < 1:
            raise ValueError(f"hvdrun: the data set has {len(sampler)} samples, and a step of all ranks takes {batch}")
        self._sampler, self._seed, self._place, self._length = sampler, seed, place, -(-samples // batch)
        self._plan, self._order = hvd.Plan(batch, samples, shuffle=False), (None, None)

    def __len__(self):
        return self._length

    def __iter__(self):
        epoch, start = self._place()
        for k in range(self._length):
            # Trainer drops the batches before the start.
            yield self.part(epoch, k)[0] if k >= start else ()

    def part(self, epoch, k):
        """Returns the indices of this rank's samples, how many of them count, and the number of samples of all ranks.

        A rank without samples gets one that does not count, because all ranks take part in the backward pass.
        """
        if self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        mine = self._plan.part(k, _job.rank, _job.size)
        return [self._order[1][i] for i in mine or self._plan.part(k, 0, 1)[:1]], len(mine), self._plan.count(k)

    def _shuffled(self, epoch):
        """Returns the order of the sampler. Its draws from torch's generator are the same on all ranks and in all worlds."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self._seed * 1000003 + epoch) & (1 << 63) - 1)
            return list(self._sampler)


class _Stream(IterableDataset):
    """The samples of this rank in a data set without indices, which all ranks read: a list for each backward pass.

    A process keeps its position in the data set from one world to the next. Workers of a loader begin again and skip samples.
    """

    def __init__(self, dataset, batch, drop_last, again, place):
        self._dataset, self._batch, self._drop, self._place = dataset, batch, drop_last, place
        self._again = again  # how many lists can be read again, for a step that has failed
        self._read = None  # the epoch, its iterator, the number of lists read, and the last of these lists

    def __getstate__(self):  # for a worker process
        return dict(vars(self), _read=None, _place=functools.partial(tuple, self._place()))

    def __iter__(self):
        epoch, start, rank, size = self._place()
        worker = torch.utils.data.get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        old = self._read
        if worker or old is None or old[0] != epoch or start < old[2] - len(old[3]):
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            self._read = [epoch, iter(self._dataset), 0, []]
        now = self._read
        for i in itertools.count():
            k, gone = i * stride + first, now[2] - len(now[3])
            if i >= now[2]:
                now[3].append(list(itertools.islice(now[1], self._batch)))
                now[2] += 1
                del now[3][:-self._again]
                gone = now[2] - len(now[3])
            batch = now[3][i - gone] if i >= gone else None
            if batch is not None and len(batch) < (self._batch if self._drop else 1):
                return
            if k < start:
                yield None  # Trainer drops it
            else:
                begin, end = len(batch) * rank // size, len(batch) * (rank + 1) // size
                yield batch[begin:end] or batch[:1], end - begin, len(batch)


class _Counted:
    """A collator for _Stream that adds the numbers of samples to the batch."""

    def __init__(self, collate):
        self._collate = collate

    def __call__(self, item):
        if item is None:
            return None
        batch = self._collate(item[0])
        batch[_COUNTS] = item[1:]
        return batch


class _Training:
    """The part of the state with everything of a training except the model and the optimizer."""

    hvd_undone = True  # by the trainer

    def __init__(self, trainer):
        self._trainer = trainer

    def _exported(self):
        return [cb for cb in self._trainer.callback_handler.callbacks if isinstance(cb, ExportableState)]

    def state_dict(self):
        t = self._trainer
        return dict(
            number=t._hvd_number, own={name: copy.copy(getattr(t, name)) for name in t._HVD_OWN},
            state={f.name: copy.copy(getattr(t.state, f.name)) for f in dataclasses.fields(t.state) if not f.name.endswith("_process_zero")},
            control=dict(vars(t.control)), callbacks=[cb.state()["attributes"] for cb in self._exported()],
            tr_loss=t._tr_loss.clone(), scheduler=t.lr_scheduler.state_dict(), lr=[g["lr"] for g in t.optimizer.param_groups])

    def load_state_dict(self, values):
        t = self._trainer
        if values["number"] != t._hvd_number:
            raise RuntimeError(f"hvdrun: the other ranks are in training {values['number']} of the program, and this one in training "
                               f"{t._hvd_number}: a process that comes later can only join a program that calls train() once")
        if values["own"]["_hvd_batch"] != t._hvd_batch:
            t._hvd_resize(values["own"]["_hvd_batch"])
        for name, value in values["own"].items():
            setattr(t, name, copy.copy(value))
        for name, value in values["state"].items():
            setattr(t.state, name, copy.copy(value))
        vars(t.control).update(values["control"])
        for cb, attributes in zip(self._exported(), values["callbacks"]):
            vars(cb).update(attributes)
        t._tr_loss = values["tr_loss"].clone().to(t.args.device)
        t.lr_scheduler.load_state_dict(values["scheduler"])
        for group, lr in zip(t.optimizer.param_groups, values["lr"]):
            group["lr"] = lr


class _Hook(TrainerCallback):
    """The first callback of the trainer. It tracks epochs."""

    def __init__(self, trainer):
        self._trainer = trainer

    def on_epoch_begin(self, args, state, control, **options):
        self._trainer._hvd_epoch = self._trainer._hvd_epochs

    def on_epoch_end(self, args, state, control, **options):
        self._trainer._hvd_ends = True


class _Elastic:
    """The base class, before that of transformers, which makes a Trainer elastic."""

    # The attributes of the trainer that are the same on all ranks. _hvd_epochs epochs have ended, the last of them at step
    # _hvd_begun.
    _HVD_OWN = ("_hvd_batch", "_hvd_epochs", "_hvd_begun", "_hvd_first", "_hvd_ends", "_hvd_half", "_hvd_said", "_hvd_mean",
                "_total_loss_scalar", "_globalstep_last_logged", "current_flos")

    def create_accelerator_and_postprocess(self):
        if not isinstance(self.args, _Arguments):
            raise TypeError(f"hvdrun: args of an elastic Trainer must be hvdrun.transformers.TrainingArguments, not {type(self.args).__module__}."
                            f"{type(self.args).__name__}, with which each process would train alone or in a separate world")
        super().create_accelerator_and_postprocess()
        if self.accelerator.distributed_type not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise ValueError(f"hvdrun: accelerate is set to {self.accelerator.distributed_type}, which an elastic Trainer does not support")
        # The state wraps the model itself, in each world.
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self._hvd_state = self._hvd_loader = self._hvd_point = self._hvd_weight = self._hvd_logs = self._hvd_resume = None
        self._hvd_batch, self._hvd_mean = 0, None
        self._hvd_running = self._hvd_fetches = False
        self.compute_loss = functools.partial(self._hvd_weigh, self.compute_loss)
        _job.on_reset(self._hvd_world)

    def _hvd_world(self):
        self.state.is_world_process_zero, self.state.is_local_process_zero = self.is_world_process_zero(), self.is_local_process_zero()
        if hasattr(self, "_eval_dataloaders"):
            del self._eval_dataloaders

    @property
    def gather_function(self):
        """Gathers what the ranks have evaluated, without the samples that fill the last batch."""
        return functools.partial(self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object)

    @gather_function.setter
    def gather_function(self, function):
        """Ignores the function of Seq2SeqTrainer, which keeps these samples: metrics and predictions would depend on the world."""

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("hvdrun: hyperparameter_search: an elastic Trainer trains one model")

    # The data.

    def _hvd_place(self):
        """Returns the epoch, the number of its completed backward passes, the rank and the size of the world."""
        return self._hvd_epochs, (self.state.global_step - self._hvd_begun) * self.args.gradient_accumulation_steps, _job.rank, _job.size

    def get_train_dataloader(self):
        args, dataset, collate = self.args, self.train_dataset, self.data_collator
        if dataset is None:
            raise ValueError("hvdrun: training needs a train_dataset")
        if transformers.utils.is_datasets_available() and isinstance(dataset, transformers.trainer.datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description="Training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="Training")
        options = dict(num_workers=args.dataloader_num_workers, pin_memory=args.dataloader_pin_memory,
                       prefetch_factor=args.dataloader_prefetch_factor)
        batch, seed = self._hvd_batch, args.seed if args.data_seed is None else args.data_seed
        if isinstance(dataset, IterableDataset):
            again = 2 * args.gradient_accumulation_steps
            loader = DataLoader(_Stream(dataset, batch, args.dataloader_drop_last, again, self._hvd_place), batch_size=None,
                                collate_fn=_Counted(collate), **options)
        else:
            init = functools.partial(transformers.trainer_utils.seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index)
            self._hvd_batches = _Batches(self._get_train_sampler(dataset), batch, seed, args.dataloader_drop_last,
                                         lambda: self._hvd_place()[:2])
            loader = DataLoader(dataset, batch_sampler=self._hvd_batches, collate_fn=collate, worker_init_fn=init, **options)
        self._hvd_loader = loader
        return loader

    def set_initial_training_values(self, args, dataloader):
        if dataloader is not self._hvd_loader:
            raise TypeError("hvdrun: get_train_dataloader is overridden, and would divide the data for one world only: override "
                            "_get_train_sampler, or give a train_dataset and a data_collator")
        self._hvd_values = super().set_initial_training_values(args, dataloader)
        return self._hvd_values

    def get_total_train_batch_size(self, args):
        return self._hvd_batch * args.gradient_accumulation_steps

    def _hvd_resize(self, batch):
        """Changes the batch to that of the other ranks, which have begun before this process."""
        self._hvd_batch = batch
        max_steps = self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]
        self.lr_scheduler = None
        self.create_scheduler(num_training_steps=max_steps)
        self.callback_handler.lr_scheduler, self.callback_handler.train_dataloader = self.lr_scheduler, self._hvd_loader

    # From the start, or a checkpoint, to the first world.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Trains like transformers.Trainer.train. True resumes from the newest whole checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **options)

    def _inner_training_loop(self, *args, resume_from_checkpoint=None, **options):
        global _trainings
        _trainings += 1
        self._hvd_number, self._hvd_resume = _trainings, resume_from_checkpoint
        told = _told(resume_from_checkpoint) if resume_from_checkpoint else None
        self._hvd_batch, self._hvd_epochs, self._hvd_begun = told or (self._train_batch_size * _job.size, 0, 0)
        self._hvd_unknown = bool(resume_from_checkpoint) and told is None  # the checkpoint is that of another Trainer
        self._hvd_first = self._hvd_ends = self._hvd_half = self._hvd_mean = self._hvd_epoch = None
        self._hvd_said = None, None
        if not any(isinstance(cb, _Hook) for cb in self.callback_handler.callbacks):
            self.callback_handler.callbacks.insert(0, _Hook(self))
        return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **options)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, *args):
        at = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        if self._hvd_unknown:
            self._hvd_epochs, self._hvd_begun = at[0], at[0] * num_update_steps_per_epoch
        return at

    def create_scheduler(self, *args, **options):
        if isinstance(self.optimizer, AcceleratedOptimizer) and "step" not in vars(self.optimizer):
            # A scheduler requires its optimizer's step to be a method.
            self._hvd_step = self.optimizer.step
            self.optimizer.step = types.MethodType(lambda _, closure=None: self._hvd_commit(closure), self.optimizer)
        return super().create_scheduler(*args, **options)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        self._hvd_model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # The loop of Trainer keeps the returned model, so this must not be the wrapper of a world.
        return self.model, loader

    # The worlds.

    def _run_epoch(self, **rest):
        """Runs all epochs, in one world after the other."""
        self._hvd_rest, self._hvd_running = rest, True
        ddp, scaler = self.accelerator.ddp_handler, self.accelerator.scaler
        self._hvd_training = _Training(self)
        self._hvd_state = _job.state(
            ddp=ddp.to_kwargs() if ddp is not None else {}, model=self._hvd_model, optimizer=self.optimizer.optimizer,
            training=self._hvd_training, step=self.state.global_step, **({} if scaler is None else {"scaler": scaler}))
        try:
            hvd.run(self._hvd_state, self._hvd_train, more=True)
        except hvd.Removed as removed:
            if removed.last:
                self._hvd_running = False
                with accelerate.alone(), _job.saving(self.state.global_step):
                    self._save_checkpoint(self.model, rest["trial"])
            raise
        finally:
            self._hvd_running, self.model_wrapped = False, self.model
        self.control.should_training_stop = True  # ends the loop of Trainer, because all epochs are done

    def _hvd_train(self):
        """Continues from the state: completes what the last world has left undone, then runs the epochs."""
        self.model_wrapped = self._hvd_state.model
        for cb in self.callback_handler.callbacks:
            if isinstance(cb, ProgressCallback) and cb.training_bar is None and self.state.is_world_process_zero:
                cb.on_train_begin(self.args, self.state, self.control)  # rank 0 of the last world had the bar
        try:
            if self._hvd_first:
                self._hvd_act(self._hvd_evaluate_first, evaluates=True)
            if self._hvd_half:
                self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
                self._hvd_half = None
            self._hvd_acts()
            while self._hvd_epochs < self.state.num_train_epochs and not self.control.should_training_stop:
                if self._hvd_epoch != self._hvd_epochs:
                    self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
                self.model_wrapped.zero_grad()
                self._hvd_run_epoch()
            self._hvd_act(self.store_flos)  # a collective, so before any rank leaves
        except BaseException:
            self._hvd_undo()
            raise

    def _hvd_run_epoch(self):
        """Runs one epoch by Trainer, which continues it as after a checkpoint."""
        epoch, done, _, _ = self._hvd_place()
        values = self._hvd_values
        super()._run_epoch(**dict(
            self._hvd_rest, model=self.model_wrapped, train_dataloader=self._hvd_loader, steps_in_epoch=values[5],
            num_update_steps_per_epoch=values[1], epoch=epoch, epochs_trained=epoch, steps_trained_in_current_epoch=done,
            resume_from_checkpoint=self._hvd_resume or "hvdrun"))

    def _load_rng_state(self, checkpoint):
        """Loads the random state once, after the batches before the checkpoint were skipped. In later worlds the random numbers continue."""
        if self._hvd_resume:
            super()._load_rng_state(self._hvd_resume)
            self._hvd_resume = None

    def _hvd_begin(self, step=True):
        self._hvd_state.begin(step)
        self._hvd_point = self._hvd_training.state_dict()

    def _hvd_undo(self):
        if self._hvd_point is not None:
            self._hvd_training.load_state_dict(self._hvd_point)
            self._hvd_point = None
        elif self._hvd_half and self.state.global_step < self._hvd_half:
            # A callback has failed after the commit and before the end of the step, so the step is applied.
            self._hvd_schedule()
            self.state.global_step += 1
            self.state.epoch = self._hvd_epochs + self._hvd_place()[1] / self._hvd_values[5]

    # The step.

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        self._hvd_begin()
        epoch, done, _, _ = self._hvd_place()
        self._hvd_counts, self._hvd_fetches = [], True

        def counted():
            for k, batch in enumerate(epoch_iterator, done):
                self._hvd_counts.append(batch.pop(_COUNTS) if _COUNTS in batch else self._hvd_batches.part(epoch, k)[1:])
                yield batch

        try:
            return super().get_batch_samples(counted(), num_batches, device)
        finally:
            self._hvd_fetches = False

    def _get_num_items_in_batch(self, batch_samples, device):
        if self._hvd_fetches:  # training, not an evaluation
            batch_samples = [dict(batch, **{key: torch.full_like(batch[key], -100) for key in ("labels", "shift_labels") if key in batch})
                             if not count else batch for batch, (count, _) in zip(batch_samples, self._hvd_counts)]
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model, inputs, num_items_in_batch=None):
        num_items_in_batch = self._hvd_items(inputs, num_items_in_batch)
        count, of = self._hvd_counts.pop(0)
        # A loss that is divided by the items of all ranks needs no weight. A mean over this rank's samples does, because parts are uneven.
        self._hvd_weight = count * _job.size / of if num_items_in_batch is None else float(count > 0)
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._hvd_weight = None

    def _hvd_weigh(self, compute_loss, model, inputs, return_outputs=False, num_items_in_batch=None, **options):
        """Calls compute_loss, which may be overridden, and weighs the loss."""
        items = self._hvd_items(inputs, num_items_in_batch)
        result = compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=items, **options)
        if self._hvd_weight in (None, 1.0):
            return result
        return (result[0] * self._hvd_weight, *result[1:]) if return_outputs else result * self._hvd_weight

    def _hvd_items(self, inputs, items):
        """Returns the number of items for compute_loss; None if the loss ignores it and is the mean over this rank's samples.

        With items, Trainer would multiply such a loss by the number of ranks, but gradients and evaluations must not depend on that.
        """
        if self._hvd_mean is None and items is not None:
            inputs, training = self._prepare_inputs(inputs), self.model.training
            self.model.eval()
            self._hvd_mean = False
            with torch.no_grad(), torch.random.fork_rng(devices=[_job.device] if _job.device.type == "cuda" else []), \
                    self.compute_loss_context_manager():
                once, twice = (float(self.compute_loss(self.model, dict(inputs), num_items_in_batch=n)) for n in (items, 2 * items))
            self.model.train(training)
            self._hvd_mean = abs(once - twice) < 1e-6 * abs(once)
        return None if self._hvd_mean else items

    def _hvd_commit(self, closure=None):
        """Replaces the optimizer's step: steps once all ranks have called it. First it averages the loss and the flos so far, which would
        otherwise be lost with a rank.
        """
        before = self._hvd_point
        flos = before["own"]["current_flos"]
        mine = torch.stack([(self._tr_loss - before["tr_loss"]).double(), torch.tensor(self.current_flos - flos, dtype=torch.float64).to(self._tr_loss.device)])
        dist.all_reduce(mine)
        self._tr_loss.copy_(before["tr_loss"] + mine[0] / _job.size)
        self.current_flos = flos + float(mine[1]) / _job.size
        self._hvd_state.commit(lambda: self._hvd_step(closure))
        self._hvd_half, self._hvd_point = self.state.global_step + 1, None

    def _hvd_schedule(self):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau, transformers.trainer.GreedyLR
        if not self.accelerator.optimizer_step_was_skipped and not isinstance(self.lr_scheduler, plateau):
            self.lr_scheduler.step()

    # Logs, evaluations and checkpoints: all ranks complete each of them, or repeat it in the next world.

    def _hvd_act(self, act, evaluates=False):
        self._hvd_begin(step=not evaluates)
        self._hvd_logs = []
        try:
            act()
            self._hvd_state.commit(lambda: None, step=False)
        finally:
            logs, self._hvd_logs = self._hvd_logs, None
        self._hvd_point = None
        for entry in logs:
            super().log(*entry)

    def log(self, logs, start_time=None):
        if self._hvd_logs is None:
            super().log(logs, start_time)
        else:
            self._hvd_logs.append((logs, start_time))  # logged once all ranks have reached the commit

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *rest, learning_rate=None):
        self._hvd_half = None
        self._hvd_said = None if grad_norm is None else float(grad_norm), learning_rate
        self._hvd_acts()
        if _job.changed and not self.control.should_training_stop:
            raise hvd.Changed

    def _hvd_acts(self):
        for flag in _FLAGS:
            if getattr(self.control, flag):
                self._hvd_act(functools.partial(self._hvd_do, flag), evaluates=flag == "should_evaluate")
        if self._hvd_ends:
            self._hvd_epochs, self._hvd_begun, self._hvd_ends = self._hvd_epochs + 1, self.state.global_step, None

    def _hvd_do(self, flag):
        wanted = {name: getattr(self.control, name) for name in _FLAGS}
        for name in _FLAGS:
            setattr(self.control, name, name == flag)
        rest, (grad_norm, learning_rate) = self._hvd_rest, self._hvd_said
        super()._maybe_log_save_evaluate(self._tr_loss, grad_norm, self.model_wrapped, rest["trial"], self._hvd_epochs,
                                         rest["ignore_keys_for_eval"], rest["start_time"], learning_rate=learning_rate)
        for name in _FLAGS:
            setattr(self.control, name, name != flag and wanted[name])

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        if self._hvd_running:
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        self._hvd_first = True  # before the first world

    def _hvd_evaluate_first(self):
        super()._evaluate(self._hvd_rest["trial"], self._hvd_rest["ignore_keys_for_eval"], skip_scheduler=True)
        self._hvd_first = None

    # Before and after the training.

    def evaluate(self, *args: Any, **options: Any) -> Any:
        return self._hvd_together(functools.partial(super().evaluate, *args, **options))

    def predict(self, *args: Any, **options: Any) -> Any:
        return self._hvd_together(functools.partial(super().predict, *args, **options))

    def _hvd_together(self, call):
        """Calls a collective function, and again in the next world if a rank is lost. During training, which repeats it itself, it calls it once."""
        if self._hvd_running:
            return call()
        self._hvd_running = True
        try:
            if self._hvd_state is not None:
                return _job.together(self._hvd_state, call)
            return hvd.run(_job.state(ddp=None, model=self.model), call, more=True)
        finally:
            self._hvd_running = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model like transformers.Trainer. hvdrun waits until it is saved."""
        if self._hvd_running or self._hvd_state is None or not self.args.should_save:
            return super().save_model(output_dir, _internal_call)
        with _job.saving(self.state.global_step):
            return super().save_model(output_dir, _internal_call)

    def store_flos(self):
        if self._hvd_running:
            super().store_flos()

    def _save_checkpoint(self, model, trial):
        ends = bool(self._hvd_ends)
        told = self._hvd_batch, self._hvd_epochs + ends, self.state.global_step if ends else self._hvd_begun
        self.state.stateful_callbacks[_COUNTS] = {"args": {}, "attributes": dict(zip(_TOLD, told))}
        super()._save_checkpoint(model, trial)


def _told(checkpoint):
    """Returns the position of a checkpoint: the samples of a backward pass on all ranks, the completed epochs, the step after them.

    Returns None if the checkpoint does not have it.
    """
    try:
        with open(os.path.join(checkpoint, _STATE), encoding="utf-8") as f:
            told = json.load(f)["stateful_callbacks"][_COUNTS]["attributes"]
        return tuple(told[name] for name in _TOLD)
    except (OSError, KeyError, ValueError):
        return None


def _newest(folder):
    """Returns the newest checkpoint whose last file, the state of the trainer, is complete; None if no checkpoint is."""
    found = []
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        name, _, number = entry.name.rpartition("-")
        if name == "checkpoint" and number.isdigit() and _told(entry.path):
            found.append((int(number), entry.path))
    return max(found)[1] if found else None


class Trainer(_Elastic, transformers.Trainer):
    """transformers.Trainer in a job of hvdrun; its options and methods are those of transformers."""


class Seq2SeqTrainer(_Elastic, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer in a job of hvdrun."""
