"""Which prompts a step trains on: a function of the seed and the step number, and of nothing else."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megarl.data.prompt import Prompt


class PromptSampler:
    """Walks through shuffled epochs of a data set.

    It keeps no place: `batch(step, count)` is the same whenever it is asked, so that a resumed run needs the
    step number alone.  Every epoch holds each prompt once.  Where `count` does not divide the size of the
    data set no row is dropped: a batch ends one epoch and begins the next, and may hold a prompt twice.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int):
        """`seed` is in 0 .. 2**32 - 1.

        Raises:
            ValueError: no prompts, or a seed out of range.
        """
        if not prompts:
            raise ValueError("no prompts to sample from")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed {seed} is not in 0 .. 2**32 - 1")
        self._prompts = prompts
        self._seed = seed

    def batch(self, step: int, count: int) -> list[Prompt]:
        """The prompts of one step, from 0; `count` must be the same at every step of a run."""
        return [self._prompts[index] for index in self.indices(step, count)]

    def knows(self, step: int) -> bool:
        """Whether `indices` can be asked: any step, ahead of time too."""
        return True

    def indices(self, step: int, count: int) -> list[int]:
        """Theirs in the data set: a rank that wants a part of the step reads no more than that."""
        size = len(self._prompts)
        places = (divmod(place, size) for place in range(step * count, (step + 1) * count))
        return [int(_order(size, self._seed, epoch)[place]) for epoch, place in places]


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState, not Generator: numpy promises that its stream never changes between versions.
    return np.random.RandomState([seed, epoch]).permutation(size)


def shard[T](batch: Sequence[T], dp_rank: int, dp_size: int) -> Sequence[T]:
    """The part of a data-parallel rank: contiguous, so that the parts in rank order are the batch again.

    Where `dp_size` does not divide the batch, the parts differ by one prompt; none is dropped.
    """
    return batch[dp_rank * len(batch) // dp_size : (dp_rank + 1) * len(batch) // dp_size]
