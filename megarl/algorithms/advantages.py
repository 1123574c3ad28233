"""Advantages of a group's rollouts from their rewards.

r_ij is the reward of rollout j of prompt i; a group is the n rollouts of one prompt.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Advantage = Literal[
    "group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "component_std", "max_at_k"
]
ADVANTAGES: tuple[str, ...] = get_args(Advantage)

Total = Callable[[Tensor], Tensor]
"""The elementwise sum of a tensor over all ranks that have groups, as float64."""


@dataclass(frozen=True)
class AdvantageOptions:
    name: Advantage = "group_std"
    best_of: int | None = None
    """k of `max_at_k`, in 2 .. n."""


def advantages(rewards: Tensor, options: AdvantageOptions, total: Total = Tensor.double) -> Tensor:
    """Advantages by the name that a recipe gives.

    Args:
        rewards: float32 `[groups, rollouts, components]`; a rollout's reward is the sum of its components.
        total: called by those that look at the whole batch, equally often on every rank; the default is for one rank.

    Returns:
        float32 `[groups, rollouts]`.
    """
    reward = rewards.sum(-1)
    match options.name:
        case "group_std":
            return group_std(reward)
        case "group_mean":
            return group_mean(reward)
        case "leave_one_out":
            return leave_one_out(reward)
        case "batch_std":
            return batch_std(reward, total)
        case "group_mean_batch_std":
            return batch_std(group_mean(reward), total)
        case "component_std":
            return component_std(rewards, total)
        case "max_at_k":
            return max_at_k(reward, options.best_of)
    raise ValueError(f"no advantage is called {options.name!r}: should be one of {', '.join(ADVANTAGES)}")


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


def leave_one_out(rewards: Tensor) -> Tensor:
    """r_j less the mean of the other rewards of its group, which is n / (n - 1) (r_j - mean).

    RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740).

    Args:
        rewards: float32 `[groups, rollouts]`, at least two rollouts.

    Returns:
        float32 `[groups, rollouts]`.
    """
    n = rewards.shape[1]
    return group_mean(rewards) * (n / (n - 1))


def batch_std(values: Tensor, total: Total = Tensor.double, epsilon: float = 1e-6) -> Tensor:
    """(v - mean) / (standard deviation + epsilon) over the batch of all ranks; 0 where all values are equal.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262) where the values are rewards, and its variant with a baseline
    where they are rewards less the mean of their group.  Over rollouts, each of which counts once whatever its length.

    Args:
        values: float32 `[groups, rollouts]`.
        total: called twice.

    Returns:
        float32 `[groups, rollouts]`.
    """
    # In float64, where the mean of equal float32 values is that value.
    exact = values.double()
    count, added = total(torch.stack([torch.tensor(float(values.numel())), exact.sum()])).tolist()
    centred = exact - added / count
    squares = float(total(centred.square().sum()))
    return (centred / (math.sqrt(squares / max(count - 1, 1)) + epsilon)).to(values.dtype)


def component_std(rewards: Tensor, total: Total = Tensor.double) -> Tensor:
    """Each component is normalised within its group; their sum is normalised over the batch.

    GDPO (Liu et al. 2026, arXiv 2601.05242): a component that differs little between rollouts is not drowned
    by one that differs much.

    Args:
        rewards: float32 `[groups, rollouts, components]`.

    Returns:
        float32 `[groups, rollouts]`.
    """
    # In float64 and with a larger epsilon: where components cancel out, what is left is rounding, and no signal.
    normalised = [group_std(component) for component in rewards.double().unbind(-1)]
    return batch_std(torch.stack(normalised).sum(0), total, epsilon=1e-4).to(rewards.dtype)


def max_at_k(rewards: Tensor, k: int) -> Tensor:
    """How much a rollout raises the largest reward among k: pass@k where rewards are 0 and 1.

    A_j = k E_J[max(0, r_j - max_{i in J} r_i)], J being k - 1 of the other rollouts, each such set equally likely: the
    estimator of Walder & Karkhanis 2025 (arXiv 2505.15201, with their leave-one-out baseline of k - 1) of the gradient
    of the expected maximum of k rewards, times n, since losses are means over rollouts.  Never negative; 0 in a group
    whose rewards are equal.

    Args:
        rewards: float32 `[groups, rollouts]`.
        k: in 2 .. rollouts.

    Returns:
        float32 `[groups, rollouts]`.
    """
    n = rewards.shape[1]
    ascending, order = rewards.sort(dim=1)
    # The probability that the j-th smallest of the n - 1 others is the largest of J.
    largest = torch.tensor([math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)]).to(rewards)
    gained = (ascending[:, :, None] - ascending[:, None, :]).tril(-1)  # over each that is smaller; ties gain 0
    return k * (gained @ largest).gather(1, order.argsort(dim=1))


def constant_groups(rewards: Tensor) -> Tensor:
    """bool `[groups]`: groups whose rollouts all earned the same, and so teach nothing where a group is its own
    baseline."""
    return (rewards == rewards[:, :1]).all(dim=1)
