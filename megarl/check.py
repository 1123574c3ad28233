"""`python -m megarl.check RECIPE [key=value ...]`: validates without a GPU; prints layout and memory."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.files import SPLITS, find_split
from megarl.data.generators.registry import check_options
from megarl.environments.registry import DIALOGUES
from megarl.environments.workers import Workers
from megarl.errors import UserError
from megarl.layout import check_context, check_experts, check_heads, check_router_replay
from megarl.memory import (
    GIB,
    adapter_parameters,
    count_parameters,
    dtypes,
    estimate_memory,
    head_size,
    kv_cache_blocks,
)
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from megarl.models.hub import folder_with
from megarl.pins import check_pins
from megarl.recipe import (
    AlgorithmSection,
    DataSection,
    ModelSection,
    ParallelSection,
    Recipe,
    check_world,
    load_recipe,
)

if TYPE_CHECKING:  # transformers takes seconds to import; a refused recipe does not wait for it
    from transformers import PreTrainedConfig


def check_kv_cache(recipe: Recipe, config: "PreTrainedConfig", dtype: str) -> None:
    """Refuses a KV cache in which the longest request would wait for ever.  One that takes what is left is known where
    the run starts."""
    if recipe.rollout.kv_cache_gb is None:
        return
    longest, what = recipe.longest_sequence, "data.max_prompt_tokens + rollout.max_new_tokens"
    if recipe.rollout.max_sequence_tokens is not None:
        what = "rollout.max_sequence_tokens"
    size = recipe.rollout.block_size_tokens
    held = max(0, kv_cache_blocks(recipe, config, dtype)) * size
    if held < longest:
        raise UserError(
            f"rollout.kv_cache_gb = {recipe.rollout.kv_cache_gb} holds {held} tokens in {dtype}: should hold "
            f"{what} = {longest}"
        )


def check_reference(folder: str, config: "PreTrainedConfig") -> None:
    """Refuses a reference policy whose weights do not fit into the policy's module."""
    key = "algorithm.reference"
    theirs, ours = (_sizes(one) for one in (hf_config(folder, None, key), config))
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise UserError(
                f"{key} = {folder!r} has {name} = {theirs.get(name)}: should be {ours.get(name)}, as the policy's"
            )


