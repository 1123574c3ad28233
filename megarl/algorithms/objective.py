"""The loss on completion tokens, put together from its terms: pure functions of log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.kl import ESTIMATORS, Estimator, k3
from megarl.algorithms.perception import PerceptionInputs, PerceptionOptions, perception_loss
from megarl.algorithms.surrogate import RatioLevel, Surrogate, beyond, cispo, clipped, log_ratio, unclipped


@dataclass(frozen=True)
class ObjectiveOptions:
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    """Of the term in the loss."""
    entropy_coefficient: float = 0.0
    ratio: RatioLevel = "token"
    surrogate: Surrogate = "clipped"
    dual_clip: float | None = None
    kl_estimator: Estimator = "k3"
    perception: PerceptionOptions = PerceptionOptions()


@dataclass(frozen=True, eq=False)
class ObjectiveInputs:
    """Whole sequences end to end; tensors are float32 `[tokens]`, token for token."""

    log_probs: Tensor
    """Of the policy, with gradient."""
    entropy: Tensor
    """Of the policy's distributions, in nats, with gradient."""
    old_log_probs: Tensor
    """Of the policy before this batch's updates."""
    advantages: Tensor
    lengths: Sequence[int]
    """Tokens of each sequence."""
    reference_log_probs: Tensor | None = None
    """Needed where `kl_coefficient` is not 0."""
    corrections: Tensor | None = None
    """Factors of the policy-gradient term (`megarl.algorithms.corrections`); None: 1."""
    weights: Tensor | None = None
    """Factors of the loss (`megarl.algorithms.normalization`); None: 1, a mean over tokens."""
    perception: PerceptionInputs | None = None
    """Needed where the coefficient of `perception` is not 0."""


METRICS = (
    "policy/loss",
    "policy/ratio",
    "policy/ratio_deviation",
    "policy/clip_fraction",
    "policy/clip_fraction_low",
    "policy/clip_fraction_high",
    "policy/entropy",
    "policy/kl",
    "policy/update_kl",
    "policy/perception_kl",
)
"""Names of `objective`'s sums, each over tokens; of the deviation, its square."""


def objective(inputs: ObjectiveInputs, options: ObjectiveOptions) -> tuple[Tensor, Tensor]:
    """Weighted sum over tokens of the loss, and detached sums `[len(METRICS)]` for reporting.

    Divide both by the number of tokens of the whole batch: over all ranks and rows, so that the gradient
    does not depend on how the batch was cut.
    """
    advantages, low, high = inputs.advantages, options.clip_low, options.clip_high
    logarithm = log_ratio(inputs.log_probs, inputs.old_log_probs, options.ratio, inputs.lengths)
    ratio = logarithm.exp()
    if options.surrogate == "clipped":
        loss = clipped(ratio, advantages, low, high, options.dual_clip)
    elif options.surrogate == "cispo":
        loss = cispo(inputs.log_probs, ratio, advantages, low, high)
    elif options.surrogate == "unclipped":
        loss = unclipped(ratio, advantages)
    else:
        loss = torch.zeros_like(ratio)
    if inputs.corrections is not None:
        loss = loss * inputs.corrections
    loss = loss - options.entropy_coefficient * inputs.entropy
    kl = torch.zeros_like(loss)
    if inputs.reference_log_probs is not None:
        kl = ESTIMATORS[options.kl_estimator](inputs.log_probs, inputs.reference_log_probs)
        loss = loss + options.kl_coefficient * kl
    perception_kl = torch.zeros_like(loss)
    if inputs.perception is not None:
        loss = loss + perception_loss(inputs.log_probs, inputs.entropy, inputs.perception, options.perception)
        perception_kl = k3(inputs.log_probs, inputs.perception.masked_log_probs)
    if inputs.weights is not None:
        loss = loss * inputs.weights
    below, above = (torch.zeros_like(ratio, dtype=torch.bool),) * 2
    if options.surrogate in ("clipped", "cispo"):
        below, above = beyond(ratio, advantages, low, high)
    update_kl = k3(inputs.old_log_probs, inputs.log_probs)
    sums = [
        loss,
        ratio,
        (ratio - 1).square(),
        below | above,
        below,
        above,
        inputs.entropy,
        kl,
        update_kl,
        perception_kl,
    ]
    return loss.sum(), torch.stack([x.detach().sum().to(loss.dtype) for x in sums])


def cross_entropy(log_probs: Tensor) -> Tensor:
    """Supervised loss of the warm-up phase: -log p summed over completion tokens."""
    return -log_probs.sum()
