"""From the product of the QKV matrix to what attention takes: split, norms of queries and keys, rotary positions.

One pass over the numbers forward and one backward, where Megatron's own way makes some fifteen: a Triton kernel on a
GPU, and torch, which defines it.  In between everything is float32, and rounded once.
"""

import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class HeadLayout:
    """How Megatron lays out a token's heads: for each group its queries, its key and its value."""

    groups: int
    queries: int
    """Of a group."""
    size: int
    """Elements of a head."""


def query_key_value(
    mixed: Tensor,
    angles: Tensor,
    layout: HeadLayout,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[tokens, groups * queries, size]`, keys and values `[tokens, groups, size]`.

    Args:
        mixed: `[tokens, 1, groups * (queries + 2) * size]`.
        angles: float32 `[tokens, 1, 1, size]`, of which the second half repeats the first (Su et al., RoFormer,
            arXiv:2104.09864, with the two halves of a head as real and imaginary parts).
        query_norm, key_norm: `[size]`, weights of an RMSNorm over each head; both or neither.
        eps: of the norms.
    """
    turns = _turns(angles)
    mixed = mixed.view(mixed.shape[0], -1)
    if mixed.is_cuda:
        from megarl.models.query_key_value_triton import QueryKeyValue

        return QueryKeyValue.apply(mixed, turns, layout, query_norm, key_norm, eps)
    heads = mixed.view(len(mixed), layout.groups, layout.queries + 2, layout.size)
    query, key, value = heads.split([layout.queries, 1, 1], 2)
    query, key, value = (x.reshape(len(mixed), -1, layout.size) for x in (query, key, value))
    if query_norm is not None:
        query, key = (
            F.rms_norm(x.float(), x.shape[-1:], w.float(), eps) for x, w in ((query, query_norm), (key, key_norm))
        )
    return _rotated(query, turns).to(mixed.dtype), _rotated(key, turns).to(mixed.dtype), value


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """`[tokens, heads, size]`, each head turned by its token's angles."""
    return _rotated(x, _turns(angles)).to(x.dtype)


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    cos, sin = turns[:, None].chunk(2, -1)
    real, imaginary = x.float().chunk(2, -1)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)


_latest: tuple[weakref.ref, Tensor] | None = None


def _turns(angles: Tensor) -> Tensor:
    """float32 `[tokens, size]`: cosines, then sines.  All layers of a row turn by the same angles: computed once."""
    global _latest
    if _latest is None or _latest[0]() is not angles:
        half = angles.detach()[:, 0, 0].chunk(2, -1)[0]
        _latest = weakref.ref(angles), torch.cat([half.cos(), half.sin()], -1)
    return _latest[1]
