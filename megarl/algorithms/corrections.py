"""What is done about tokens to which trainer and engine give different probabilities.

Tokens are sampled with the engine's probabilities and trained on with the trainer's.  With d = log trainer - log
engine, under the weights that sampled, w = exp(d) is the importance weight that makes the policy gradient that of the
trainer's policy.  It is bounded, as it is noise in the main, and has no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.sequences import sequence_means, sequence_sums, spread

CorrectionLevel = Literal["none", "token", "sequence", "geometric"]
CorrectionBound = Literal["truncate", "mask"]


@dataclass(frozen=True)
class CorrectionOptions:
    level: CorrectionLevel = "none"
    bound: CorrectionBound = "truncate"
    low: float = 0.0
    high: float = 2.0
    drop_mean: float | None = None
    """Nats; None: off, as for `drop_max`."""
    drop_max: float | None = None


class Correction(NamedTuple):
    weights: Tensor
    """float32 `[tokens]`: factors of the policy-gradient term."""
    bounded: Tensor
    """bool `[tokens]`: the weight was truncated or masked."""
    dropped: Tensor
    """bool `[sequences]`: too far off to be trained on at all."""


def correct(trainer: Tensor, engine: Tensor, lengths: Sequence[int], options: CorrectionOptions) -> Correction:
    """The corrections that the options ask for.

    Args:
        trainer, engine: float32 `[tokens]`: log-probabilities of the sampled tokens.
        lengths: of the sequences, which lie end to end.
    """
    difference = trainer - engine
    left_out = dropped(difference, lengths, options.drop_mean, options.drop_max)
    if options.level == "none":
        return Correction(torch.ones_like(difference), torch.zeros_like(difference, dtype=torch.bool), left_out)
    weights = importance_weights(difference, lengths, options.level)
    outside = (weights > options.high) | (weights < options.low)
    masked = options.bound == "mask"
    weights = weights.masked_fill(outside, 0.0) if masked else weights.clamp(options.low, options.high)
    return Correction(weights, outside, left_out)


def importance_weights(difference: Tensor, lengths: Sequence[int], level: CorrectionLevel) -> Tensor:
    """float32 `[tokens]`, from d per token:

    - `token`: exp(d).  Truncated: TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
      training").  Masked: IcePop (Ling team 2025, arXiv 2510.18855).
    - `sequence`: exp(sum of d), the weight of the whole completion.  Masked: MIS (Liu, Li et al. 2025, "When speed
      kills stability: demystifying RL collapse from the training-inference mismatch").
    - `geometric`: exp(mean of d), its geometric mean, which does not grow with the length; as GSPO's ratio.
    """
    if level == "token":
        return difference.exp()
    whole = {"sequence": sequence_sums, "geometric": sequence_means}[level]
    return spread(whole(difference, lengths).exp(), lengths)


def dropped(difference: Tensor, lengths: Sequence[int], mean: float | None, largest: float | None) -> Tensor:
    """bool `[sequences]`: the mean, or the largest, of |d| over the sequence is above the bound that is given."""
    parts = difference.abs().split(list(lengths))
    bounds = [
        (torch.stack([reduce(part) for part in parts]) > bound)
        for reduce, bound in ((torch.mean, mean), (torch.max, largest))
        if bound is not None
    ]
    none = torch.zeros(len(lengths), dtype=torch.bool, device=difference.device)
    return torch.stack([none, *bounds]).any(0)
