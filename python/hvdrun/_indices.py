"""Determines the samples of each rank in each step. The batch is constant: it does not depend on the number of ranks."""
from __future__ import annotations

import random


def shuffled(n, seed, epoch):
    """Returns a permutation of range(n) that depends only on seed and epoch."""
    order = list(range(n))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class Plan:
    """The batches of a training: step s takes count(s) samples, of which rank r of n takes part(s, r, n).

    samples is the length of the data set, of which an epoch has each sample once; None: the indices never end. order(n, seed, epoch)
    returns a permutation of range(n) that can be sliced.
    """

    def __init__(self, batch, samples=None, shuffle=True, seed=0, order=shuffled):
        for name, value in (("batch", batch), ("samples", samples)):
            if isinstance(value, bool) or value is not None and not isinstance(value, int):
                raise TypeError(f"hvdrun: {name}={value!r}: a number of samples must be an int")
        if batch < 1:
            raise ValueError(f"hvdrun: batch={batch}: a step needs at least one sample")
        if samples is not None and samples < 1:
            raise ValueError(f"hvdrun: samples={samples}: the data set is empty")
        self._batch, self._samples, self._seed = batch, samples, seed
        self._shuffle = shuffle and samples is not None
        self._permute, self._order = order, (-1, None)

    def _place(self, step):
        """Returns the epoch of a step, the step's first position in it, and its number of samples."""
        if self._samples is None:
            return 0, step * self._batch, self._batch
        epoch, k = divmod(step, -(-self._samples // self._batch))
        first = k * self._batch
        return epoch, first, min(self._batch, self._samples - first)

    def epoch(self, step: int) -> int:
        """Returns the epoch of a step, from 0.

        Args:
            step: its number, from 0.
        """
        return self._place(step)[0]

    def count(self, step: int) -> int:
        """Returns the number of samples of a step on all ranks together.

        Args:
            step: its number, from 0.
        """
        return self._place(step)[2]

    def ends_epoch(self, step: int) -> bool:
        """Reports whether a step is the last one of its epoch.

        Args:
            step: its number, from 0.
        """
        return self._samples is not None and self.epoch(step + 1) != self.epoch(step)

    def part(self, step: int, rank: int, size: int) -> list[int]:
        """Returns the indices of a rank's samples in a step.

        Args:
            step: its number, from 0.
            rank: the rank.
            size: the number of ranks.

        Returns:
            a list, which may be empty.
        """
        epoch, first, count = self._place(step)
        begin, end = first + count * rank // size, first + count * (rank + 1) // size
        if not self._shuffle:
            return list(range(begin, end))
        if self._order[0] != epoch:
            self._order = (epoch, self._permute(self._samples, self._seed, epoch))
        return list(self._order[1][begin:end])
