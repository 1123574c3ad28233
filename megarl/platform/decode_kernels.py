"""One token a row against a paged KV cache, in Triton: what a decode step does between two matrix products.

`append_rotated` normalises and turns queries and keys and writes keys and values where they belong: one kernel in the
place of some ten.  `attend_pages` reads each key and value once for all query heads that share them.  Both read lengths
and places from the GPU, so that a CUDA graph of them serves every step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Rows of the smallest matrix product: query heads that share a key head are padded to it."""
_TILE, _WARPS, _STAGES = 32, 2, 4
"""Tokens that are read together, by how many warps, and how many such reads are under way."""


def append_rotated(
    qkv: Tensor,
    angles: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    offsets: Tensor,
) -> Tensor:
    """Queries, ready to attend with; keys and values go into the cache.

    Args:
        qkv: `[n, groups, (heads / groups + 2) * dim]`, contiguous: of each group its queries, its key, its value.
        angles: float32 `[n, rotated]`, `rotated <= dim` and even: the second half repeats the first.
        q_norm, k_norm: weights `[dim]` of root-mean-square norms over each head, or None.
        eps: of the norms.
        key_cache, value_cache: `[blocks, block, groups, dim]`, contiguous.
        blocks, offsets: int64 `[n]`: block of each row's token, and its place there.

    Returns:
        `[n, heads, dim]`, as `qkv`.
    """
    n, groups, width = qkv.shape
    dim = key_cache.shape[-1]
    shared = width // dim - 2
    query = torch.empty((n, groups * shared, dim), dtype=qkv.dtype, device=qkv.device)
    _append[n, groups](
        qkv,
        angles,
        q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv,
        query,
        key_cache,
        value_cache,
        blocks,
        offsets,
        eps,
        groups,
        angles.shape[-1],
        key_cache.stride(0),
        key_cache.stride(1),
        SHARED=shared,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        NORMED=q_norm is not None,
        num_warps=1,
    )
    return query


