"""SwiGLU and its gradient in Triton: one pass each, whatever the number of tokens.

Megatron has them compiled by torch, for each new shape again: seconds at the start of a run, and of each size of a
decode step.  In between everything is float32, and rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def swiglu(y: Tensor) -> Tensor:
    """`[..., 2 n]` to `[..., n]`: `silu(first half) * second half` (Shazeer, arXiv:2002.05202)."""
    y = y.contiguous()
    width = y.shape[-1] // 2
    out = torch.empty((*y.shape[:-1], width), dtype=y.dtype, device=y.device)
    rows = out.numel() // width
    _forward[rows, triton.cdiv(width, _BLOCK)](y, out, width, BLOCK=_BLOCK)
    return out


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Gradient `[..., 2 n]` for `y`, of that of the result, `g` `[..., n]`."""
    g, y = g.contiguous(), y.contiguous()
    width = y.shape[-1] // 2
    out = torch.empty_like(y)
    rows = out.numel() // (2 * width)
    _backward[rows, triton.cdiv(width, _BLOCK)](g, y, out, width, BLOCK=_BLOCK)
    return out


@triton.jit
def _forward(y, out, width, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < width
    first = tl.load(y + row * 2 * width + place, mask=real).to(tl.float32)
    second = tl.load(y + row * 2 * width + width + place, mask=real).to(tl.float32)
    result = first * tl.sigmoid(first) * second
    tl.store(out + row * width + place, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _backward(g, y, out, width, BLOCK: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < width
    gradient = tl.load(g + row * width + place, mask=real).to(tl.float32)
    first = tl.load(y + row * 2 * width + place, mask=real).to(tl.float32)
    second = tl.load(y + row * 2 * width + width + place, mask=real).to(tl.float32)
    gate = tl.sigmoid(first)
    by_first = gradient * second * gate * (1 + first * (1 - gate))
    target = out + row * 2 * width + place
    tl.store(target, by_first.to(out.dtype.element_ty), mask=real)
    tl.store(target + width, (gradient * first * gate).to(out.dtype.element_ty), mask=real)
