"""Functions of a row that do not know the batch: the same bits for a row, whatever else is computed beside it.

The engine decodes a few rows at a time over a paged cache, the trainer scores thousands in packed rows.  Libraries
choose kernels by shape, and sums in another order round otherwise.  Here every sum has one order.  On a GPU matrix
products and norms are Megatron's batch-invariant Triton kernels and attention is `megarl.platform.invariant_kernels`;
on a CPU, where libraries have no such kernels, products are added up one column after another by element-wise
operations, each of which rounds once: slow, and meant for tests.  What is element-wise has no order, and is torch's.

Gradients are torch's: they are the same from run to run, and depend on the batch.
"""

import os
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.platform import attention

_EVEN = 64
"""Elements whose number torch's vectorised CPU loops divide: the rest would go through scalar functions, which round
otherwise."""
_PIECE = 1 << 14
"""Elements that torch does not spread over threads."""


def settle_torch() -> None:
    """The process's torch chooses algorithms that give the same bits from run to run, where it has them; to be called
    before the first matrix product on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # or Megatron builds no transformer-engine layers
    torch.use_deterministic_algorithms(True, warn_only=True)  # a scan over the vocabulary has no other algorithm
    torch.utils.deterministic.fill_uninitialized_memory = False
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """`x` `[..., inner]` times `weight` `[outer, inner]`, transposed: `[..., outer]`."""
    return _Matmul.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], weight.shape[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension of `x` `[..., n]`, in float32; `weight` `[n]` (arXiv:1910.07467)."""
    if x.is_cuda:
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import rmsnorm_batch_invariant

        return rmsnorm_batch_invariant(x, weight, eps)
    exact = x.float()
    mean = row_sum(exact * exact) / x.shape[-1]
    return (exact / (mean + eps).sqrt() * weight.float()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """`x / (1 + exp(-x))`, by element."""
    return F.silu(x) if x.is_cuda else x / (1 + _even(torch.exp, -x))


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`q`, `k` `[tokens, 1, heads, dim]` turned by `rotation`'s angles; halves are pairs (arXiv:2104.09864)."""

    def turn(t: Tensor) -> Tensor:
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat([-second, first], -1) * sin

    return turn(q), turn(k)


def rotation(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `angles` float32, of their shape, rounded to `dtype` as Megatron does."""
    if angles.is_cuda:
        return angles.cos().to(dtype), angles.sin().to(dtype)
    return _even(torch.cos, angles).to(dtype), _even(torch.sin, angles).to(dtype)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """Each token sees itself and what is before it in its segment.

    Args:
        q: `[tokens, heads, dim]`; on a GPU `dim` is a power of two.
        k, v: `[tokens, kv_heads, dim]`; `heads` is a multiple of `kv_heads`.
        bounds: int32 `[segments + 1]`, cumulative.
        longest: tokens of the longest segment, or more.
        scale: factor of the scores.

    Returns:
        `[tokens, heads, dim]`; for a row the same bits as `paged_attention`'s.
    """
    return _SegmentAttention.apply(q, k, v, bounds, longest, scale)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bounds: Tensor,
    longest: int,
    kv_lengths: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """The last tokens of each request see what is in its pages: prefill, chunks of it and decode steps alike.

    Args:
        q: `[tokens, heads, dim]`, of all requests; rows past the last of `bounds` are padding.
        k_cache, v_cache: `[blocks, block, kv_heads, dim]`, which hold the keys and values of `q`'s rows too.
        bounds: int32 `[requests + 1]`: where each request's rows of `q` begin.
        longest: rows of the request with most of them, or more.
        kv_lengths: int32 `[requests]`: keys of each; 0 for padding.
        block_table: int32 `[requests, pages]`.
        scale: factor of the scores.

    Returns:
        `[tokens, heads, dim]`, 0 for padding.  Nothing here waits for the GPU.
    """
    if q.is_cuda:
        from megarl.platform.invariant_kernels import attention_forward

        return attention_forward(q, k_cache, v_cache, bounds, longest, kv_lengths, block_table, scale)[0]
    keys = max(1, int(kv_lengths.max()))
    pages = block_table[:, : -(-keys // k_cache.shape[1])].clamp(min=0)
    k, v = (cache[pages].flatten(1, 2)[:, :keys] for cache in (k_cache, v_cache))
    return _attend(q, k, v, bounds, kv_lengths, scale)


def append(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Writes a token of each request, `[n, kv_heads, dim]`, into the caches of `paged_attention`, at `offsets` in
    `blocks`, int64 `[n]` both."""
    if key.is_cuda:  # torch would sort the places, so that those without a request are written in order
        from megarl.platform.invariant_kernels import append_pages

        append_pages(key, value, k_cache, v_cache, blocks, offsets)
    else:
        k_cache[blocks, offsets], v_cache[blocks, offsets] = key, value


def log_softmax(x: Tensor) -> Tensor:
    """Of float32 `[n, vocabulary]`, over its last dimension; -inf is the logarithm of 0."""
    shifted = x - x.detach().amax(-1, keepdim=True)
    if x.is_cuda:
        return shifted - row_sum(shifted.exp()).log()
    return shifted - _even(torch.log, row_sum(_even(torch.exp, shifted)))


def log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """`hidden` `[n, hidden]`, `weight` `[vocabulary, hidden]`, `targets` int64 `[n]` to float32 `[2, n]`:
    log-probabilities of the targets, and entropies of the distributions, in nats."""
    every = log_softmax(matmul(hidden, weight).float() / temperature)
    return torch.stack([every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)])


def row_sum(x: Tensor) -> Tensor:
    """`[..., n]` to `[..., 1]`: halves are added until one element is left, so zeros behind a row change nothing."""
    return _RowSum.apply(x)


def _even(function, x: Tensor) -> Tensor:
    """`function` of each element of `x`, on a CPU, as if there were whole vectors only."""
    flat = F.pad(x.flatten(), (0, -x.numel() % _EVEN))
    return torch.cat([function(piece) for piece in flat.split(_PIECE)])[: x.numel()].view_as(x)


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        half = (1 << (x.shape[-1] - 1).bit_length()) // 2
        rest = x.shape[-1] - half
        if 0 < rest < half:  # a row that is no power of two: what would be added to padding stays
            x = torch.cat([x[..., :rest] + x[..., half:], x[..., rest:half]], -1)
        while x.shape[-1] > 1:
            x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.expand(ctx.shape)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            from megatron.core.transformer.custom_layers.batch_invariant_kernels import matmul_persistent

            return matmul_persistent(x, weight.t())
        out = torch.zeros(x.shape[0], weight.shape[0])
        product = torch.empty_like(out)
        for column, row in zip(x.float().t()[..., None], weight.float().t().contiguous(), strict=True):
            out += torch.mul(column, row, out=product)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            gradient.t() @ x if ctx.needs_input_grad[1] else None,
        )


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bounds, longest, scale):
        ctx.longest, ctx.scale = longest, scale
        if q.is_cuda:
            from megarl.platform.invariant_kernels import attention_forward

            out, lse = attention_forward(q, k, v, bounds, longest, bounds.diff(), None, scale)
            ctx.save_for_backward(q, k, v, bounds, out, lse)
            return out
        ctx.save_for_backward(q, k, v, bounds)
        rows = (bounds[:-1, None] + torch.arange(longest)).clamp(max=len(q) - 1)
        return _attend(q, k[rows], v[rows], bounds, bounds.diff(), scale)

    @staticmethod
    def backward(ctx, gradient):
        if gradient.is_cuda:
            from megarl.platform.invariant_kernels import attention_backward

            return *attention_backward(*ctx.saved_tensors, gradient, ctx.longest, ctx.scale), None, None, None
        *inputs, bounds = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in inputs]
            out = attention.segment_attention(*inputs, bounds, ctx.scale, causal=True)
        return *torch.autograd.grad(out, inputs, gradient), None, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, kv_lengths: Tensor, scale: float) -> Tensor:
    """On a CPU: `q` `[tokens, heads, dim]`, `k` and `v` `[segments, keys, kv_heads, dim]`, of which each segment has
    `kv_lengths`; what is behind them is finite and counts as 0."""
    lengths = bounds.diff()
    place = torch.arange(max(1, int(lengths.max())))
    rows = (bounds[:-1, None] + place).clamp(max=len(q) - 1)
    heads = q.shape[1] // k.shape[2]
    queries = q[rows].float()
    keys, values = (x.float().repeat_interleave(heads, 2) for x in (k, v))
    scores = queries.new_zeros(*queries.shape[:3], keys.shape[1])  # [segments, rows, heads, keys]
    for i in range(q.shape[2]):
        scores += queries[..., i, None] * keys[:, None, :, :, i].transpose(2, 3)
    last = ((kv_lengths - lengths)[:, None] + place).clamp(min=0)
    hidden = torch.arange(keys.shape[1]) > last[..., None]
    scores = (scores * scale).masked_fill(hidden[:, :, None], -torch.inf)
    weights = _even(torch.exp, scores - scores.amax(-1, keepdim=True))
    total = row_sum(weights)
    out = torch.zeros_like(queries)
    for j in range(keys.shape[1]):
        out += weights[..., j, None] * values[:, None, j]
    real = (place < lengths[:, None]) & (kv_lengths > 0)[:, None]
    return torch.zeros_like(q).index_put((rows[real],), (out / total)[real].to(q.dtype))
