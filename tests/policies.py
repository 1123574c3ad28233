"""What tests build on a rank.  Imports Megatron: named by `lazy` in test modules."""

from contextlib import nullcontext
from pathlib import Path

import torch
from megatron.core import parallel_state

from megarl.models.build import ModelOptions, Policy, empty_copy, load_policy
from megarl.packing.alignment import Alignment
from megarl.packing.rows import PackedRow, TokenSequence, by_member, pack
from megarl.parallel.engines import resharded_groups, shared_groups
from megarl.rollout.engine import EngineOptions, RolloutEngine
from megarl.rollout.quantized import Quantization
from megarl.rollout.sampling import SamplingOptions
from megarl.rollout.sync import ReshardedWeights, SharedWeights
from megarl.run import Parts
from megarl.training.trainer import OptimizerOptions, Trainer
from megarl.verify.gradients import named_gradients
from tests import tiny

STOP = (2, 3)
"""Ids that the engine stops at unless a test says otherwise."""


def policy(checkpoint: Path, **options) -> Policy:
    """The checkpoint in float32, in the layout of the job."""
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    return load_policy(checkpoint, ModelOptions(torch.float32, **sizes, **options))


def engine(model, peers=None, as_sampled=nullcontext, **options) -> RolloutEngine:
    """16 requests at a time, KV blocks of 16 tokens; steps of 1,024 tokens, so that no prompt is split."""
    defaults = dict(
        max_requests=16,
        max_tokens_per_step=1024,
        max_sequence_length=tiny.LONGEST,
        kv_cache_gb=0.01,
        block_size_tokens=16,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    return RolloutEngine(model, EngineOptions(**{**defaults, **options}), peers, as_sampled)


def parts(
    checkpoint: Path, layout, engines=None, verify_sync: bool = True, lora=None, quantized: str | None = None, **options
) -> Parts:
    """As a run builds them, its trainer begun; the engine in the layout of the job, or of `engines`.  `quantized` is
    the format of the weights of these, or, without them, of the one module's."""
    built = policy(checkpoint, sequence_parallel=layout.sequence_parallel, lora=lora)
    quantization = Quantization(built.model, quantized, aware=True) if quantized and engines is None else None
    training = trainer(built.model, changed=quantization.quantize_weights if quantization else lambda: None)
    sampled, groups, kind = built.model, shared_groups(), SharedWeights
    in_engine, in_transfer = built.as_sampled, nullcontext
    if engines is not None:
        sizes = engines.tensor_parallel, engines.expert_parallel, engines.expert_tensor_parallel
        groups, kind = resharded_groups(*sizes), ReshardedWeights
        names = "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
        sizes = dict(zip(names, sizes, strict=True))
        settings = ModelOptions(torch.float32, sequence_parallel=engines.sequence_parallel, lora=lora, **sizes)
        sampled = empty_copy(built, checkpoint, settings, groups.model)
        in_engine, in_transfer = nullcontext, built.as_sampled
    if quantized and engines is not None:
        quantization = Quantization(sampled, quantized)
    sampling_engine = engine(sampled, groups.peers, in_engine, **options)
    arrived = quantization.quantize_weights if quantization else lambda: None
    weight_sync = kind(sampling_engine, built.model, verify_sync, in_transfer, arrived)
    ranks = groups.data_parallel_ranks
    return Parts(built, training, sampling_engine, weight_sync, ranks, groups.same_prompts, quantization)


def sampling(max_new_tokens: int = 10, stop_ids: tuple[int, ...] = STOP, **options) -> SamplingOptions:
    return SamplingOptions(max_new_tokens, stop_ids, **options)


def trainer(
    model, temperature: float = 1.0, chunk: int = 7, learning_rate: float = 1e-2, changed=lambda: None, **options
) -> Trainer:
    """Begun, with a chunk that divides nothing."""
    built = Trainer(model, temperature, chunk, changed)
    begin(built, learning_rate, **options)
    return built


def begin(built: Trainer, learning_rate: float, **options) -> None:
    built.begin(OptimizerOptions(learning_rate, total_updates=10, **options))


def rows(sequences: list[TokenSequence], tokens_per_row: int = tiny.LONGEST) -> list[PackedRow]:
    ranks = parallel_state.get_tensor_and_context_parallel_world_size()
    return pack(sequences, tokens_per_row, tiny.MERGE, Alignment(ranks))


def score(built: Trainer, sequences: list[TokenSequence], **options) -> list[torch.Tensor]:
    """Log-probabilities of each sequence's completion."""
    packed = rows(sequences, **options)
    return list(by_member(packed, built.score(packed)).values())


def one_update(built: Trainer, sequences: list[TokenSequence]) -> None:
    """Makes the given completions likelier."""
    built.update(rows(sequences), lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.sum().detach()))


def weights(built: Policy) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names.  Collective."""
    return {name: tensor.clone() for name, tensor in built.hf_weights()}


def gradients(built: Policy, of: Trainer, packed: list[PackedRow], loss) -> dict[str, torch.Tensor]:
    """Of the loss summed over all tokens of all ranks, by Hugging Face name.  Collective.

    Parameters without a gradient are zero.
    """
    found = named_gradients(built, of, packed, lambda row, *output: (loss(row, *output), output[0].sum().detach()))
    tokens = torch.tensor(sum(row.targets.numel() for row in packed))
    torch.distributed.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
    return {name: tensor * tokens for name, tensor in found}
