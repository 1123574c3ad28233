"""How far the trainer's log-probabilities are from those that the engine sampled with.

Both come from the same weights and the same tokens, so every difference is numerical (kernels, batching,
precision) or a bug.  Ranks hold different tokens; the measure is therefore taken in two parts:

    parts = mismatch_parts(engine, trainer)
    all_reduce(parts.sums, SUM); all_reduce(parts.maximum, MAX)
    metrics |= mismatch_metrics(parts)
"""

from typing import NamedTuple

import torch


class MismatchParts(NamedTuple):
    """What ranks reduce: elementwise, `sums` by SUM and `maximum` by MAX.  On the inputs' device."""

    sums: torch.Tensor
    """float64 `[4]`: tokens, sum |d|, sum exp|d|, sum (exp(d) - 1 - d), where d = trainer - engine."""
    maximum: torch.Tensor
    """float64 `[1]`: max |d|, 0 without tokens."""


def mismatch_parts(engine: torch.Tensor, trainer: torch.Tensor) -> MismatchParts:
    """Compare the log-probabilities (nats) of the sampled tokens.

    `engine`, `trainer`: float32 `[n]`, on one device, token for token; n = 0 is fine, so that a rank
    without tokens takes part in the reduction.  Raises ValueError unless both are 1-D and of one length.
    """
    if engine.ndim != 1 or engine.shape != trainer.shape:
        shapes = f"{list(engine.shape)} and {list(trainer.shape)}"
        raise ValueError(f"engine and trainer log-probabilities must both be [n], not {shapes}")
    # float64, since exp(d) - 1 - d is about d**2 / 2, which float32 loses below |d| = 1e-3.
    difference = trainer.detach().double() - engine.detach().double()
    distance = difference.abs()
    sums = torch.stack(
        [
            torch.ones_like(distance).sum(),
            distance.sum(),
            distance.exp().sum(),
            (difference.expm1() - difference).sum(),
        ]
    )
    maximum = torch.cat([distance, distance.new_zeros(1)]).max(0, keepdim=True).values
    return MismatchParts(sums, maximum)


def mismatch_metrics(parts: MismatchParts) -> dict[str, float]:
    """The metrics of the (reduced) parts, d = trainer - engine per token; `{}` when there was no token.

    - `mismatch/max`: max |d|, nats
    - `mismatch/mean`: mean |d|, nats
    - `mismatch/tmpe`: mean exp|d|, 1 when both agree: the multiplicative token probability error of NeMo-RL
      (docs.nvidia.com/nemo/rl, guide "Add New Models"; `token_mult_prob_error` in its logs)
    - `mismatch/kl`: mean (exp(d) - 1 - d), nats: the k3 estimate of KL(engine || trainer) from tokens that
      the engine sampled; unbiased and never negative (Schulman 2020, joschu.net/blog/kl-approx.html)
    """
    tokens, distance, ratio, kl = parts.sums.tolist()
    if tokens == 0:
        return {}
    return {
        "mismatch/max": parts.maximum.item(),
        "mismatch/mean": distance / tokens,
        "mismatch/tmpe": ratio / tokens,
        "mismatch/kl": kl / tokens,
    }