def _sizes(config: "PreTrainedConfig") -> dict[str, Any]:
    """The family and, by dotted key, what of a configuration decides the shapes of the weights or what is computed with
    them: whole numbers that are no token's id, and a few by name."""
    found: dict[str, Any] = {"model_type": config.model_type}

    def walk(values: dict, prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            elif key in _COMPARED or (type(value) is int and not key.endswith("token_id") and key not in _OF_NO_WEIGHT):
                found[prefix + key] = value

    walk(config.to_dict(), "")
    return found


_COMPARED = {"tie_word_embeddings", "rms_norm_eps", "rope_theta", "rope_type", "attention_bias"}
_OF_NO_WEIGHT = {"max_position_embeddings", "use_cache"}


def check_folders(model: ModelSection, data: DataSection) -> None:
    """Refuses folders that the run would read and that do not exist."""
    if model.processor is not None:
        folder = folder_with("tokenizer_config.json", model.processor, "model.processor")
        if not folder.is_dir():
            wanted = "should be a folder with a Hugging Face processor, or a name on the hub"
            raise UserError(f"model.processor = {model.processor!r}: {wanted}")
    for number, path in enumerate(data.media_folders):
        if not Path(path).is_dir():
            raise UserError(f"data.media_folders[{number}] = {path!r}: should be a folder")
    folder = Path(data.path)
    if not folder.exists():
        if data.generator is not None:
            return
        raise UserError(f"data.path = {data.path!r}: should be a folder; or set data.generator to create it")
    for split in SPLITS:
        find_split(folder, split)


def check_parts(model: ModelSection, config: "PreTrainedConfig") -> None:
    """Refuses what is said of a vision tower that the model does not have, and what is not said of one that it has."""
    tiny, media = model.tiny_processor, FAMILIES[config.model_type].media
    frozen = [part for part in model.freeze if part != "language"]
    if frozen and not media:
        raise UserError(f"model.freeze has {frozen[0]!r}: a {config.model_type} has no such part, only 'language'")
    vocabulary = config.get_text_config().vocab_size
    if tiny is not None and tiny.vocab_size != vocabulary:
        raise UserError(
            f"model.tiny_processor.vocab_size = {tiny.vocab_size}: should be {vocabulary}, that of model.config"
        )
    if tiny is not None and (tiny.patch_size is not None) != media:
        reads = "needs it for its pictures" if media else "reads text alone, so leave it out"
        raise UserError(f"model.tiny_processor.patch_size = {tiny.patch_size}: a {config.model_type} {reads}")


def check_quantization(recipe: Recipe, config: "PreTrainedConfig") -> None:
    """Refuses to quantise experts."""
    asked = recipe.rollout.quantization
    if asked is not None and getattr(config.get_text_config(), "num_experts", None):
        raise UserError(
            f"rollout.quantization.format = {asked.format!r}: a {config.model_type} is a mixture of experts, which are "
            "not quantised; should be rollout.quantization = null"
        )


def check_lora(recipe: Recipe, config: "PreTrainedConfig") -> None:
    """Refuses adapters that do not divide over the tensor-parallel ranks, and those of experts."""
    lora = recipe.model.lora
    if lora is None:
        return
    for section, parallel in (("parallel", recipe.parallel), (recipe.engines_key, recipe.engine_parallel)):
        size = parallel.tensor_model_parallel_size
        if lora.rank % size:
            raise UserError(
                f"model.lora.rank = {lora.rank}: should be a multiple of {section}.tensor_model_parallel_size = {size}"
            )
    of_experts = [name for name in lora.modules if name in ("linear_fc1", "linear_fc2")]
    if of_experts and getattr(config.get_text_config(), "num_experts", None):
        raise UserError(
            f"model.lora.modules has {of_experts[0]!r}: experts have no adapters, so should be of "
            "'linear_qkv', 'linear_proj' in a mixture of experts"
        )


def check_deterministic(config: "PreTrainedConfig", deterministic: bool) -> None:
    """Refuses a model for which there are no kernels that give a token the same bits in every batch."""
    size, why = head_size(config.get_text_config()), None
    if FAMILIES[config.model_type].media:
        why = f"a {config.model_type} sees, and its tower encodes the pictures of a batch together"
    elif size & (size - 1):
        why = f"a head of this {config.model_type} has {size} numbers, which is no power of two"
    if deterministic and why:
        raise UserError(f"deterministic = True: should be false, since {why}")


def check_perception(algorithm: AlgorithmSection, config: "PreTrainedConfig") -> None:
    """Refuses to hide media from a model that sees none."""
    coefficient = algorithm.perception.coefficient
    if coefficient and not FAMILIES[config.model_type].media:
        key = f"algorithm.perception.coefficient = {coefficient}"
        raise UserError(f"{key}: should be 0, since a {config.model_type} reads text alone")


def check_environment(recipe: Recipe) -> None:
    """Refuses the user's own environments that cannot be imported, made or called: one process tries."""
    environment = recipe.environment
    own = any(one.own for one in (environment, *environment.sources.values()))
    if own or (environment.dialogue is not None and environment.dialogue.name not in DIALOGUES):
        specs = replace(environment.specs, dialogue=environment.dialogue_spec)
        Workers(specs, 1, environment.timeout_seconds).close()


def refuse(recipe: Recipe, world_size: int) -> "PreTrainedConfig":
    """Everything that can be said against a recipe before Megatron is imported; returns the model's config.

    Raises:
        UserError: the recipe cannot run on `world_size` processes, or from the files that it names.
    """
    check_world(recipe, world_size)
    check_pins(recipe.pins.model_dump())
    check_folders(recipe.model, recipe.data)
    if recipe.data.generator is not None:
        check_options(recipe.data.generator, recipe.data.generator_options)
    check_environment(recipe)
    config = hf_config(recipe.model.path, recipe.model.config)
    if recipe.algorithm.reference is not None:
        check_reference(recipe.algorithm.reference, config)
    check_parts(recipe.model, config)
    check_lora(recipe, config)
    check_quantization(recipe, config)
    check_perception(recipe.algorithm, config)
    check_heads(config, recipe.parallel.tensor_model_parallel_size)
    check_context(config, recipe.parallel)
    check_experts(config, recipe.parallel)
    check_router_replay(config, recipe.algorithm.router_replay)
    check_deterministic(config, recipe.deterministic)
    if recipe.rollout.parallel is not None:
        check_heads(config, recipe.engine_parallel.tensor_model_parallel_size, recipe.engines_key)
        check_experts(config, recipe.engine_parallel, recipe.engines_key)
    for dtype in dtypes(recipe):
        check_kv_cache(recipe, config, dtype)
    return config


def report(recipe: Recipe, world_size: int) -> str:
    """What the job will be, for people; refuses what `refuse` does."""
    config = refuse(recipe, world_size)
    kinds = dtypes(recipe)
    tensor_parallel = recipe.parallel.tensor_model_parallel_size
    algorithm, rollout = recipe.algorithm, recipe.rollout
    longest = recipe.longest_sequence
    prompts, group, rollouts = algorithm.prompts_per_step, algorithm.group_size, algorithm.rollouts_per_step
    parameters = replace(count_parameters(config), adapters=adapter_parameters(config, recipe.model.lora))
    capacities = "what all else leaves of a GPU"
    if rollout.kv_cache_gb is not None:
        capacities = "tokens on a rank: " + ", ".join(
            f"{kv_cache_blocks(recipe, config, dtype) * rollout.block_size_tokens:,} in {dtype}" for dtype in kinds
        )
    memories = [estimate_memory(recipe, config, parameters, dtype, world_size) for dtype in kinds]
    data_parallel = recipe.parallel.data_parallel_size(world_size)
    updates = algorithm.updates_per_step
    lines = [
        f"processes    {world_size} = tensor parallel {tensor_parallel} x data parallel {data_parallel}",
        *_engines(recipe, world_size),
        f"a step       {rollouts:,} rollouts (prompts {prompts} x group {group})",
        f"             {updates} updates (epochs {algorithm.epochs} x minibatches {algorithm.minibatches})",
        f"             at most {rollouts * rollout.max_new_tokens:,} tokens generated, "
        f"{rollouts * longest * algorithm.epochs:,} trained",
        f"the run      {recipe.steps:,} steps, {recipe.total_updates:,} updates",
        f"run folder   {recipe.run_dir}",
        f"parameters   {parameters.total:,}: vision {parameters.vision:,}, "
        f"projector {parameters.projector:,}, language {parameters.language:,}"
        + f", adapters {parameters.adapters:,}"
        * (recipe.model.lora is not None),
        *_experts(config, recipe.parallel),
        f"KV cache     {capacities}; a request has at most {longest:,}",
        "",
        f"{'GiB on a rank':<24}" + "".join(f"{dtype:>12}" for dtype in kinds),
    ]
    for title, field in (
        ("weights", "weights"),
        *[("weights of the engine", "engine_weights")] * recipe.own_engine,
        ("gradients", "gradients"),
        ("optimizer state", "optimizer_state"),
        ("KV cache", "kv_cache"),
        ("activations, rollout", "activations_rollout"),
        ("activations, training", "activations_training"),
        ("peak, rollout", "rollout_peak"),
        ("peak, training", "training_peak"),
        *[("on the host: optimizer", "state_snapshot")] * (recipe.training.offload == "optimizer"),
        ("on the host: reference", "reference_snapshot"),
        *[("on the host: under LoRA", "merge_snapshot")] * (recipe.model.lora is not None),
    ):
        lines.append(f"{title:<24}" + "".join(f"{getattr(memory, field) / GIB:>12.3f}" for memory in memories))
    return "\n".join(lines)


def _engines(recipe: Recipe, world_size: int) -> list[str]:
    """Where they have a layout of their own."""
    if recipe.rollout.parallel is None:
        return []
    size = recipe.engine_parallel.tensor_model_parallel_size
    return [f"rollouts     {world_size // size} engines of tensor parallel {size}; weights resharded after each step"]


def _experts(config: "PreTrainedConfig", parallel: ParallelSection) -> list[str]:
    experts = getattr(config.get_text_config(), "num_experts", None)
    if not experts:
        return []
    visited, here = config.get_text_config().num_experts_per_tok, experts // parallel.expert_model_parallel_size
    return [f"experts      {experts:,} in a layer, {visited} of them for a token, {here:,} on a rank"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megarl.check", description="Validates a recipe without a GPU.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--world-size",
        type=int,
        default=os.environ.get("WORLD_SIZE", "1"),
        help="processes of the job; default: WORLD_SIZE of the environment, else 1",
    )
    arguments = parser.parse_intermixed_args(argv)
    try:
        print(report(load_recipe(arguments.recipe, arguments.overrides), arguments.world_size))
    except UserError as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
