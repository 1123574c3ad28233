"""Split, norms and rotary positions: against Megatron's own operations, and the kernel against torch."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import lazy
from tests.hopper import compiled

ours = lazy("megarl.models.query_key_value")
rope = lazy("megatron.core.models.common.embeddings.rope_utils")

TOKENS, SIZE = 11, 12


@pytest.mark.parametrize("groups, queries", [(2, 3), (4, 1)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.ranks(1)
def test_against_megatron(groups, queries, norms):
    generator = torch.Generator().manual_seed(5)
    mixed = torch.randn(TOKENS, 1, groups * (queries + 2) * SIZE, generator=generator, requires_grad=True)
    half = torch.rand(TOKENS, 1, 1, SIZE // 2, generator=generator) * 100
    angles = torch.cat([half, half], -1)
    weights = [torch.rand(SIZE, generator=generator, requires_grad=True) for _ in range(2)] if norms else []
    out = ours.query_key_value(mixed, angles, ours.HeadLayout(groups, queries, SIZE), *weights, eps=1e-5)

    heads = mixed.view(TOKENS, 1, groups, -1).split([queries * SIZE, SIZE, SIZE], 3)
    query, key, value = (x.reshape(TOKENS, 1, -1, SIZE) for x in heads)
    if norms:
        query, key = (F.rms_norm(x, (SIZE,), w, 1e-5) for x, w in zip((query, key), weights, strict=True))
    query, key = (rope._apply_rotary_pos_emb_bshd(x, angles) for x in (query, key))
    combination = [torch.randn(x.shape, generator=generator) for x in out]
    inputs = [mixed, *weights]
    expected = [x.squeeze(1) for x in (query, key, value)]
    torch.testing.assert_close(out, tuple(expected), atol=1e-5, rtol=1e-5)
    grads, expected_grads = (
        torch.autograd.grad(
            sum((x * c).sum() for x, c in zip(values, combination, strict=True)), inputs, retain_graph=True
        )
        for values in (out, expected)
    )
    torch.testing.assert_close(grads, expected_grads, atol=1e-4, rtol=1e-4)


@pytest.mark.ranks(1)
def test_angles_of_another_row():
    """What is kept of the angles belongs to one tensor of them."""
    x = torch.randn(TOKENS, 2, SIZE)
    first, second = (torch.rand(TOKENS, 1, 1, SIZE // 2).repeat(1, 1, 1, 2) for _ in range(2))
    once = ours.rotated(x, first)
    assert not torch.equal(ours.rotated(x, second), once)
    assert torch.equal(ours.rotated(x, first), once)


def test_triton_equals_torch():
    """The kernels' own code, interpreted: forward and every gradient, with and without norms; heads whose halves are no
    power of two, and more tokens than a program has."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"] * 4


@pytest.mark.parametrize("layout, norms", [((8, 2, 128), True), ((16, 1, 64), False), ((16, 1, 72), False)])
def test_triton_compiles(layout, norms):
    """For the heads of Qwen3 and of two towers, in bfloat16, without a register that is kept in memory."""
    from megarl.models import query_key_value_triton as triton_way
    from megarl.models.query_key_value import HeadLayout

    weights, heads = ("query_norm", "key_norm"), ("mixed", "query", "key", "value", "out")
    types = dict.fromkeys((*heads, *weights), "*bf16") | dict.fromkeys(("turns", "sums"), "*fp32")
    types |= {"tokens": "i32", "programs": "i32", "eps": "fp32"}
    constants = triton_way._shape(HeadLayout(*layout)) | {"NORMS": norms}
    absent = () if norms else weights
    forward = compiled(triton_way._forward, types, constants | dict.fromkeys(absent), num_warps=4)
    absent = () if norms else (*weights, "mixed", "sums")
    constants |= {"TOKENS": triton_way._TOKENS}
    backward = compiled(triton_way._backward, types, constants | dict.fromkeys(absent), num_warps=8)
    assert ".local" not in forward + backward


_INTERPRETED = """
import torch
from megarl.models import query_key_value as torch_way
from megarl.models.query_key_value_triton import QueryKeyValue

tokens, size = 11, 12
for groups, queries in ((2, 3), (4, 1)):
    for norms in (False, True):
        generator = torch.Generator().manual_seed(5)
        draw = lambda *shape: torch.randn(shape, generator=generator)
        mixed, half = draw(tokens, 1, groups * (queries + 2) * size), draw(tokens, 1, 1, size // 2)
        angles, layout = torch.cat([half, half], -1), torch_way.HeadLayout(groups, queries, size)
        weights = [draw(size), draw(size)] if norms else [None, None]
        leaves = [x.requires_grad_() for x in [mixed, *weights] if x is not None]
        outputs = (
            QueryKeyValue.apply(mixed.view(tokens, -1), torch_way._turns(angles), layout, *weights, 1e-5),
            torch_way.query_key_value(mixed, angles, layout, *weights, eps=1e-5),
        )
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
        combination = [draw(*x.shape) for x in outputs[0]]
        ours, expected = (
            torch.autograd.grad(sum((x * c).sum() for x, c in zip(out, combination)), leaves) for out in outputs
        )
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        print(len(outputs[0]))
"""
