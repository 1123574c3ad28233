"""Drawing from the softmax of logits in Triton: each logit is read once, and nothing of the size of the vocabulary is
written.

The rows' chunks are summed up side by side; then one program a row finds the chunk in which the draw falls, and the
token in it.  The order of all sums is fixed by the vocabulary alone, so that a row's draw does not depend on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048


def draw_tempered(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The token at each row's place in the cumulative distribution `softmax(logits / temperature)`.

    Args:
        logits: `[n, vocabulary]`, any float dtype, rows contiguous; on a GPU.
        uniforms: float64 `[n]` in [0, 1).

    Returns:
        Tokens int64 `[n]`, none of probability zero; their log-probabilities float32 `[n]`.
    """
    n, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    maxima = torch.empty((n, chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima)
    tokens = torch.empty(n, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(n, dtype=torch.float32, device=logits.device)
    scale = 1 / temperature
    _sum_chunks[n, chunks](logits, maxima, sums, logits.stride(0), vocabulary, chunks, scale, CHUNK=_CHUNK)
    _pick[n,](
        logits,
        uniforms,
        maxima,
        sums,
        tokens,
        log_probs,
        logits.stride(0),
        vocabulary,
        chunks,
        scale,
        CHUNK=_CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
    )
    return tokens, log_probs


@triton.jit
def _sum_chunks(logits, maxima, sums, stride, vocabulary, chunks, scale, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + place, mask=place < vocabulary, other=-float("inf")).to(tl.float32) * scale
    top = tl.max(x, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    tl.store(maxima + row * chunks + chunk, top)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _pick(
    logits,
    uniforms,
    maxima,
    sums,
    tokens,
    log_probs,
    stride,
    vocabulary,
    chunks,
    scale,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CHUNKS)
    real = index < chunks
    maximum = tl.load(maxima + row * chunks + index, mask=real, other=-float("inf"))
    top = tl.max(maximum, 0)
    # float64, for the chunks at least: the place of a draw is known to 53 bits.
    weight = (tl.load(sums + row * chunks + index, mask=real, other=0.0) * tl.exp(maximum - top)).to(tl.float64)
    before = tl.cumsum(weight, 0)
    total = tl.sum(weight, 0)
    target = tl.load(uniforms + row) * total
    # The first chunk whose end lies beyond the target; rounding must not leave none, nor one of weight zero.
    last = tl.max(tl.where(weight > 0, index, 0), 0)
    chunk = tl.minimum(tl.min(tl.where((before > target) & (weight > 0), index, CHUNKS), 0), last)
    start = tl.sum(tl.where(index < chunk, weight, 0.0), 0)

    offset = tl.arange(0, CHUNK)
    place = chunk * CHUNK + offset
    x = tl.load(logits + row * stride + place, mask=place < vocabulary, other=-float("inf")).to(tl.float32) * scale
    mass = tl.exp(x - top).to(tl.float64)
    reached = start + tl.cumsum(mass, 0)
    last = tl.max(tl.where(mass > 0, offset, 0), 0)
    chosen = tl.minimum(tl.min(tl.where((reached > target) & (mass > 0), offset, CHUNK), 0), last)
    value = tl.sum(tl.where(offset == chosen, x, 0.0), 0)
    tl.store(tokens + row, (chunk * CHUNK + chosen).to(tl.int64))
    tl.store(log_probs + row, value - top - tl.log(total).to(tl.float32))
