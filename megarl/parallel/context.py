"""Context parallelism: which part of a row a rank has, and how the parts become whole again.

Rank r of n has the places r * T / n to (r + 1) * T / n of a row of T tokens, whatever its segments are.  `shard`
is the one function that says so: embeddings, media masks, deepstack features and positions all go through it, after
the media features were merged into the whole row.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def group() -> dist.ProcessGroup:
    """The context-parallel group of this rank; of one rank where there is no context parallelism."""
    return parallel_state.get_context_parallel_group()


def bounds(tokens: int) -> tuple[int, int]:
    """First place of this rank's part of a row of `tokens`, and the place after its last."""
    n = group().size()
    if tokens % n:
        raise ValueError(f"a row of {tokens} tokens does not divide over {n} context-parallel ranks")
    size = tokens // n
    return group().rank() * size, (group().rank() + 1) * size


def shard(values: Tensor, dim: int) -> Tensor:
    """This rank's part of what covers a whole row along `dim`; its gradient is zero elsewhere."""
    first, last = bounds(values.shape[dim])
    return values.narrow(dim, first, last - first)


def gather_uneven(values: Tensor, counts: list[int]) -> Tensor:
    """The ranks' parts along the last dimension, one after another.

    The gradient of a part is this rank's slice of the result's: every rank computes the same from the whole, so
    nothing is summed.

    Args:
        values: `[..., counts[rank]]`.
        counts: of each rank.
    """
    return values if group().size() == 1 else _GatherUneven.apply(values, counts)


class _GatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, counts):
        ctx.counts = counts
        # Padded to one size: gloo has no uneven all-gather.
        padded = values.new_zeros(*values.shape[:-1], max(counts))
        padded[..., : values.shape[-1]] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group())
        return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], -1)

    @staticmethod
    def backward(ctx, gradient):
        first = sum(ctx.counts[: group().rank()])
        return gradient[..., first : first + ctx.counts[group().rank()]], None
