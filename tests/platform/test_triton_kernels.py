"""The kernels' own code, interpreted on a CPU in float32, against what they stand for.  `tests/gpu` has bfloat16."""

import os
import subprocess
import sys

import pytest

_PREAMBLE = """
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

stock = interpreter._patch_lang_tensor

def patched(tensor, scope):  # NumPy makes no number of an array of one element any more
    stock(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

interpreter._patch_lang_tensor = patched
torch.manual_seed(0)
"""

_APPEND = """
from megarl.platform.decode_kernels import append_rotated

cases = [  # rows, groups, queries of each, dim, how much of it turns, with norms
    (3, 2, 2, 16, 16, True), (5, 1, 4, 24, 16, False), (2, 2, 1, 24, 24, True)
]
for n, groups, shared, dim, turned, normed in cases:
    keys, values = torch.zeros(2, 2 * n + 1, 8, groups, dim)
    block, offset = torch.randperm(2 * n)[:n], torch.randint(0, 8, (n,))
    qkv, half = torch.randn(n, groups, (shared + 2) * dim), 9 * torch.rand(n, turned // 2)
    angles = torch.cat([half, half], -1)
    norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if normed else (None, None)
    query = append_rotated(qkv, angles, *norms, 1e-6, keys, values, block, offset)

    def by_hand(x, weight):
        x = x if weight is None else F.rms_norm(x, (dim,), weight, 1e-6)
        turns, stays = x[..., :turned], x[..., turned:]
        cos, sin = (f(angles).view(n, *[1] * (x.dim() - 2), turned) for f in (torch.cos, torch.sin))
        rotated = torch.cat([-turns[..., turned // 2 :], turns[..., : turned // 2]], -1)
        return torch.cat([turns * cos + rotated * sin, stays], -1)

    heads = qkv.view(n, groups, shared + 2, dim)
    torch.testing.assert_close(query, by_hand(heads[:, :, :shared], norms[0]).flatten(1, 2))
    torch.testing.assert_close(keys[block, offset], by_hand(heads[:, :, shared], norms[1]))
    assert torch.equal(values[block, offset], heads[:, :, shared + 1])
    assert int((keys != 0).any(-1).any(-1).sum()) == n  # nothing else is written
"""

_ATTEND = """
from types import SimpleNamespace
from megarl.platform.decode_kernels import attend_pages

cases = [  # rows, groups, queries of each, dim, block; multiprocessors, of which more make more splits
    (3, 2, 2, 16, 16, 1), (3, 2, 2, 16, 16, 100), (2, 1, 20, 24, 32, 1), (1, 2, 1, 16, 64, 5), (2, 1, 4, 16, 48, 2)
]
for n, groups, shared, dim, block, processors in cases:
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=processors)
    pages = 4
    keys, values = torch.randn(2, n * pages, block, groups, dim)
    table, lengths = torch.randperm(n * pages).view(n, pages).int(), torch.randint(1, pages * block + 1, (n,))
    lengths[0] = pages * block
    query = torch.randn(n, groups * shared, dim)
    out = attend_pages(query, keys, values, lengths, table, 0.3)
    for row, length in enumerate(lengths.tolist()):
        k, v = (x[table[row].long()].flatten(0, 1)[:length] for x in (keys, values))
        scores = torch.einsum("gsd,tgd->gst", query[row].view(groups, shared, dim), k) * 0.3
        expected = torch.einsum("gst,tgd->gsd", scores.softmax(-1), v).flatten(0, 1)
        torch.testing.assert_close(out[row], expected, atol=1e-5, rtol=1e-5)
"""

_DRAW = """
from megarl.platform.draw_kernel import draw_tempered
from megarl.rollout.sampling import SamplingOptions, draw, filtered_log_probs

logits = 3 * torch.randn(40, 5000)
logits[:5, :4500] = -torch.inf  # chunks without any probability
logits[5, 1:] = -torch.inf
uniforms = torch.rand(40, dtype=torch.double)
uniforms[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
tokens, log_probs = draw_tempered(logits, uniforms, 0.7)
expected = filtered_log_probs(logits, SamplingOptions(1, (), temperature=0.7))
assert (tokens == draw(expected, uniforms)).float().mean() > 0.95  # but for rounding at the edge of a token
reached = expected.double().exp().cumsum(-1)
rows = torch.arange(40)
assert (reached[rows, tokens] >= uniforms - 1e-5).all()
assert (reached[rows, tokens] - expected[rows, tokens].double().exp() <= uniforms + 1e-5).all()
torch.testing.assert_close(log_probs, expected[rows, tokens], atol=1e-5, rtol=1e-5)
"""

_SWIGLU = """
from megarl.platform.swiglu_kernels import swiglu, swiglu_back

y = torch.randn(3, 1, 2 * 1100, requires_grad=True)
first, second = y.chunk(2, -1)
expected = F.silu(first) * second
torch.testing.assert_close(swiglu(y.detach()), expected)
g = torch.randn_like(expected)
torch.testing.assert_close(swiglu_back(g, y.detach()), torch.autograd.grad(expected, y, g)[0])
"""


@pytest.mark.parametrize("code", [_APPEND, _ATTEND, _DRAW, _SWIGLU], ids=["append", "attend", "draw", "swiglu"])
def test_triton_equals_torch(code):
    done = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
