"""What tests build on a rank.  Imports Megatron: named by `lazy` in test modules."""

from pathlib import Path

import torch
from megatron.core import parallel_state

from megarl.models.build import ModelOptions, Policy, load_policy
from megarl.packing.rows import PackedRow, TokenSequence, pack
from megarl.rollout.engine import EngineOptions, RolloutEngine
from megarl.rollout.sampling import SamplingOptions
from megarl.training.trainer import OptimizerOptions, Trainer, row_multiple
from tests import tiny

STOP = (2, 3)
"""Ids that the engine stops at unless a test says otherwise."""


def policy(checkpoint: Path, **options) -> Policy:
    """The checkpoint in float32, in the layout of the job."""
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    return load_policy(checkpoint, ModelOptions(torch.float32, tensor_parallel, **options))


def engine(model, **options) -> RolloutEngine:
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
    return RolloutEngine(model, EngineOptions(**{**defaults, **options}))


def sampling(max_new_tokens: int = 10, stop_ids: tuple[int, ...] = STOP, **options) -> SamplingOptions:
    return SamplingOptions(max_new_tokens, stop_ids, **options)


def trainer(model, temperature: float = 1.0, chunk: int = 7, learning_rate: float = 1e-2, **options) -> Trainer:
    """Begun, with a chunk that divides nothing."""
    built = Trainer(model, temperature, chunk)
    begin(built, learning_rate, **options)
    return built


def begin(built: Trainer, learning_rate: float, **options) -> None:
    built.begin(OptimizerOptions(learning_rate, total_updates=10, **options))


def rows(sequences: list[TokenSequence], tokens_per_row: int = tiny.LONGEST) -> list[PackedRow]:
    return pack(sequences, tokens_per_row, tiny.MERGE, row_multiple())


def score(built: Trainer, sequences: list[TokenSequence], **options) -> list[torch.Tensor]:
    """Log-probabilities of each sequence's completion."""
    packed = rows(sequences, **options)
    return [part for row, values in zip(packed, built.score(packed), strict=True) for part in row.split(values)]


def one_update(built: Trainer, sequences: list[TokenSequence]) -> None:
    """Makes the given completions likelier."""
    built.update(rows(sequences), lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.sum().detach()))


def weights(built: Policy) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names.  Collective."""
    exported = built.bridge.export_hf_weights([built.model], cpu=True, show_progress=False)
    return {name: tensor.clone() for name, tensor in exported}


def gradients(built: Policy, of: Trainer, packed: list[PackedRow], loss) -> dict[str, torch.Tensor]:
    """Of the loss summed over all tokens, by Hugging Face name; without data parallelism.  Collective.

    Parameters without a gradient are zero.
    """
    of._ddp.train()
    of._ddp.zero_grad_buffer()
    of._run(packed, lambda row, output: (loss(row, *output), output.sum().detach()), forward_only=False)
    tokens = sum(row.targets.numel() for row in packed)
    kept = {name: parameter.detach().clone() for name, parameter in built.model.named_parameters()}
    with torch.no_grad():
        for parameter in built.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.main_grad)  # so that the export gathers and renames gradients
            else:
                parameter.zero_()
        out = {name: tensor * tokens for name, tensor in weights(built).items()}
        for name, parameter in built.model.named_parameters():
            parameter.copy_(kept[name])
    return out
