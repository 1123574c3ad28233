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


def advantages(
    rewards: Tensor, options: AdvantageOptions, total: Total = Tensor.double, judged: Tensor | None = None
) -> Tensor:
    """Advantages by the name that a recipe gives.

    Args:
        rewards: float32 `[groups, rollouts, components]`; a rollout's reward is the sum of its components.
        total: called by those that look at the whole batch, equally often on every rank; the default is for one rank.
        judged: bool `[groups, rollouts]`; False for rollouts of which no reward is known.  A group is then the others:
            no mean and no deviation knows them, and their advantage is 0.  None: all were judged.

    Returns:
        float32 `[groups, rollouts]`.
    """
    judged = torch.ones(rewards.shape[:2], dtype=torch.bool) if judged is None else judged
    reward = rewards.sum(-1)

    def over_batch(values: Tensor, normalise: Callable[[Tensor, Total], Tensor]) -> Tensor:
        found = torch.zeros_like(reward)
        found[judged] = normalise(values[judged], total).to(found.dtype)
        return found

    match options.name:
        case "group_std":
            return by_size(group_std, reward, judged)
        case "group_mean":
            return by_size(group_mean, reward, judged)
        case "leave_one_out":
            return by_size(leave_one_out, reward, judged)
        case "batch_std":
            return over_batch(reward, batch_std)
        case "group_mean_batch_std":
            return over_batch(by_size(group_mean, reward, judged), batch_std)
        case "component_std":
            return over_batch(by_size(component_sums, rewards, judged), batch_std_of_sums)
        case "max_at_k":
            return by_size(lambda r: max_at_k(r, options.best_of), reward, judged, least=options.best_of)
    raise ValueError(f"no advantage is called {options.name!r}: should be one of {', '.join(ADVANTAGES)}")


def by_size(estimate: Callable[[Tensor], Tensor], rewards: Tensor, judged: Tensor, least: int = 2) -> Tensor:
    """What `estimate` makes of the rollouts of each group that were judged, groups with as many at a time.

    Args:
        estimate: `[groups, n, ...] -> [groups, n]`.
        rewards: `[groups, rollouts, ...]`.
        judged: bool `[groups, rollouts]`.
        least: rollouts without which a group says nothing.

    Returns:
        `[groups, rollouts]`; 0 for rollouts that were not judged, and in groups with fewer than `least` that were.
    """
    sizes, found = judged.sum(1), None
    for n in sizes.unique().tolist():
        if n < least:
            continue
        chosen = judged & (sizes == n)[:, None]
        estimated = estimate(rewards[chosen].view(-1, n, *rewards.shape[2:]))
        found = estimated.new_zeros(judged.shape) if found is None else found
        found[chosen] = estimated.flatten()
    return rewards.new_zeros(judged.shape) if found is None else found


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
        values: float32 `[groups, rollouts]`, or flat where some rollouts are left out.
        total: called twice.

    Returns:
        Of the same shape and type.
    """
    # In float64, where the mean of equal float32 values is that value.
    exact = values.double()
    count, added = total(torch.stack([torch.tensor(float(values.numel())), exact.sum()])).tolist()
    centred = exact - added / max(count, 1)
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
    return batch_std_of_sums(component_sums(rewards), total).to(rewards.dtype)


def component_sums(rewards: Tensor) -> Tensor:
    """Its first half: the sum of the components, each normalised within its group.

    In float64: where components cancel out, what is left is rounding, and no signal.

    Args:
        rewards: float32 `[groups, rollouts, components]`.

    Returns:
        float64 `[groups, rollouts]`.
    """
    return torch.stack([group_std(component) for component in rewards.double().unbind(-1)]).sum(0)


def batch_std_of_sums(values: Tensor, total: Total = Tensor.double) -> Tensor:
    """Its second half: `batch_std` with an epsilon above that rounding."""
    return batch_std(values, total, epsilon=1e-4)


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


def constant_groups(rewards: Tensor, judged: Tensor | None = None) -> Tensor:
    """bool `[groups]`: groups whose rollouts all earned the same, and so teach nothing where a group is its own
    baseline; of those that were `judged` (bool `[groups, rollouts]`), where not all were."""
    if judged is None:
        return (rewards == rewards[:, :1]).all(dim=1)
    first = rewards.gather(1, judged.int().argmax(1, keepdim=True))
    return ((rewards == first) | ~judged).all(dim=1)
