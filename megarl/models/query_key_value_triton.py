"""`megarl.models.query_key_value` in Triton.  A program has all heads of a token at a time, as the halves that turn
into each other."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_TOKENS = 8
"""Of a program of the backward pass, which adds up the gradient of the norms' weights over them."""


class QueryKeyValue(torch.autograd.Function):
    """See `megarl.models.query_key_value.query_key_value`."""

    @staticmethod
    def forward(ctx, mixed: Tensor, turns: Tensor, layout, query_norm: Tensor | None, key_norm: Tensor | None, eps):
        tokens, size = len(mixed), layout.size
        query = mixed.new_empty(tokens, layout.groups * layout.queries, size)
        key, value = (mixed.new_empty(tokens, layout.groups, size) for _ in range(2))
        norms = query_norm is not None
        if tokens:
            _forward[(tokens,)](
                mixed, turns, query_norm, key_norm, query, key, value, eps, **_shape(layout), NORMS=norms, num_warps=4
            )
        ctx.save_for_backward(mixed if norms else None, turns, query_norm, key_norm)
        ctx.layout, ctx.eps, ctx.like = layout, eps, (mixed.shape, mixed.dtype)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        mixed, turns, query_norm, key_norm = ctx.saved_tensors
        gradients, layout = [g.contiguous() for g in gradients], ctx.layout
        shape, dtype = ctx.like
        out = torch.empty(shape, dtype=dtype, device=turns.device)
        programs, norms = triton.cdiv(len(out), _TOKENS), query_norm is not None
        sums = torch.zeros(2, programs, layout.size, device=turns.device) if norms else None
        if programs:
            _backward[(programs,)](
                *(mixed, turns, query_norm, key_norm, *gradients, out, sums, len(out), programs, ctx.eps),
                **_shape(layout),
                TOKENS=_TOKENS,
                NORMS=norms,
                num_warps=8,
            )
        of_norms = sums.sum(1).to(query_norm.dtype) if norms else (None, None)
        return out, None, None, *of_norms, None


