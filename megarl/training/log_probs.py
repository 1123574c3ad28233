"""Where a token gets its log-probability: from hidden states, without ever holding all logits.

Only the places that predict completion tokens go through the output layer, a chunk at a time, and a chunk's
logits are made again in the backward pass.  The vocabulary stays split over the tensor-parallel ranks.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megarl.parallel import context as cp


@dataclass(frozen=True, eq=False)
class LogProbRequest:
    """What `token_log_probs` needs besides the hidden states."""

    predictors: Tensor
    """int64 `[n]`: places in the row."""
    targets: Tensor
    """int64 `[n]`: the tokens whose log-probabilities are asked for."""
    temperature: float
    """Divides the logits, as in sampling."""
    chunk: int
    """Places whose logits exist at the same time."""


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
    tokens = hidden_states.shape[0] * cp.group().size()
    order, counts = predictors_by_rank(context.predictors, tokens)
    mine = order.split(counts)[cp.group().rank()]
    hidden = hidden_states[context.predictors[mine] - cp.bounds(tokens)[0], 0]
    if group.size() > 1 and not config.sequence_parallel:
        # Each rank's vocabulary gives a part of the gradient; the gather above sums it otherwise.
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    first = weight.shape[0] * group.rank()
    parts = [
        checkpoint(_chunk, h, weight, t, first, context.temperature, group, use_reentrant=False)
        for h, t in zip(hidden.split(context.chunk), context.targets[mine].split(context.chunk), strict=True)
    ]
    gathered = cp.gather_uneven(torch.cat(parts, 1), counts)
    return torch.empty_like(gathered).index_copy(1, order, gathered)


def predictors_by_rank(predictors: Tensor, tokens: int) -> tuple[Tensor, list[int]]:
    """Where in `predictors` those are that lie in the first context-parallel rank's part of a row of `tokens` tokens,
    then in the second's, and so on, in order; and how many lie in each."""
    ranks = cp.group().size()
    owner = predictors * ranks // tokens
    return owner.argsort(stable=True), owner.bincount(minlength=ranks).tolist()


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor, first: int, temperature: float, group) -> Tensor:
    """`[c, hidden]` to float32 `[2, c]`; `first` is the id of this rank's first vocabulary entry.

    With s = z - m the logits less their maximum over all ranks, S = sum exp(s) and T = sum exp(s) s:
    log p(t) = s_t - log S, entropy = log S - T / S.
    """
    logits = (hidden @ weight.t()).float() / temperature
    maximum = logits.detach().max(dim=-1).values
    if group.size() > 1:
        torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits - maximum[:, None]
    exponential = shifted.exp()
    local = targets - first
    here = (local >= 0) & (local < weight.shape[0])
    chosen = shifted.gather(1, local.clamp(0, weight.shape[0] - 1)[:, None])[:, 0] * here
    sums = torch.stack([exponential.sum(-1), (exponential * shifted).sum(-1), chosen])
    total, weighted, chosen = reduce_from_tensor_model_parallel_region(sums, group=group)
    log_total = total.log()
    return torch.stack([chosen - log_total, log_total - weighted / total])
