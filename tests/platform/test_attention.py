"""Attention over segments and pages against loops over single tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.platform.attention import paged_decode, paged_varlen, segment_attention

DIM, BLOCK = 8, 4


def attend(query, keys, values, scale):
    """One token: query `[h, d]` over keys `[n, g, d]`, each key head for h / g query heads."""
    out = []
    for head, q in enumerate(query):
        group = head * keys.shape[1] // query.shape[0]
        weights = ((keys[:, group] @ q) * scale).softmax(0)
        out.append(weights @ values[:, group])
    return torch.stack(out)


def naive(query, key, value, bounds, scale, causal):
    out = torch.empty_like(query)
    for start, end in zip(bounds, bounds[1:], strict=False):
        for t in range(start, end):
            seen = slice(start, t + 1 if causal else end)
            out[t] = attend(query[t], key[seen], value[seen], scale)
    return out


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
heads = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (4, 1)])


@settings(deadline=None)
@given(lengths, heads, st.booleans())
def test_segments(lengths, heads, causal):
    """Uneven, empty and single segments; grouped heads."""
    h, g = heads
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    n = int(bounds[-1])
    q, k, v = random(n, h, DIM, seed=1), random(n, g, DIM, seed=2), random(n, g, DIM, seed=3)
    found = segment_attention(q, k, v, bounds, 0.3, causal)
    torch.testing.assert_close(found, naive(q, k, v, bounds.tolist(), 0.3, causal))


@pytest.mark.parametrize("causal", [True, False])
def test_segment_gradients(causal):
    """Of all three inputs; padding to one batch must not count a row twice."""
    bounds = torch.tensor([0, 3, 14, 15, 26])
    inputs = [random(26, n, DIM, seed=n).requires_grad_() for n in (4, 2, 2)]
    weight = random(26, 4, DIM, seed=9)
    (segment_attention(*inputs, bounds, 0.3, causal) * weight).sum().backward()
    found = [x.grad.clone() for x in inputs]
    for x in inputs:
        x.grad = None
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    outs = []
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        for t in range(start, end):
            seen = slice(start, t + 1 if causal else end)
            outs.append(attend(copies[0][t], copies[1][seen], copies[2][seen], 0.3))
    (torch.stack(outs) * weight).sum().backward()
    for a, b in zip(found, copies, strict=True):
        torch.testing.assert_close(a, b.grad)


def test_bounds_must_cover_the_row():
    q = random(5, 1, DIM)
    with pytest.raises(ValueError, match="segments end at 4, the row has 5 tokens"):
        segment_attention(q, q, q, torch.tensor([0, 4]), 1.0, True)


def test_plan_serves_training_after_inference():
    """What was kept for a shape inside `inference_mode` is used by a backward pass."""
    bounds = torch.tensor([0, 7, 11])
    q = random(11, 1, DIM)
    with torch.inference_mode():
        segment_attention(q, q, q, bounds, 1.0, True)
    q.requires_grad_()
    segment_attention(q, q, q, bounds, 1.0, True).sum().backward()
    assert q.grad.isfinite().all()


def pages_of(kv_lengths, groups, seed):
    """Caches in which each request's blocks lie in random places, the table, and the keys and values themselves."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // BLOCK) for n in kv_lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    k_cache, v_cache = random(len(order), BLOCK, groups, DIM, seed=4), random(len(order), BLOCK, groups, DIM, seed=5)
    table = torch.full((len(kv_lengths), max(max(counts), 1) + 2), -1, dtype=torch.int32)
    keys, values, used = [], [], 0
    for request, (n, count) in enumerate(zip(kv_lengths, counts, strict=True)):
        blocks = order[used : used + count]
        used += count
        table[request, :count] = blocks
        keys.append(k_cache[blocks].flatten(0, 1)[:n])
        values.append(v_cache[blocks].flatten(0, 1)[:n])
    return k_cache, v_cache, table, keys, values


requests = st.lists(
    st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))), min_size=1, max_size=6
)


@settings(deadline=None)
@given(requests, heads, st.integers(0, 2))
def test_paged_varlen(requests, heads, padding):
    """Prompts, chunks behind earlier ones, and decode steps in one batch, then empty requests as padding."""
    h, g = heads
    n, kv = [n for n, _ in requests] + [0] * padding, [m for _, m in requests] + [0] * padding
    k_cache, v_cache, table, keys, values = pages_of(kv, g, seed=sum(kv))
    q = random(sum(n), h, DIM, seed=6)
    starts, kv_starts = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32) for x in (n, kv))
    found = paged_varlen(
        q, k_cache, v_cache, starts, kv_starts, max(n), max(kv),
        softmax_scale=0.3, causal=True, window_size=(-1, -1), block_table=table,
    )  # fmt: skip
    row = 0
    for request, (length, kv_length) in enumerate(zip(n, kv, strict=True)):
        for t in range(length):
            seen = slice(kv_length - length + t + 1)
            expected = attend(q[row], keys[request][seen], values[request][seen], 0.3)
            torch.testing.assert_close(found[row], expected)
            row += 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), heads)
def test_paged_decode(kv_lengths, heads):
    """One token a request; a length of 0 is padding, whose output is finite and not looked at."""
    h, g = heads
    k_cache, v_cache, table, keys, values = pages_of(kv_lengths, g, seed=sum(kv_lengths))
    q = random(len(kv_lengths), 1, h, DIM, seed=7)
    found = paged_decode(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(kv_lengths, dtype=torch.int32), block_table=table,
        softmax_scale=0.3, window_size=(-1, -1),
    )  # fmt: skip
    assert found.isfinite().all()
    for request, n in enumerate(kv_lengths):
        if n:
            expected = attend(q[request, 0], keys[request], values[request], 0.3)
            torch.testing.assert_close(found[request, 0], expected)


def test_other_windows_are_refused():
    q = random(1, 1, 1, DIM)
    with pytest.raises(AssertionError):
        paged_decode(q, q, q, cache_seqlens=torch.tensor([1]), block_table=None, softmax_scale=1.0, window_size=(4, 0))