@triton.jit
def _turned(
    source,
    weight,
    place,
    angle,
    dim_mask,
    rotated,
    eps,
    DIM: tl.constexpr,
    NORMED: tl.constexpr,
):
    """A head `[WIDTH]` in float32, normalised and turned."""
    half = rotated // 2
    partner = tl.where(place < half, place + half, place - half)
    sign = tl.where(place < half, -1.0, 1.0)
    turns = place < rotated
    x = tl.load(source + place, mask=dim_mask, other=0.0).to(tl.float32)
    y = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
        x = x * scale * tl.load(weight + place, mask=dim_mask, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
    return tl.where(turns, x * tl.cos(angle) + sign * y * tl.sin(angle), x)


@triton.jit
def _append(
    qkv,
    angles,
    q_norm,
    k_norm,
    query,
    key_cache,
    value_cache,
    blocks,
    offsets,
    eps,
    groups,
    rotated,
    block_stride,
    token_stride,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, WIDTH)
    real = place < DIM
    angle = tl.load(angles + row * rotated + place, mask=place < rotated, other=0.0)
    source = qkv + (row * groups + group) * (SHARED + 2) * DIM
    for head in tl.static_range(SHARED):
        turned = _turned(source + head * DIM, q_norm, place, angle, real, rotated, eps, DIM, NORMED)
        target = query + ((row * groups + group) * SHARED + head) * DIM
        tl.store(target + place, turned.to(query.dtype.element_ty), mask=real)
    slot = tl.load(blocks + row) * block_stride + tl.load(offsets + row) * token_stride + group * DIM
    key = _turned(source + SHARED * DIM, k_norm, place, angle, real, rotated, eps, DIM, NORMED)
    tl.store(key_cache + slot + place, key.to(key_cache.dtype.element_ty), mask=real)
    value = tl.load(source + (SHARED + 1) * DIM + place, mask=real)
    tl.store(value_cache + slot + place, value.to(value_cache.dtype.element_ty), mask=real)


def attend_pages(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, table: Tensor, scale: float
) -> Tensor:
    """Softmax attention of one token a row over the keys and values of its request, accumulated in float32.

    Args:
        query: `[n, heads, dim]`, contiguous.
        key_cache, value_cache: `[blocks, block, groups, dim]`, contiguous; `block` is a multiple of 16.
        lengths: int64 `[n]`, at least 1: tokens that each row sees.
        table: int32 `[n, pages]`: the blocks of each row's request, in order.
        scale: factor of the scores.

    Returns:
        `[n, heads, dim]`, as `query`.
    """
    n, heads, dim = query.shape
    block, groups = key_cache.shape[1:3]
    # A GPU is full with some four programs a multiprocessor; where rows and groups are fewer, a row's pages are split.
    most = torch.cuda.get_device_properties(query.device).multi_processor_count * 4
    splits = max(1, min(64, most // (n * groups), table.shape[1]))
    out = torch.empty_like(query)
    partial = torch.empty((splits, n, heads, dim + 2), dtype=torch.float32, device=query.device) if splits > 1 else out
    tile = min(block & -block, _TILE)
    _attend[n, groups, splits](
        query,
        key_cache,
        value_cache,
        lengths,
        table,
        out,
        partial,
        scale * 1.4426950408889634,  # scores are powers of two
        n,
        groups,
        table.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        SHARED=heads // groups,
        ROWS=max(_ROWS, triton.next_power_of_2(heads // groups)),
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        BLOCK=block,
        TILE=tile,
        SPLITS=splits,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    if splits > 1:
        _join[n, heads](
            partial,
            out,
            n,
            heads,
            DIM=dim,
            WIDTH=triton.next_power_of_2(dim),
            SPLITS=triton.next_power_of_2(splits),
            REAL=splits,
        )
    return out


@triton.jit
def _attend(
    query,
    key_cache,
    value_cache,
    lengths,
    table,
    out,
    partial,
    scale,
    n,
    groups,
    table_stride,
    block_stride,
    token_stride,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, group, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place, head, token = tl.arange(0, WIDTH), tl.arange(0, ROWS), tl.arange(0, TILE)
    real = place < DIM
    length = tl.load(lengths + row).to(tl.int32)
    # Whole tiles to each split.
    tiles = tl.cdiv(length, TILE)
    each = tl.cdiv(tiles, SPLITS)
    first, last = split * each * TILE, tl.minimum((split + 1) * each * TILE, length)

    heads = (row * groups + group) * SHARED + head
    mine = (head < SHARED)[:, None] & real[None]
    q = tl.load(query + heads[:, None] * DIM + place[None], mask=mine, other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, last, TILE):
        page = tl.load(table + row * table_stride + start // BLOCK).to(tl.int64)
        at = page * block_stride + (start % BLOCK + token)[:, None] * token_stride + group * DIM + place[None]
        seen = start + token < length
        k = tl.load(key_cache + at, mask=seen[:, None] & real[None], other=0.0)
        score = tl.where(seen[None], tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        v = tl.load(value_cache + at, mask=seen[:, None] & real[None], other=0.0)
        total = total * shrink + tl.sum(weight, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = higher
    if SPLITS == 1:
        result = mixed / total[:, None]
        tl.store(out + heads[:, None] * DIM + place[None], result.to(out.dtype.element_ty), mask=mine)
    else:
        base = partial + (split * n * groups * SHARED + heads) * (DIM + 2)
        tl.store(base[:, None] + place[None], mixed, mask=mine)
        tl.store(base + DIM, top, mask=head < SHARED)
        tl.store(base + DIM + 1, total, mask=head < SHARED)


@triton.jit
def _join(partial, out, n, heads, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, REAL: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, split = tl.arange(0, WIDTH), tl.arange(0, SPLITS)
    one = row * heads + head
    base = partial + (split * n * heads + one) * (DIM + 2)
    there = split < REAL
    top = tl.load(base + DIM, mask=there, other=-float("inf"))
    total = tl.load(base + DIM + 1, mask=there, other=0.0)
    mixed = tl.load(base[:, None] + place[None], mask=there[:, None] & (place < DIM)[None], other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    result = tl.sum(mixed * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + one * DIM + place, result.to(out.dtype.element_ty), mask=place < DIM)
