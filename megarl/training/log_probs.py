"""Where a token gets its log-probability: from hidden states, by the places that predict completion tokens only.

The logits of a row are made once, in the model's type, and the backward pass writes their gradient over them; where
`LogProbRequest.chunk` bounds them, they are made again there, a chunk at a time.  The vocabulary stays split over the
tensor-parallel ranks.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megarl.parallel import context as cp
from megarl.platform import invariant
from megarl.platform.to_device import to_device
from megarl.training.softmax_passes import passes

_INVARIANT_CHUNK = 1024
"""Places whose logits, in float32, exist at the same time where a recipe with `deterministic` does not say."""


@dataclass(frozen=True, eq=False)
class LogProbRequest:
    """What `token_log_probs` needs besides the hidden states."""

    predictors: Tensor
    """int64 `[n]`: places in the row; on the CPU."""
    targets: Tensor
    """int64 `[n]`: the tokens whose log-probabilities are asked for; on the CPU."""
    temperature: float
    """Divides the logits, as in sampling."""
    chunk: int | None = None
    """Places whose logits exist at the same time; None: all of them."""


def token_log_probs(
    *, hidden_states: Tensor, output_layer, output_weight, config, context: LogProbRequest, **_
) -> Tensor:
    """Megatron's output-processor hook: hidden states `[tokens, 1, hidden]` (sharded over context-parallel
    ranks, and over tensor-parallel ranks under sequence parallelism) to float32 `[2, n]`, the same on all of them:
    log-probabilities of the targets, and entropies of the distributions they were drawn from, in nats.
    """
    weight = output_layer.weight if output_weight is None else output_weight
    group = output_layer.tp_group
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
    tokens, device = hidden_states.shape[0] * cp.group().size(), hidden_states.device
    order, counts = predictors_by_rank(context.predictors, tokens)
    mine = order.split(counts)[cp.group().rank()]
    places = to_device(context.predictors[mine] - cp.bounds(tokens)[0], device)
    hidden = hidden_states[:, 0].index_select(0, places)  # no place twice: its gradient needs no sorting
    if group.size() > 1 and not config.sequence_parallel:
        # Each rank's vocabulary gives a part of the gradient; the gather above sums it otherwise.
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    targets = to_device(context.targets[mine], device)
    if config.deterministic_mode:
        chunk = context.chunk or _INVARIANT_CHUNK
        parts = [
            checkpoint(invariant.log_probs, h, weight, t, context.temperature, use_reentrant=False)
            for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
        ]
        out = torch.cat(parts, 1)
    else:
        out = _LogProbs.apply(hidden, weight, targets, context.temperature, context.chunk, group)
    gathered = cp.gather_uneven(out, counts)
    return torch.empty_like(gathered).index_copy(1, to_device(order, device), gathered)


def predictors_by_rank(predictors: Tensor, tokens: int) -> tuple[Tensor, list[int]]:
    """Where in `predictors` those are that lie in the first context-parallel rank's part of a row of `tokens` tokens,
    then in the second's, and so on, in order; and how many lie in each."""
    ranks = cp.group().size()
    owner = predictors * ranks // tokens
    return owner.argsort(stable=True), owner.bincount(minlength=ranks).tolist()


class _LogProbs(torch.autograd.Function):
    """Hidden states `[n, hidden]` to float32 `[2, n]`.

    With z the logits over the temperature, m their maximum over all ranks, s = z - m, S = sum exp(s) and
    T = sum exp(s) s: log p(t) = s_t - log S, entropy = log S - T / S.  With p_j = exp(s_j) / S their gradients are
    d log p(t) / d z_j = [j = t] - p_j, and d entropy / d z_j = p_j (T / S - s_j).

    Where the weight has a `main_grad` (Megatron's DDP), its gradient is added there in float32, as
    transformer-engine does with those of its layers.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, group):
        chunk = max(1, len(hidden)) if chunk is None else chunk
        first = weight.shape[0] * group.rank()
        # The last chunk's logits are not needed again where it is the only one.
        keep = chunk >= len(hidden) and any(ctx.needs_input_grad)
        parts = []
        for h, t in zip(hidden.split(chunk), (targets - first).split(chunk), strict=True):
            logits = h @ weight.t()
            parts.append(_over_ranks(passes(logits).statistics(logits, t, temperature), group))
        maximum, total, weighted, chosen = torch.cat(parts, 1)
        log_total, mean = total.log(), weighted / total
        ctx.save_for_backward(hidden, weight, targets - first, maximum, log_total, mean)
        ctx.logits, ctx.options = logits if keep else None, (temperature, chunk)
        return torch.stack([chosen - maximum - log_total, log_total - mean])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight, targets, *statistics = ctx.saved_tensors
        kept, (temperature, chunk) = ctx.logits, ctx.options
        ctx.logits = None  # overwritten below
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        main_grad = getattr(weight, "main_grad", None)
        hidden_grads, weight_grad = [], None
        columns = (hidden, targets, *statistics, gradient.t().contiguous())
        for h, *rest in zip(*(column.split(chunk) for column in columns), strict=True):
            logits = h @ weight.t() if kept is None else kept
            passes(logits).gradient_(logits, *rest, temperature)
            if to_hidden:
                hidden_grads.append(logits @ weight)
            if not to_weight:
                continue
            if main_grad is not None:
                _add_product(main_grad, logits.t(), h)
            elif weight_grad is None:
                weight_grad = logits.t() @ h
            else:
                weight_grad.addmm_(logits.t(), h)
        return torch.cat(hidden_grads) if to_hidden else None, weight_grad, None, None, None, None


def _over_ranks(own: Tensor, group) -> Tensor:
    """`[4, n]` of this rank's vocabulary (see `megarl.training.softmax_passes`), to the same of the whole."""
    if group.size() == 1:
        return own
    own_maximum, total, weighted, chosen = own
    maximum = own_maximum.clone()
    torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX, group=group)
    down = own_maximum - maximum
    scale = down.exp()
    sums = torch.stack([total * scale, (weighted + total * down) * scale, chosen])
    torch.distributed.all_reduce(sums, group=group)
    return torch.cat([maximum[None], sums])


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b`, added in `out`'s type."""
    if a.is_cuda and out.dtype != a.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(a @ b)
