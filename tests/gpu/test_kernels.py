"""The Triton kernels of a decode step in bfloat16, compiled, at the sizes of real models, against torch in float32."""

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

SHAPES = [  # rows, groups, queries of each, dim, block, longest
    (7, 8, 2, 128, 64, 300),
    (3, 8, 4, 128, 64, 1000),
    (128, 8, 2, 128, 64, 256),
    (5, 2, 1, 16, 16, 60),
    (4, 4, 8, 128, 256, 700),
]


@pytest.mark.parametrize("rows, groups, shared, dim, block, longest", SHAPES)
def test_append_and_attend(rows, groups, shared, dim, block, longest):
    from megarl.platform.decode_kernels import append_rotated, attend_pages

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    torch.manual_seed(0)
    pages = -(-longest // block)
    keys, values = (random(rows * pages + 1, block, groups, dim) for _ in range(2))
    table = torch.randperm(rows * pages, device="cuda").view(rows, pages).int()
    lengths = torch.randint(1, longest + 1, (rows,), device="cuda")
    places = lengths - 1
    blocks, offsets = table.gather(1, (places // block)[:, None])[:, 0].long(), places % block
    qkv, half = random(rows, groups, (shared + 2) * dim), 100 * torch.rand(rows, dim // 2, device="cuda")
    angles, norms = torch.cat([half, half], -1), [0.5 + torch.rand(dim, device="cuda").bfloat16() for _ in range(2)]
    query = append_rotated(qkv, angles, *norms, 1e-6, keys, values, blocks, offsets)

    def turned(x, weight):
        x = F.rms_norm(x.float(), (dim,), weight.float(), 1e-6)
        cos, sin = (f(angles).view(rows, *[1] * (x.dim() - 2), dim) for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin

    heads = qkv.view(rows, groups, shared + 2, dim)
    close = dict(atol=2e-2, rtol=1e-2)  # rounded once
    torch.testing.assert_close(query.float(), turned(heads[:, :, :shared], norms[0]).flatten(1, 2), **close)
    torch.testing.assert_close(keys[blocks, offsets].float(), turned(heads[:, :, shared], norms[1]), **close)
    assert torch.equal(values[blocks, offsets], heads[:, :, shared + 1])
    out = attend_pages(query, keys, values, lengths, table, dim**-0.5)
    for row in range(min(rows, 8)):
        k, v = (x[table[row].long()].flatten(0, 1)[: lengths[row]].float() for x in (keys, values))
        scores = torch.einsum("gsd,tgd->gst", query[row].float().view(groups, shared, dim), k) * dim**-0.5
        expected = torch.einsum("gst,tgd->gsd", scores.softmax(-1), v).flatten(0, 1)
        assert (out[row].float() - expected).abs().max() < 6e-3 * expected.abs().max()


@pytest.mark.parametrize("rows", [4, 128, 512])
def test_draw(rows):
    from megarl.platform.draw_kernel import draw_tempered
    from megarl.rollout.sampling import SamplingOptions, draw, filtered_log_probs

    torch.manual_seed(0)
    logits = (2 * torch.randn(rows, 151_936, device="cuda")).bfloat16()
    uniforms = torch.rand(rows, device="cuda", dtype=torch.double)
    tokens, log_probs = draw_tempered(logits, uniforms, 1.0)
    expected = filtered_log_probs(logits, SamplingOptions(1, ()))
    assert (tokens == draw(expected, uniforms)).float().mean() > 0.99  # but for rounding at the edge of a token
    torch.testing.assert_close(log_probs, expected.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)
