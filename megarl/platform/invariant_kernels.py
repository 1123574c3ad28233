"""Causal attention in Triton whose result for a query does not depend on what is beside it, nor on where keys lie.

Query heads that share a key head are rows of one tile.  Each row meets the keys of its segment in tiles of one size,
from the first on.  A tile that a row does not see adds exactly 0 to it, and rows of a tile do not meet: so the bits
are the same for a decode step and for a whole sequence, over pages and over packed rows.  FlashAttention's forward
(arXiv:2307.08691) in one pass without a split of the keys; backward in two without atomic additions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _KEYS = 64, 64
"""Of a tile.  Another number of keys gives other bits, on both sides."""


@triton.jit
def _keys(table, page_of, segment, start, first, total, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Places of a tile's keys in their segment, and their rows in memory."""
    keys = first + tl.arange(0, KEYS)
    if PAGE == 0:
        rows = (start + keys).to(tl.int64)
    else:
        page = tl.load(table + segment * page_of + keys // PAGE, mask=keys < total, other=0)
        rows = tl.maximum(page, 0).to(tl.int64) * PAGE + keys % PAGE  # captured steps have no pages yet
    return keys, rows


@triton.jit
def _forward(
    q, k, v, out, lse, bounds, kv_lengths, table, page_of,
    q_row, q_head, k_row, k_head, v_row, v_head, heads, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile, segment, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(bounds + segment)
    n = tl.load(bounds + segment + 1) - start
    if tile * ROWS >= n * GROUP:
        return
    total = tl.load(kv_lengths + segment)
    packed = tile * ROWS + tl.arange(0, ROWS)
    token, head, dim = packed // GROUP, kv_head * GROUP + packed % GROUP, tl.arange(0, DIM)
    real = token < n
    row = (start + token).to(tl.int64)
    queries = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + dim[None], mask=real[:, None], other=0.0)
    last = total - n + token
    end = tl.minimum(total, total - n + (tile * ROWS + ROWS - 1) // GROUP + 1)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, end, KEYS):
        keys, rows = _keys(table, page_of, segment, start, first, total, PAGE, KEYS)
        seen = (keys < total)[:, None]
        key = tl.load(k + rows[:, None] * k_row + kv_head * k_head + dim[None], mask=seen, other=0.0)
        value = tl.load(v + rows[:, None] * v_row + kv_head * v_head + dim[None], mask=seen, other=0.0)
        scores = tl.dot(queries, tl.trans(key)) * scale
        scores = tl.where(keys[None] <= last[:, None], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        less = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        mass = mass * less + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * less[:, None])
        top = higher
    mass = tl.where(mass == 0, 1.0, mass)  # padding
    place = row * heads + head
    tl.store(out + place[:, None] * DIM + dim[None], (acc / mass[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    tl.store(lse + place, top + tl.log2(mass), mask=real)


@triton.jit
def _query_gradient(
    q, k, v, gradient, lse, delta, dq, bounds,
    q_row, q_head, k_row, k_head, v_row, v_head, heads, scale, factor,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile, segment, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(bounds + segment)
    n = tl.load(bounds + segment + 1) - start
    if tile * ROWS >= n * GROUP:
        return
    packed = tile * ROWS + tl.arange(0, ROWS)
    token, head, dim = packed // GROUP, kv_head * GROUP + packed % GROUP, tl.arange(0, DIM)
    real = token < n
    row = (start + token).to(tl.int64)
    place = row * heads + head
    queries = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + dim[None], mask=real[:, None], other=0.0)
    above = tl.load(gradient + place[:, None] * DIM + dim[None], mask=real[:, None], other=0.0)
    norm, own = tl.load(lse + place, mask=real, other=0.0), tl.load(delta + place, mask=real, other=0.0)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, tl.minimum(n, (tile * ROWS + ROWS - 1) // GROUP + 1), KEYS):
        keys = first + tl.arange(0, KEYS)
        rows, seen = (start + keys).to(tl.int64), (keys < n)[:, None]
        key = tl.load(k + rows[:, None] * k_row + kv_head * k_head + dim[None], mask=seen, other=0.0)
        value = tl.load(v + rows[:, None] * v_row + kv_head * v_head + dim[None], mask=seen, other=0.0)
        weights = tl.exp2(tl.dot(queries, tl.trans(key)) * scale - norm[:, None])
        weights = tl.where((keys[None] <= token[:, None]) & real[:, None], weights, 0.0)
        ds = weights * (tl.dot(above, tl.trans(value)) - own[:, None])
        acc = tl.dot(ds.to(key.dtype), key, acc)
    tl.store(dq + place[:, None] * DIM + dim[None], (acc * factor).to(dq.dtype.element_ty), mask=real[:, None])


@triton.jit
def _key_gradient(
    q, k, v, gradient, lse, delta, dk, dv, bounds,
    q_row, q_head, k_row, k_head, v_row, v_head, heads, kv_heads, scale, factor,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile, segment, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(bounds + segment)
    n = tl.load(bounds + segment + 1) - start
    if tile * KEYS >= n:
        return
    keys, dim = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, DIM)
    rows, seen = (start + keys).to(tl.int64), (keys < n)[:, None]
    key = tl.load(k + rows[:, None] * k_row + kv_head * k_head + dim[None], mask=seen, other=0.0)
    value = tl.load(v + rows[:, None] * v_row + kv_head * v_head + dim[None], mask=seen, other=0.0)
    key_acc = tl.zeros([KEYS, DIM], tl.float32)
    value_acc = tl.zeros([KEYS, DIM], tl.float32)
    for first in range(tile * KEYS * GROUP, n * GROUP, ROWS):
        packed = first + tl.arange(0, ROWS)
        token, head = packed // GROUP, kv_head * GROUP + packed % GROUP
        real = token < n
        row = (start + token).to(tl.int64)
        place = row * heads + head
        queries = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + dim[None], mask=real[:, None], other=0.0)
        above = tl.load(gradient + place[:, None] * DIM + dim[None], mask=real[:, None], other=0.0)
        norm, own = tl.load(lse + place, mask=real, other=0.0), tl.load(delta + place, mask=real, other=0.0)
        weights = tl.exp2(tl.dot(key, tl.trans(queries)) * scale - norm[None])
        weights = tl.where((keys[:, None] <= token[None]) & real[None], weights, 0.0)
        value_acc = tl.dot(weights.to(above.dtype), above, value_acc)
        ds = weights * (tl.dot(value, tl.trans(above)) - own[None])
        key_acc = tl.dot(ds.to(queries.dtype), queries, key_acc)
    place = (rows * kv_heads + kv_head)[:, None] * DIM + dim[None]
    tl.store(dk + place, (key_acc * factor).to(dk.dtype.element_ty), mask=seen)
    tl.store(dv + place, value_acc.to(dv.dtype.element_ty), mask=seen)


@triton.jit
def _append(
    key, value, k_cache, v_cache, blocks, offsets, block_stride, token_stride, width,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, DIM)
    slot = tl.load(blocks + row) * block_stride + tl.load(offsets + row) * token_stride
    for head in tl.static_range(HEADS):
        at = head * DIM + place
        tl.store(k_cache + slot + at, tl.load(key + row * width + at))
        tl.store(v_cache + slot + at, tl.load(value + row * width + at))


_LOG2_E = 1.4426950408889634


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    kv_lengths: Tensor,
    table: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `megarl.platform.invariant`: `paged_attention`, and without a table `segment_attention`.

    Returns:
        `[tokens, heads, dim]`, and float32 `[tokens, heads]`: log2 of the sum of exp(scores).
    """
    heads, dim = q.shape[1:]
    kv_heads = k.shape[-2]
    out, lse = q.new_zeros(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if table is None:
        table, page, row = bounds[None], 0, 0  # not read
    else:
        page, row = k.shape[1], 1
        assert table.stride(1) == 1 and k.stride(0) == page * k.stride(1) and v.stride() == k.stride()
    group = heads // kv_heads
    _forward[triton.cdiv(longest * group, _ROWS), len(bounds) - 1, kv_heads](
        q, k, v, out, lse, bounds, kv_lengths, table, table.stride(0),
        q.stride(0), q.stride(1), k.stride(row), k.stride(-2), v.stride(row), v.stride(-2), heads, scale * _LOG2_E,
        GROUP=group, DIM=dim, PAGE=page, ROWS=_ROWS, KEYS=_KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, lse


def append_pages(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """See `megarl.platform.invariant.append`; caches are contiguous from their second dimension on."""
    n, heads, dim = key.shape
    assert k_cache.stride() == v_cache.stride() and k_cache.stride()[2:] == (dim, 1)
    _append[n,](
        key.contiguous(), value.contiguous(), k_cache, v_cache, blocks, offsets, k_cache.stride(0), k_cache.stride(1),
        heads * dim, HEADS=heads, DIM=dim, num_warps=1,
    )  # fmt: skip


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    out: Tensor,
    lse: Tensor,
    gradient: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `q`, `k` and `v`, from what `attention_forward` was given and gave without a table."""
    heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    gradient = gradient.contiguous()
    delta = (gradient.float() * out.float()).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    sizes = dict(GROUP=heads // kv_heads, DIM=dim, ROWS=_ROWS, KEYS=_KEYS, num_warps=4, num_stages=2)
    _query_gradient[triton.cdiv(longest * heads // kv_heads, _ROWS), len(bounds) - 1, kv_heads](
        q, k, v, gradient, lse, delta, dq, bounds, *strides, heads, scale * _LOG2_E, scale, **sizes
    )
    _key_gradient[triton.cdiv(longest, _KEYS), len(bounds) - 1, kv_heads](
        q, k, v, gradient, lse, delta, dk, dv, bounds, *strides, heads, kv_heads, scale * _LOG2_E, scale, **sizes
    )
    return dq, dk, dv
