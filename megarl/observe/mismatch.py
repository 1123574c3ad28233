"""How far the trainer's log-probabilities are from those that the engine sampled with.

Both come from the same weights and the same tokens, so every difference is numerical (kernels, batching,
precision) or a bug.  Ranks hold different tokens; the measure is therefore taken in two parts:

    parts = mismatch_parts(engine, trainer)
    all_reduce(parts.sums, SUM); all_reduce(parts.maximum, MAX)
    metrics |= mismatch_metrics(parts)

or for samples of several kinds with `mismatch_by_label` and `labelled_metrics`.
"""

from collections.abc import Sequence
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


def mismatch_by_label(
    engine: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor], labels: Sequence[str], names: Sequence[str]
) -> MismatchParts:
    """Parts over all samples, and over those of each label: `sums` `[1 + len(names), 4]`, `maximum` likewise.

    Args:
        engine, trainer: float32 `[n]` per sample.
        labels: of the samples, each in `names`.
        names: the same on all ranks.
    """
    none = torch.zeros(0)
    chosen = [range(len(labels)), *([i for i, label in enumerate(labels) if label == name] for name in names)]
    parts = [
        mismatch_parts(torch.cat([none, *(engine[i] for i in some)]), torch.cat([none, *(trainer[i] for i in some)]))
        for some in chosen
    ]
    return MismatchParts(torch.stack([p.sums for p in parts]), torch.stack([p.maximum for p in parts]))


def labelled_metrics(parts: MismatchParts, names: Sequence[str]) -> dict[str, float]:
    """`mismatch_metrics` of all samples, and as `mismatch/max/NAME` of each label that has some."""
    overall, *labelled = (MismatchParts(*row) for row in zip(parts.sums, parts.maximum, strict=True))
    found = mismatch_metrics(overall)
    for name, part in zip(names, labelled, strict=True):
        found |= {f"{key}/{name}": value for key, value in mismatch_metrics(part).items()}
    return found
