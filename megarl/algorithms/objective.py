"""The policy-gradient objective on completion tokens: pure functions of log-probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ObjectiveOptions:
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0


@dataclass(frozen=True, eq=False)
class ObjectiveInputs:
    """All float32 `[tokens]`, token for token."""

    log_probs: Tensor
    """Of the policy, with gradient."""
    entropy: Tensor
    """Of the policy's distributions, in nats, with gradient."""
    old_log_probs: Tensor
    """Of the policy before this batch's updates."""
    advantages: Tensor
    reference_log_probs: Tensor | None = None
    """Needed where `kl_coefficient` is not 0."""


METRICS = ("policy/loss", "policy/ratio", "policy/clip_fraction", "policy/entropy", "policy/kl")
"""Names of `objective`'s sums, each over tokens."""


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) per token.

    PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7); two bounds: DAPO (Yu et al. 2025, arXiv 2503.14476).
    """
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy, per token: an unbiased, non-negative estimate of
    KL(policy || reference) on the policy's own samples (Schulman, "Approximating KL divergence", 2020)."""
    difference = reference_log_probs - log_probs
    return difference.exp() - difference - 1


def objective(inputs: ObjectiveInputs, options: ObjectiveOptions) -> tuple[Tensor, Tensor]:
    """Sum over tokens of the loss, and detached sums `[len(METRICS)]` for reporting.

    Divide both by the number of tokens of the whole batch: over all ranks and rows, so that the gradient
    does not depend on how the batch was cut.
    """
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    surrogate = clipped_surrogate(ratio, inputs.advantages, options.clip_low, options.clip_high)
    loss = surrogate - options.entropy_coefficient * inputs.entropy
    kl = torch.zeros_like(loss)
    if options.kl_coefficient:
        kl = k3(inputs.log_probs, inputs.reference_log_probs)
        loss = loss + options.kl_coefficient * kl
    above = (ratio > 1 + options.clip_high) & (inputs.advantages > 0)
    below = (ratio < 1 - options.clip_low) & (inputs.advantages < 0)
    sums = torch.stack([x.sum() for x in (loss, ratio, (above | below).float(), inputs.entropy, kl)])
    return loss.sum(), sums.detach()


def cross_entropy(log_probs: Tensor) -> Tensor:
    """Supervised loss of the warm-up phase: -log p summed over completion tokens."""
    return -log_probs.sum()
