"""Sequences that lie end to end in one tensor: from one value a sequence to one a token, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor


def spread(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """One value per sequence (`[sequences]`) to one per token (`[tokens]`)."""
    return values.repeat_interleave(torch.tensor(lengths, device=values.device))


def sequence_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """`[tokens]` to `[sequences]`, differentiable."""
    return torch.stack([part.sum() for part in values.split(list(lengths))])


def sequence_means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """`[tokens]` to `[sequences]`, differentiable."""
    return torch.stack([part.mean() for part in values.split(list(lengths))])
