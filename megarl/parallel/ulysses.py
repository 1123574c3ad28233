"""Attention under context parallelism: each rank sees whole rows for a part of the heads.

Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509): one all-to-all turns parts of a row with all heads into whole
rows with a part of the heads, and one turns the outputs back.  The attention in between is the ordinary one and knows
nothing of it, so segments need no alignment, on any device.
"""

import copy
import math

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megarl.parallel import context


def kv_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key-value head is repeated so that the ranks can share them.

    Raises:
        ValueError: the query heads do not divide over the ranks, or not over the repeated key-value heads.
    """
    repeats = math.lcm(kv_heads, ranks) // kv_heads
    if heads % ranks or heads % (kv_heads * repeats):
        raise ValueError(f"{heads} heads with {kv_heads} key-value heads do not divide over {ranks} ranks")
    return repeats


class UlyssesAttention(MegatronModule):
    """Wraps a core attention for packed rows; made by `ulysses`."""

    inner: type

    def __init__(self, config, *args, **kwargs):
        super().__init__(config=config)
        ranks, split = context.group().size(), config.tensor_model_parallel_size
        self.repeats = kv_repeats(config.num_attention_heads // split, max(1, config.num_query_groups // split), ranks)
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        alone.num_attention_heads = config.num_attention_heads // ranks
        alone.num_query_groups = config.num_query_groups * self.repeats // ranks
        self.attention = self.inner(alone, *args, **kwargs)
        self.softmax_offset = None  # read by Megatron's SelfAttention

    def forward(self, query, key, value, attention_mask=None, *, packed_seq_params, **kwargs) -> Tensor:
        """query `[t, heads, d]`, key and value `[t, kv_heads, d]` of this rank's part of the row, to
        `[t, heads * d]`; the bounds in `packed_seq_params` are of the whole row."""
        group, (tokens, heads, dim) = context.group(), query.shape
        n = group.size()
        key, value = (x.repeat_interleave(self.repeats, 1) for x in (key, value))
        sent = torch.cat([x.reshape(tokens, n, -1, dim) for x in (query, key, value)], 2).transpose(0, 1)
        whole = _AllToAll.apply(sent, group).flatten(0, 1)
        query, key, value = whole.split([heads // n, key.shape[1] // n, value.shape[1] // n], 1)
        out = self.attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **kwargs)
        out = _AllToAll.apply(out.reshape(n, tokens, heads // n, dim), group)
        return out.transpose(0, 1).reshape(tokens, heads * dim)


def ulysses(inner: type) -> type:
    """The class to name in a layer spec in place of the core attention `inner`."""
    return type(f"Ulysses{inner.__name__}", (UlyssesAttention,), {"inner": inner})


class _AllToAll(torch.autograd.Function):
    """`x[i]` goes to rank i; its own inverse and its own gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()  # before `empty_like`, which keeps strides
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return _AllToAll.apply(gradient, ctx.group), None
