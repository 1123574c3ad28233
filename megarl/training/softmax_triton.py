"""`megarl.training.softmax_passes.Torch` in Triton: each pass reads the logits once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """See `megarl.training.softmax_passes.Torch.statistics`."""
    n, v = logits.shape
    out = torch.empty(4, n, dtype=torch.float32, device=logits.device)
    if n:
        _statistics[(n,)](logits, targets, out, n, v, logits.stride(0), 1 / temperature, BLOCK=_BLOCK, num_warps=8)
    return out


def gradient_(
    logits: Tensor,
    targets: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    mean: Tensor,
    gradient: Tensor,
    temperature: float,
) -> None:
    """See `megarl.training.softmax_passes.Torch.gradient_`."""
    n, v = logits.shape
    if n:
        rest = maximum, log_total, mean, gradient, v, logits.stride(0), 1 / temperature
        _gradient[n, triton.cdiv(v, _BLOCK)](logits, targets, *rest, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _statistics(logits, targets, out, n, v: tl.constexpr, stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    # Far below any logit, but finite: -inf less -inf would be NaN.
    maximum = -1e38
    total = 0.0
    weighted = 0.0
    for start in range(0, v, BLOCK):
        inside = start + lanes < v
        z = tl.load(line + start + lanes, mask=inside, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(maximum, tl.max(z, 0))
        down = maximum - higher
        shifted = tl.where(inside, z - higher, 0.0)
        exponential = tl.where(inside, tl.exp(shifted), 0.0)
        # Sums less the new maximum: sum exp(s + d) (s + d) = exp(d) (T + d S).
        weighted = tl.exp(down) * (weighted + down * total) + tl.sum(exponential * shifted, 0)
        total = tl.exp(down) * total + tl.sum(exponential, 0)
        maximum = higher
    target = tl.load(targets + row)
    here = (target >= 0) & (target < v)
    chosen = tl.load(line + target, mask=here, other=0.0).to(tl.float32) * scale
    tl.store(out + row, maximum)
    tl.store(out + n + row, total)
    tl.store(out + 2 * n + row, weighted)
    tl.store(out + 3 * n + row, chosen)


@triton.jit
def _gradient(logits, targets, maximum, log_total, mean, gradient, v, stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = logits + row * stride
    of_log_prob = tl.load(gradient + 2 * row)
    of_entropy = tl.load(gradient + 2 * row + 1)
    z = tl.load(line + places, mask=places < v, other=0.0).to(tl.float32) * scale
    shifted = z - tl.load(maximum + row)
    p = tl.exp(shifted - tl.load(log_total + row))
    out = p * (of_entropy * (tl.load(mean + row) - shifted) - of_log_prob)
    out += tl.where(places == tl.load(targets + row), of_log_prob, 0.0)
    tl.store(line + places, (out * scale).to(logits.dtype.element_ty), mask=places < v)