def _shape(layout) -> dict:
    rows = layout.groups * (layout.queries + 2)
    return dict(
        GROUPS=layout.groups,
        QUERIES=layout.queries,
        HALF=layout.size // 2,
        ROWS=triton.next_power_of_2(rows),
        LANES=triton.next_power_of_2(layout.size // 2),
    )


@triton.jit
def _places(token, GROUPS: tl.constexpr, QUERIES: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Where each head of `mixed` begins there, among the queries, and among keys or values; and what it is."""
    row = tl.arange(0, ROWS)
    group, member = row // (QUERIES + 2), row % (QUERIES + 2)
    real = row < GROUPS * (QUERIES + 2)
    token = token.to(tl.int64)
    mixed = (token * GROUPS * (QUERIES + 2) + row) * 2 * HALF
    query = ((token * GROUPS + group) * QUERIES + member) * 2 * HALF
    key = (token * GROUPS + group) * 2 * HALF
    return mixed, query, key, real & (member < QUERIES), real & (member == QUERIES), real & (member == QUERIES + 1)


@triton.jit
def _weights(query_norm, key_norm, lane, inside, is_query):
    of_query = tl.load(query_norm + lane, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + lane, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])


@triton.jit
def _forward(
    mixed,
    turns,
    query_norm,
    key_norm,
    query,
    key,
    value,
    eps,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    NORMS: tl.constexpr,
):
    token = tl.program_id(0)
    from_mixed, to_query, to_key, is_query, is_key, is_value = _places(token, GROUPS, QUERIES, HALF, ROWS)
    lane = tl.arange(0, LANES)
    inside = lane < HALF
    mask = (is_query | is_key | is_value)[:, None] & inside[None, :]
    here = mixed + from_mixed[:, None] + lane[None, :]
    raw_a = tl.load(here, mask=mask, other=0.0)
    raw_b = tl.load(here + HALF, mask=mask, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if NORMS:
        inverse = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        a = a * inverse * _weights(query_norm, key_norm, lane, inside, is_query)
        b = b * inverse * _weights(query_norm + HALF, key_norm + HALF, lane, inside, is_query)
    line = turns + token.to(tl.int64) * 2 * HALF + lane
    cos = tl.load(line, mask=inside, other=0.0)[None, :]
    sin = tl.load(line + HALF, mask=inside, other=0.0)[None, :]
    kind = query.dtype.element_ty
    out_a, out_b = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    there = query + to_query[:, None] + lane[None, :]
    mask = is_query[:, None] & inside[None, :]
    tl.store(there, out_a, mask=mask)
    tl.store(there + HALF, out_b, mask=mask)
    there = key + to_key[:, None] + lane[None, :]
    mask = is_key[:, None] & inside[None, :]
    tl.store(there, out_a, mask=mask)
    tl.store(there + HALF, out_b, mask=mask)
    there = value + to_key[:, None] + lane[None, :]
    mask = is_value[:, None] & inside[None, :]
    tl.store(there, raw_a, mask=mask)
    tl.store(there + HALF, raw_b, mask=mask)


@triton.jit
def _of_heads(query, key, value, to_query, to_key, is_query, is_key, is_value, lane, inside):
    """A half of the gradient of each head, wherever it lies."""
    out = tl.load(query + to_query[:, None] + lane[None, :], mask=is_query[:, None] & inside[None, :], other=0.0)
    out += tl.load(key + to_key[:, None] + lane[None, :], mask=is_key[:, None] & inside[None, :], other=0.0)
    out += tl.load(value + to_key[:, None] + lane[None, :], mask=is_value[:, None] & inside[None, :], other=0.0)
    return out.to(tl.float32)


@triton.jit
def _backward(
    mixed,
    turns,
    query_norm,
    key_norm,
    query,
    key,
    value,
    out,
    sums,
    tokens,
    programs,
    eps,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    NORMS: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    inside = lane < HALF
    sum_a = tl.zeros((ROWS, LANES), tl.float32)
    sum_b = tl.zeros((ROWS, LANES), tl.float32)
    for step in range(TOKENS):
        token = program * TOKENS + step
        exists = token < tokens
        from_mixed, to_query, to_key, is_query, is_key, is_value = _places(token, GROUPS, QUERIES, HALF, ROWS)
        is_query, is_key, is_value = is_query & exists, is_key & exists, is_value & exists
        mask = (is_query | is_key | is_value)[:, None] & inside[None, :]
        a = _of_heads(query, key, value, to_query, to_key, is_query, is_key, is_value, lane, inside)
        b = _of_heads(
            query + HALF, key + HALF, value + HALF, to_query, to_key, is_query, is_key, is_value, lane, inside
        )
        line = turns + token.to(tl.int64) * 2 * HALF + lane
        cos = tl.load(line, mask=inside & exists, other=0.0)[None, :]
        sin = tl.load(line + HALF, mask=inside & exists, other=0.0)[None, :]
        straight = is_value[:, None]
        grad_a = tl.where(straight, a, a * cos + b * sin)
        grad_b = tl.where(straight, b, b * cos - a * sin)
        if NORMS:
            here = mixed + from_mixed[:, None] + lane[None, :]
            x_a = tl.load(here, mask=mask, other=0.0).to(tl.float32)
            x_b = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x_a * x_a + x_b * x_b, 1) / (2 * HALF) + eps)[:, None]
            x_a, x_b = x_a * inverse, x_b * inverse
            sum_a += grad_a * x_a
            sum_b += grad_b * x_b
            w_a = grad_a * _weights(query_norm, key_norm, lane, inside, is_query)
            w_b = grad_b * _weights(query_norm + HALF, key_norm + HALF, lane, inside, is_query)
            mean = (tl.sum(w_a * x_a + w_b * x_b, 1) / (2 * HALF))[:, None]
            grad_a = tl.where(straight, grad_a, inverse * (w_a - x_a * mean))
            grad_b = tl.where(straight, grad_b, inverse * (w_b - x_b * mean))
        there = out + from_mixed[:, None] + lane[None, :]
        tl.store(there, grad_a.to(out.dtype.element_ty), mask=mask)
        tl.store(there + HALF, grad_b.to(out.dtype.element_ty), mask=mask)
    if NORMS:
        _, _, _, is_query, is_key, _ = _places(program, GROUPS, QUERIES, HALF, ROWS)
        line = sums + program * 2 * HALF + lane
        tl.store(line, tl.sum(tl.where(is_query[:, None], sum_a, 0.0), 0), mask=inside)
        tl.store(line + HALF, tl.sum(tl.where(is_query[:, None], sum_b, 0.0), 0), mask=inside)
        line += programs * 2 * HALF
        tl.store(line, tl.sum(tl.where(is_key[:, None], sum_a, 0.0), 0), mask=inside)
        tl.store(line + HALF, tl.sum(tl.where(is_key[:, None], sum_b, 0.0), 0), mask=inside)
