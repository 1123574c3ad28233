"""Context parallelism: which part of a row a rank has, and how the parts become whole again.

Rank r of n has the places r * T / n to (r + 1) * T / n of a row of T tokens, whatever its segments are.  `shard`
is the one function that says so: embeddings, media masks, deepstack features and positions all go through it, after
the media features were merged into the whole row.  For a ring, `megarl.packing.rows.zigzag` has put the row into an
order in which these parts are the ring's.
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


def gather_uneven(values: Tensor, counts: list[int], dim: int = -1, sum_gradients: bool = False) -> Tensor:
    """The ranks' parts along `dim`, one after another, on every rank.  Collective.

    Args:
        values: `counts[rank]` long along `dim`, otherwise of one shape.
        counts: of each rank.
        sum_gradients: what follows differs from rank to rank, and so do the gradients of the whole: a part's is the
            sum of theirs, by a collective in the backward pass.  Else every rank computes the same from the whole,
            and a part's gradient is this rank's slice.
    """
    if group().size() == 1:
        return values
    return _GatherUneven.apply(values.movedim(dim, 0), counts, sum_gradients).movedim(0, dim)


class _GatherUneven(torch.autograd.Function):
    """Along the first dimension.  Parts are padded to one size: gloo has no uneven collectives."""

    @staticmethod
    def forward(ctx, values, counts, sum_gradients):
        ctx.counts, ctx.sum_gradients = counts, sum_gradients
        padded = values.new_zeros(max(counts), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group())
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, gradient):
        counts, rank = ctx.counts, group().rank()
        parts = gradient.split(counts)
        if not ctx.sum_gradients:
            return parts[rank], None, None
        padded = gradient.new_zeros(len(counts), max(counts), *gradient.shape[1:])
        for place, part in zip(padded, parts, strict=True):
            place[: len(part)] = part
        mine = torch.empty_like(padded[0])
        dist.reduce_scatter_tensor(mine, padded.flatten(0, 1), group=group())
        return mine[: counts[rank]], None, None
