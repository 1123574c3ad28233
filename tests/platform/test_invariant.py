"""A row's bits are the same whatever is beside it, and near those of torch's own functions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megarl.platform import attention, invariant

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4
SCALE = DIM**-0.5


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


ROWS = {
    "matmul": (lambda x: invariant.matmul(x, random(130, 64, seed=1)), lambda x: x @ random(130, 64, seed=1).t()),
    "rms_norm": (
        lambda x: invariant.rms_norm(x, random(64, seed=1), 1e-6),
        lambda x: F.rms_norm(x, (64,), random(64, seed=1), 1e-6),
    ),
    "silu": (invariant.silu, F.silu),
    "row_sum": (invariant.row_sum, lambda x: x.sum(-1, keepdim=True)),
    "log_softmax": (invariant.log_softmax, lambda x: x.log_softmax(-1)),
    "rotation": (lambda x: torch.cat(invariant.rotation(x, x.dtype)), lambda x: torch.cat([x.cos(), x.sin()])),
    "log_probs": (
        lambda x: invariant.log_probs(x, random(130, 64, seed=1), torch.arange(len(x)), 0.7),
        lambda x: _log_probs(x, random(130, 64, seed=1), torch.arange(len(x)), 0.7),
    ),
}


def _log_probs(hidden, weight, targets, temperature):
    every = (hidden @ weight.t() / temperature).log_softmax(-1)
    return torch.stack([every[torch.arange(len(targets)), targets], torch.special.entr(every.exp()).sum(-1)])


@pytest.mark.parametrize("name", ROWS)
def test_near_torch(name):
    ours, theirs = ROWS[name]
    x = random(64, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("name", ["matmul", "rms_norm", "silu", "row_sum", "log_softmax"])
@pytest.mark.parametrize("width", [64, 33])
def test_one_row_and_many(name, width):
    """At every place in batches of odd sizes, more elements than torch gives to one thread among them."""
    functions = {
        "matmul": lambda x: invariant.matmul(x, random(1030, width, seed=1)),
        "rms_norm": lambda x: invariant.rms_norm(x, random(width, seed=1), 1e-6),
        "silu": invariant.silu,
        "row_sum": invariant.row_sum,
        "log_softmax": invariant.log_softmax,
    }
    function, x = functions[name], random(2001, width)
    whole = function(x)
    for first, last in ((0, 1), (7, 8), (2000, 2001), (3, 67), (100, 117), (1, 2001)):
        assert torch.equal(function(x[first:last].clone()), whole[first:last])


def test_zeros_behind_a_row():
    for width in (1, 2, 3, 5, 64, 100):
        x = random(5, width)
        assert torch.equal(invariant.row_sum(F.pad(x, (0, 77))), invariant.row_sum(x))


@pytest.mark.parametrize("function", ["matmul", "rms_norm", "log_softmax", "silu"])
def test_gradients(function):
    call, expected = ROWS[function]
    x = random(9, 64)
    gradients = []
    for f in (call, expected):
        leaf = x.clone().requires_grad_()
        out = f(leaf)
        gradients.append(torch.autograd.grad(out, leaf, random(*out.shape, seed=2))[0])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def paged(keys, values, lengths, seed=0):
    """Caches `[blocks, BLOCK, kv_heads, dim]` with the segments' keys at random blocks, and the table of them."""
    pages = [-(-n // BLOCK) for n in lengths]
    order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed))
    k_cache, v_cache = (random(len(order), BLOCK, KV_HEADS, DIM, seed=9) for _ in range(2))
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32)
    place, start = 0, 0
    for i, (n, count) in enumerate(zip(lengths, pages, strict=True)):
        table[i, :count] = order[place : place + count]
        for cache, rows in ((k_cache, keys), (v_cache, values)):
            flat = F.pad(rows[start : start + n], (0, 0, 0, 0, 0, count * BLOCK - n))
            cache[table[i, :count].long()] = flat.view(count, BLOCK, KV_HEADS, DIM)
        place, start = place + count, start + n
    return k_cache, v_cache, table


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 99), st.data())
def test_attention_over_rows_and_pages(lengths, seed, data):
    """The last tokens of each segment, as many as are drawn, over pages: decode steps, chunks and whole prompts."""
    tokens = sum(lengths)
    q, k, v = (
        random(tokens, HEADS, DIM, seed=seed),
        random(tokens, KV_HEADS, DIM),
        random(tokens, KV_HEADS, DIM, seed=1),
    )
    bounds = bounds_of(lengths)
    whole = invariant.segment_attention(q, k, v, bounds, max(lengths), SCALE)
    torch.testing.assert_close(whole, attention.segment_attention(q, k, v, bounds, SCALE, True), rtol=1e-5, atol=1e-5)
    new = [data.draw(st.integers(1, n)) for n in lengths]
    rows = torch.cat([torch.arange(end - n, end) for end, n in zip(bounds[1:].tolist(), new, strict=True)])
    kv_lengths = torch.tensor([*lengths, 0], dtype=torch.int32)
    k_cache, v_cache, table = paged(k, v, lengths, seed)
    padded = torch.cat([q[rows], random(2, HEADS, DIM)])
    out = invariant.paged_attention(
        padded, k_cache, v_cache, bounds_of([*new, 1]), max(new), kv_lengths, F.pad(table, (0, 0, 0, 1)), SCALE
    )
    assert torch.equal(out[:-2], whole[rows])
    assert not out[-2:].any()


_INTERPRETED = """
import sys
import torch
from triton.runtime import interpreter

set_attr = interpreter._LangPatchScope.set_attr
# Triton 3.6 makes an int of an array of one element, which NumPy 2.5 refuses.
interpreter._LangPatchScope.set_attr = lambda self, on, name, value: set_attr(
    self, on, name, (lambda tensor: tensor.handle.data.item()) if name == "__index__" else value
)
from megarl.platform import invariant, invariant_kernels
from tests.platform.test_invariant import DIM, HEADS, KV_HEADS, SCALE, bounds_of, paged, random

invariant_kernels._ROWS = invariant_kernels._KEYS = 16
lengths, new = [30, 1, 19], [1, 1, 7]
tokens, bounds = sum(lengths), bounds_of(lengths)
q, k, v = random(tokens, HEADS, DIM), random(tokens, KV_HEADS, DIM, seed=1), random(tokens, KV_HEADS, DIM, seed=2)
out, lse = invariant_kernels.attention_forward(q, k, v, bounds, max(lengths), bounds.diff(), None, SCALE)
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
expected = invariant.segment_attention(*leaves, bounds, max(lengths), SCALE)
torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
above = random(*out.shape, seed=3)
ours = invariant_kernels.attention_backward(q, k, v, bounds, out, lse, above, max(lengths), SCALE)
for a, b in zip(ours, torch.autograd.grad(expected, leaves, above), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
rows = torch.cat([torch.arange(end - n, end) for end, n in zip(bounds[1:].tolist(), new)])
pages = paged(k, v, lengths)
kv_lengths = torch.tensor(lengths, dtype=torch.int32)
few, _ = invariant_kernels.attention_forward(
    q[rows], *pages[:2], bounds_of(new), max(new), kv_lengths, pages[2], SCALE
)
assert torch.equal(few, out[rows]), (few - out[rows]).abs().max()
print("equal")
"""


def test_kernels_interpreted():
    """Triton's interpreter runs the GPU's attention: near the CPU's, backward too, and over pages bit for bit."""
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], capture_output=True, text=True, env=environment, cwd=root
    )
    assert done.stdout == "equal\n", done.stderr
