"""The policy-gradient term: the ratio of the policy to the one that sampled, and what is made of it.

All are per token, float32 `[tokens]`; a sequence's advantage A is the same at all its tokens.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.sequences import sequence_means, spread

RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clipped", "cispo", "unclipped", "none"]


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, level: RatioLevel, lengths: Sequence[int]) -> Tensor:
    """log policy - log old policy at each token, or the mean of that over the token's sequence.

    `sequence` is GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 7): the ratio is (pi(y) / pi_old(y))^(1 / |y|), the
    same at all tokens of a sequence, and clipped as a whole.

    Args:
        lengths: tokens of each sequence, which lie end to end.
    """
    difference = log_probs - old_log_probs
    return difference if level == "token" else spread(sequence_means(difference, lengths), lengths)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A), and where A < 0 no more than -dual A.

    PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7); two bounds: DAPO (Yu et al. 2025, arXiv 2503.14476);
    dual: dual-clip PPO (Ye et al. 2020, arXiv 1912.09729), which bounds the loss of a token with a negative
    advantage that has become much likelier.
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return loss if dual is None else torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)


def cispo(log_probs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-sg(clip(ratio, 1 - low, 1 + high)) A log policy, sg being without gradient.

    CISPO (MiniMax 2025, arXiv 2506.13585): a token beyond the bounds keeps a gradient, of bounded weight.
    The paper has no lower bound, which is low = 1.
    """
    return -ratio.detach().clamp(1 - low, 1 + high) * advantages * log_probs


def unclipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """-ratio A; REINFORCE where the policy is the one that sampled, the ratio 1 and its gradient that of log policy."""
    return -ratio * advantages


def beyond(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """bool `[tokens]` each: the ratio is below 1 - low where A < 0, and above 1 + high where A > 0."""
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
