"""What a token weighs in the loss of a minibatch, so that the loss is one mean over all its ranks and rows."""

from typing import Literal

import torch
from torch import Tensor

Normalization = Literal["token", "sequence", "constant"]


def batch_totals(lengths: Tensor, kept: Tensor) -> Tensor:
    """float64 `[3]`: tokens, tokens of kept sequences, kept sequences.  Sum them over the ranks.

    Args:
        lengths: int64 `[sequences]`.
        kept: bool `[sequences]`: False for those that are left out of the loss.
    """
    return torch.stack([lengths.sum(), lengths[kept].sum(), kept.sum()]).double()


def sequence_weights(
    lengths: Tensor, kept: Tensor, totals: Tensor, normalization: Normalization, constant: int
) -> Tensor:
    """float32 `[sequences]`: the weight of each of a sequence's tokens, as a multiple of 1 / (tokens of the minibatch).

    The trainer divides the sum of the loss by all tokens of the minibatch.  With T of them, T' in the S' sequences
    that are kept, and |y| in this one, the weight of its tokens is

    - `token`: T / T'.  The mean over tokens (DAPO, arXiv 2503.14476).
    - `sequence`: T / (S' |y|).  The mean over sequences of the mean over their tokens (GRPO, arXiv 2402.03300, eq. 3).
    - `constant`: T / (S' C), with C the longest that a completion may be.  Dr. GRPO (arXiv 2503.20783): no
      token weighs less for being in a long answer.

    and 0 in a sequence that is not kept.

    Args:
        totals: `batch_totals` over all ranks.
        constant: C.
    """
    tokens, kept_tokens, kept_sequences = totals.tolist()
    divisor = {
        "token": torch.full_like(lengths, int(kept_tokens)),
        "sequence": lengths * int(kept_sequences),
        "constant": torch.full_like(lengths, int(kept_sequences) * constant),
    }[normalization]
    return torch.where(kept, tokens / divisor.double(), 0.0).float()
