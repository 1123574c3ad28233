"""Attention over segments and over a paged KV cache in plain torch, batched.

Used where flash-attention is not: on a CPU, and on a GPU without its wheels.  Segments (or requests)
of similar length are padded to one batch and go through one `scaled_dot_product_attention`, so the
number of kernel calls grows with the spread of lengths and not with their number.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class _Bucket:
    rows: Tensor
    """int64 `[segments, length]`: the packed row of each place; padding repeats the segment's last row."""


@dataclass(frozen=True)
class _Plan:
    buckets: tuple[_Bucket, ...]
    order: Tensor
    """int64 `[tokens]`: where the buckets' concatenated output has the token of each packed row."""


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept must serve a training forward too
def _plan(bounds: tuple[int, ...], exact: bool, device: torch.device) -> _Plan:
    """Sorts the segments into buckets: by equal length if `exact`, else up to 1/4 of padding or 8 rows."""
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, end in zip(bounds, bounds[1:], strict=False):
        n = end - start
        if n:
            step = 1 if exact else max(8, (1 << n.bit_length()) >> 2)
            by_length.setdefault(-(-n // step) * step, []).append((start, n))
    buckets, order, base = [], torch.empty(bounds[-1], dtype=torch.long), 0
    for segments in by_length.values():
        starts = torch.tensor([s for s, _ in segments])[:, None]
        lengths = torch.tensor([n for _, n in segments])[:, None]
        width = int(lengths.max())
        place = torch.arange(width)[None]
        rows = starts + torch.minimum(place, lengths - 1)
        real = place < lengths
        order[rows[real]] = base + torch.arange(rows.numel()).view_as(rows)[real]
        buckets.append(_Bucket(rows.to(device)))
        base += rows.numel()
    return _Plan(tuple(buckets), order.to(device))


def segment_attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, causal: bool) -> Tensor:
    """Each segment attends to itself only.

    Args:
        query: `[tokens, heads, dim]`.
        key, value: `[tokens, kv_heads, dim]`; `heads` is a multiple of `kv_heads`.
        bounds: int `[segments + 1]`, cumulative; must end at `tokens`.
        scale: factor of the scores.
        causal: whether a token sees earlier tokens of its segment only.

    Returns:
        `[tokens, heads, dim]`.
    """
    cumulative = tuple(bounds.tolist())
    if cumulative[-1] != query.shape[0]:
        raise ValueError(f"segments end at {cumulative[-1]}, the row has {query.shape[0]} tokens")
    plan = _plan(cumulative, not causal, query.device)
    out = []
    for bucket in plan.buckets:
        # Right padding is invisible under a causal mask, and absent when lengths are equal.
        q, k, v = (x[bucket.rows].transpose(1, 2) for x in (query, key, value))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        out.append(o.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[plan.order]


@lru_cache(maxsize=8)
def _causal_bias(
    lengths: tuple[int, ...], kv_lengths: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`[requests, width, longest]`: 0 where a query row may look, -inf elsewhere.  All layers of a step share it."""
    n, m = torch.tensor(lengths)[:, None, None], torch.tensor(kv_lengths)[:, None, None]
    last = (m - n + torch.arange(width)[:, None]).clamp(min=0)
    hidden = torch.arange(max(kv_lengths)) > last
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).to(device)


def _attend_pages(
    query: Tensor, lengths: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lengths: Tensor, pages: Tensor, scale: float
) -> Tensor:
    """query `[b, s, h, d]` with `lengths` real rows a request -> `[b, s, h, d]`, causal at the bottom right."""
    b, s, h, d = query.shape
    block, groups = k_cache.shape[1:3]
    bias = _causal_bias(tuple(lengths.tolist()), tuple(kv_lengths.tolist()), s, query.dtype, query.device)
    longest = bias.shape[-1]
    pages = pages[:, : -(-longest // block)].clamp(min=0).flatten()
    k, v = (
        cache.index_select(0, pages).view(b, -1, groups, d)[:, :longest].transpose(1, 2) for cache in (k_cache, v_cache)
    )
    # The query heads that share a key head become rows of one matrix: twice as fast as `enable_gqa` on a CPU.
    rep = h // groups
    rows = query.view(b, s, groups, rep, d).transpose(1, 2).reshape(b, groups, s * rep, d)
    bias = bias.repeat_interleave(rep, 1) if rep > 1 and s > 1 else bias
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=bias[:, None], scale=scale)
    return out.view(b, groups, s, rep, d).transpose(1, 2).reshape(b, s, h, d)


def paged_decode(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal=True, window_size, **_):
    """`flash_attn_with_kvcache` for a batch of decode steps: q `[b, s, h, d]`, caches
    `[blocks, block, kv_heads, d]`, `cache_seqlens` int `[b]` (0 for padding), `block_table` int `[b, pages]`."""
    assert causal and tuple(window_size) == (-1, -1)
    lengths = torch.full_like(cache_seqlens, q.shape[1])
    return _attend_pages(q, lengths, k_cache, v_cache, cache_seqlens.clamp(min=1), block_table, softmax_scale)


def paged_varlen(
    q,
    k_cache,
    v_cache,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    softmax_scale,
    causal,
    window_size,
    block_table,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with a block table: prefill, chunks and decode steps in one batch.

    q `[tokens, h, d]`, caches `[blocks, block, kv_heads, d]`, `cu_seqlens_q`, `cu_seqlens_k` int `[b + 1]`.
    """
    assert causal and tuple(window_size) == (-1, -1) and not return_attn_probs
    lengths, kv_lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    out = torch.zeros_like(q)
    for request in _similar(lengths, kv_lengths):
        n = lengths[request]
        place = torch.arange(int(n.max()), device=q.device)
        rows = cu_seqlens_q[:-1][request][:, None] + torch.minimum(place, n[:, None] - 1)
        o = _attend_pages(q[rows], n, k_cache, v_cache, kv_lengths[request], block_table[request], softmax_scale)
        real = place < n[:, None]
        out[rows[real]] = o[real]
    return out


def _similar(lengths: Tensor, kv_lengths: Tensor) -> list[Tensor]:
    """Indices of the requests, in groups whose query and key lengths differ by less than two times."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (n, m) in enumerate(zip(lengths.tolist(), kv_lengths.tolist(), strict=True)):
        if n and m:
            groups.setdefault((n.bit_length(), m.bit_length()), []).append(i)
    return [torch.tensor(g, device=lengths.device) for g in groups.values()]
