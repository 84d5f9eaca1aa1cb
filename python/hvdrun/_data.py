"""Batches that the worker processes of a DataLoader load ahead of the steps that use them."""
import collections

import torch.utils.data


def check(loader):
    """Raises TypeError if a loader has its own order of samples, which Job.steps would not follow."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise TypeError("hvdrun: data has an IterableDataset, whose samples have no indices, so they cannot be divided among the ranks: use "
                        "a data set with __getitem__")
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        own = f"batch_sampler={type(loader.batch_sampler).__name__}"
    else:
        sampler = loader.sampler
        kinds = torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler, torch.utils.data.DistributedSampler
        if type(sampler) in kinds and not getattr(sampler, "replacement", False) and getattr(sampler, "num_samples", 0) <= len(loader.dataset):
            return
        own = f"sampler={type(sampler).__name__}"
    raise TypeError(f"hvdrun: job.steps takes each sample of the data set once in an epoch, and cannot use data=DataLoader({own}): remove "
                    "that argument, and use torch.utils.data.Subset for a part of the data set; to draw samples at random, use "
                    "order[step.indices] in the body, where order is drawn with step.epoch as its seed")


class Ahead:
    """The batches of this rank, from a DataLoader whose worker processes outlive the worlds.

    The loader requests indices ahead of time. Batches that it has requested in a world that has ended are dropped when they arrive.
    """

    def __init__(self, loader, plan, job):
        self._plan, self._job = plan, job
        self._next, self._total = 0, 0
        self._asked = collections.deque()  # (generation, step) of the requested batches
        again = dict(num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
                     timeout=loader.timeout, worker_init_fn=loader.worker_init_fn, generator=loader.generator,
                     multiprocessing_context=loader.multiprocessing_context, prefetch_factor=loader.prefetch_factor)
        self._loader = torch.utils.data.DataLoader(loader.dataset, batch_sampler=self, **again)
        self._batches = None
        self._generation = None

    def __len__(self):
        return self._total

    def __iter__(self):
        """Yields the indices of the next steps to the loader."""
        while self._next < self._total:
            step, self._next = self._next, self._next + 1
            part = self._plan.part(step, self._job.rank, self._job.size)
            if part:
                self._asked.append((self._generation, step))
                yield part

    def take(self, step, total):
        """Returns the batch of a step, or None if this rank has no samples in it."""
        job = self._job
        if self._generation != job.generation or self._total != total:
            self._generation, self._next, self._total = job.generation, step, total
        if not self._plan.part(step, job.rank, job.size):
            return None
        if self._batches is None:
            self._batches = iter(self._loader)
        while True:
            try:
                batch = next(self._batches)
            except StopIteration:
                # The loader had come to the end of the indices before this step was repeated.
                self._asked.clear()
                self._next, self._batches = step, iter(self._loader)
                continue
            if self._asked.popleft() == (self._generation, step):
                return batch
