"""From a recipe's sections to the options of each room, which knows no recipe."""

from dataclasses import replace

import torch

from megarl.algorithms.advantages import AdvantageOptions
from megarl.algorithms.corrections import CorrectionOptions
from megarl.algorithms.objective import ObjectiveOptions
from megarl.algorithms.perception import PerceptionOptions
from megarl.errors import UserError
from megarl.models.build import ModelOptions
from megarl.models.lora import LoraOptions
from megarl.partial_rollouts import PartialOptions
from megarl.platform.kernels import kernels
from megarl.recipe import Recipe
from megarl.rewards import RewardOptions
from megarl.rollout.engine import EngineOptions
from megarl.rollout.sampling import SamplingOptions
from megarl.training.credit import CreditOptions
from megarl.training.grpo import StepOptions
from megarl.training.trainer import OptimizerOptions


def model_options(recipe: Recipe) -> ModelOptions:
    """How this machine builds the recipe's model.

    Raises:
        UserError: its kernels cannot compute in the type, or attend in the way, that the recipe asks for.
    """
    if recipe.model.dtype == "float32" and kernels().attention == "flash-attn-4":
        raise UserError("model.dtype = 'float32': FlashAttention-4 takes bfloat16 only; should be 'bfloat16' or 'auto'")
    if recipe.parallel.cp_comm_type == "p2p" and not kernels().te:
        raise UserError(
            "parallel.cp_comm_type = 'p2p': the ring is transformer-engine's, which is not here; should be 'a2a'"
        )
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(recipe.model.dtype)
    return ModelOptions(
        dtype=dtype or (torch.bfloat16 if kernels().gpu else torch.float32),
        tensor_model_parallel_size=recipe.parallel.tensor_model_parallel_size,
        context_parallel_size=recipe.parallel.context_parallel_size,
        expert_model_parallel_size=recipe.parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=recipe.parallel.expert_tensor_parallel_size,
        cp_comm_type=recipe.parallel.cp_comm_type,
        vision_dp_when_cp=recipe.parallel.vision_dp_when_cp,
        sequence_parallel=recipe.parallel.sequence_parallel,
        recompute=recipe.training.recompute,
        freeze=tuple(recipe.model.freeze),
        router_replay=recipe.algorithm.router_replay,
        lora=lora_options(recipe),
        deterministic=recipe.deterministic,
    )


def lora_options(recipe: Recipe) -> LoraOptions | None:
    """The adapters that are trained, where the recipe has any."""
    lora = recipe.model.lora
    return lora and LoraOptions(lora.rank, lora.alpha, tuple(lora.modules), recipe.seed, lora.merge_for_rollouts)


def engine_model_options(recipe: Recipe) -> ModelOptions:
    """How the engine's own copy of the model is built, where it has a layout of its own."""
    parallel = recipe.engine_parallel
    return replace(
        model_options(recipe),
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=1,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        recompute="none",
    )


def reward_options(recipe: Recipe) -> RewardOptions:
    """What rewards depend on beside the answer."""
    e = recipe.environment
    return RewardOptions(
        recipe.rollout.max_new_tokens,
        e.overlong_buffer,
        e.overlong_penalty,
        recipe.algorithm.filter_overlong,
        drop_failed=e.on_error == "drop",
        by_component=recipe.algorithm.advantage == "component_std",
    )


def engine_options(recipe: Recipe) -> EngineOptions:
    """Sizes of the engine."""
    r = recipe.rollout
    return EngineOptions(
        max_requests=r.max_requests,
        max_tokens_per_step=r.max_tokens_per_step,
        max_sequence_length=recipe.longest_sequence,
        kv_cache_gb=r.kv_cache_gb,
        block_size_tokens=r.block_size_tokens,
        enable_prefix_caching=r.enable_prefix_caching,
        enable_chunked_prefill=r.enable_chunked_prefill,
        vision_cache_bytes=int(r.vision_cache_gb * 2**30),
        patches_per_pass=r.patches_per_pass,
        cuda_graphs=r.cuda_graphs and kernels().gpu,
    )


def step_options(recipe: Recipe) -> StepOptions:
    """How a batch of rollouts is trained on."""
    a = recipe.algorithm
    return StepOptions(
        objective=ObjectiveOptions(
            a.clip_low,
            a.clip_high,
            a.kl_coefficient if a.kl_in == "loss" else 0.0,
            a.entropy_coefficient,
            a.ratio,
            a.surrogate,
            a.dual_clip,
            a.kl_estimator,
            PerceptionOptions(**a.perception.model_dump()),
        ),
        credit=CreditOptions(
            a.group_size,
            AdvantageOptions(a.advantage, a.best_of),
            CorrectionOptions(**a.correction.model_dump()),
            a.kl_coefficient if a.kl_in == "reward" else 0.0,
            a.kl_estimator,
        ),
        epochs=a.epochs,
        minibatches=a.minibatches,
        old_log_probs=a.old_log_probs,
        tokens_per_row=recipe.training.tokens_per_row,
        normalization=a.normalization,
        max_new_tokens=recipe.rollout.max_new_tokens,
        seed=recipe.seed,
    )


def warmup_optimizer(recipe: Recipe) -> OptimizerOptions:
    """Constant learning rate; everything else as in RL."""
    o, w = recipe.optimizer, recipe.warmup
    return OptimizerOptions(
        learning_rate=w.learning_rate,
        total_updates=w.steps,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        weight_decay=o.weight_decay,
        clip_grad=o.clip_grad,
    )


def rl_optimizer(recipe: Recipe) -> OptimizerOptions:
    """The recipe's optimizer section, over all updates of the RL phase."""
    return OptimizerOptions(total_updates=recipe.total_updates, **recipe.optimizer.model_dump())


def sampling_options(recipe: Recipe, stop_ids: tuple[int, ...]) -> SamplingOptions:
    """How training rollouts are sampled."""
    r = recipe.rollout
    return SamplingOptions(r.max_new_tokens, stop_ids, r.temperature, r.top_p, r.top_k)


def partial_options(recipe: Recipe) -> PartialOptions | None:
    """How far a step samples, where rollouts may go on in the next; None where they do not."""
    r, a = recipe.rollout, recipe.algorithm
    if r.partial is None:
        return None
    return PartialOptions(
        a.prompts_per_step, r.partial.extra_prompts, a.group_size, r.partial.tokens_per_round, r.max_new_tokens
    )


def evaluation_options(recipe: Recipe, stop_ids: tuple[int, ...]) -> SamplingOptions:
    """How held-out prompts are answered: from the whole distribution."""
    return SamplingOptions(recipe.rollout.max_new_tokens, stop_ids, recipe.evaluation.temperature)
