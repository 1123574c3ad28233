"""Advantages of a group's rollouts from their rewards."""

from collections.abc import Callable

import torch
from torch import Tensor


def group_std(rewards: Tensor, epsilon: float = 1e-6) -> Tensor:
    """(r - mean) / (standard deviation + epsilon) within each group; 0 where all rewards are equal.

    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1), with the unbiased standard deviation.

    Args:
        rewards: float32 `[groups, rollouts]`.

    Returns:
        float32 `[groups, rollouts]`.
    """
    return group_mean(rewards) / (rewards.std(dim=1, keepdim=True) + epsilon)  # 0 / epsilon where constant


def group_mean(rewards: Tensor) -> Tensor:
    """r - mean within each group; 0 where all rewards are equal.  Dr. GRPO (Liu et al. 2025, arXiv 2503.20783).

    Args:
        rewards: float32 `[groups, rollouts]`.

    Returns:
        float32 `[groups, rollouts]`.
    """
    # Exactly 0: the mean of equal rewards may differ from them in the last bit, which a division by their
    # standard deviation would blow up.
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred.masked_fill(constant_groups(rewards)[:, None], 0.0)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"group_std": group_std, "group_mean": group_mean}
"""By the name that a recipe gives (`algorithm.advantage`)."""


def constant_groups(rewards: Tensor) -> Tensor:
    """bool `[groups]`: groups whose rollouts all earned the same, and so teach nothing."""
    return (rewards == rewards[:, :1]).all(dim=1)


def spread(advantages: Tensor, lengths: list[int]) -> Tensor:
    """One advantage per sequence (float32 `[sequences]`) to one per completion token."""
    return advantages.repeat_interleave(torch.tensor(lengths, device=advantages.device))
