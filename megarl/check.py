"""`python -m megarl.check RECIPE [key=value ...]`: validates without a GPU; prints layout and memory."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megarl.data.files import SPLITS, find_split
from megarl.data.generators.registry import check_options
from megarl.environments.registry import DIALOGUES
from megarl.environments.workers import Workers
from megarl.errors import UserError
from megarl.layout import check_context, check_experts, check_heads, check_router_replay
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from megarl.models.hub import folder_with
from megarl.pins import check_pins
from megarl.recipe import (
    AlgorithmSection,
    DataSection,
    LoraModule,
    LoraSection,
    ModelSection,
    ParallelSection,
    Recipe,
    check_world,
    load_recipe,
)

if TYPE_CHECKING:  # transformers takes seconds to import; a refused recipe does not wait for it
    from transformers import PreTrainedConfig

GIB = 1024**3
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
PROJECTOR = re.compile(r"merger|projector")


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the whole model, by the parts that `model.freeze` knows."""

    vision: int
    projector: int
    language: int
    experts: int = 0
    """Those of `language` that are in experts."""
    adapters: int = 0
    """Beside them all."""

    @property
    def total(self) -> int:
        return self.vision + self.projector + self.language + self.adapters

    def trained(self, model: ModelSection) -> "ParameterCount":
        """Without what is frozen."""
        frozen = model.frozen
        left = {part: 0 if part in frozen else getattr(self, part) for part in ("vision", "projector", "language")}
        return ParameterCount(**left, experts=0 if "language" in frozen else self.experts, adapters=self.adapters)

    def on_a_rank(self, parallel: ParallelSection, split_tower: bool) -> tuple[int, int]:
        """Those that expert-parallel ranks do not share, and those that they do."""
        tensor_parallel = parallel.tensor_model_parallel_size
        tower = (self.vision + self.projector) // (tensor_parallel if split_tower else 1)
        shared = self.language - self.experts + self.adapters
        return tower + shared // tensor_parallel, self.experts // parallel.expert_parallel_size


@dataclass(frozen=True)
class LayerStack:
    """What the activation formula needs of a stack of transformer layers; widths in elements."""

    layers: int
    hidden: int
    query: int
    """Heads x head size."""
    key_value: int
    """Key-value heads x head size."""
    ffn: int
    """Inner width of the MLP; of a mixture, that of the experts that one token visits."""
    gated: bool
    """Two inner projections (SwiGLU) or one."""
    head_norms: bool = False
    """Queries and keys are normalised, head by head."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: int
    engine_weights: int
    """Of the engine's own copy, where it has one."""
    gradients: int
    optimizer_state: int
    reference_snapshot: int
    """In the host's memory."""
    merge_snapshot: int
    """Likewise: of the weights that adapters are added to."""
    kv_cache: int
    activations_rollout: int
    activations_training: int

    @property
    def held(self) -> int:
        """Kept through both phases."""
        weights = self.weights + self.engine_weights
        return weights + self.gradients + self.optimizer_state + self.kv_cache

    @property
    def rollout_peak(self) -> int:
        return self.held + self.activations_rollout

    @property
    def training_peak(self) -> int:
        return self.held + self.activations_training


def count_parameters(config: "PreTrainedConfig") -> ParameterCount:
    """Counts on the meta device, where weights take no memory; the output layer counts as language."""
    import torch

    with torch.device("meta"):
        model = FAMILIES[config.model_type].hf_class._from_config(config)
    language = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    counts = {"vision": 0, "projector": 0, "language": 0}
    for name, parameter in model.named_parameters():
        part = "language" if parameter in language else "projector" if PROJECTOR.search(name) else "vision"
        counts[part] += parameter.numel()
        if ".experts." in name:
            counts["experts"] = counts.get("experts", 0) + parameter.numel()
    return ParameterCount(**counts)


def head_size(text: "PreTrainedConfig") -> int:
    """Width of an attention head of the language model."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def layer_stacks(config: "PreTrainedConfig") -> tuple[LayerStack, LayerStack | None]:
    """Language model, and vision tower where there is one."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    visited = getattr(text, "num_experts_per_tok", None)
    language = LayerStack(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        query=text.num_attention_heads * head_size(text),
        key_value=text.num_key_value_heads * head_size(text),
        ffn=visited * text.moe_intermediate_size if visited else text.intermediate_size,
        gated=True,
        head_norms=text.model_type.startswith("qwen3"),
    )
    if vision is None:
        return language, None
    tower = LayerStack(
        layers=vision.depth,
        hidden=vision.hidden_size,
        query=vision.hidden_size,
        key_value=vision.hidden_size,
        ffn=vision.intermediate_size,
        gated=vision.hidden_act == "silu",
    )
    return language, tower


def layer_activations(
    stack: LayerStack, tokens: int, item_bytes: int, tensor_parallel: int, sequence_parallel: bool
) -> int:
    """Bytes that one layer keeps for its backward pass, with flash attention and without dropout.

    Section 4 of Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
    (arXiv:2205.05198), with selective recomputation: s b h (10 + 24 / t) bytes, or s b h 34 / t with sequence
    parallelism, where queries, keys and values are h wide and the MLP 4 h.  Here it is in elements, for any
    width, and without the one-byte masks of two dropouts: the inputs of both norms, of the QKV and of the
    first MLP projection (4 h), and, split over the ranks, query, key, value, attention output, the MLP's
    inner outputs and the input of its last projection; and, where heads are normalised, what the QKV projection gave.
    """
    whole = 4 * stack.hidden / (tensor_parallel if sequence_parallel else 1)
    split = (2 * stack.query + 2 * stack.key_value + (3 if stack.gated else 2) * stack.ffn) / tensor_parallel
    if stack.head_norms:
        split += (stack.query + 2 * stack.key_value) / tensor_parallel
    return int((whole + split) * tokens * item_bytes)


def kv_cache_blocks(recipe: Recipe, config: "PreTrainedConfig", dtype: str) -> int:
    """Blocks of the KV cache that requests can use on one rank; the engine keeps one more for padding."""
    text, tensor_parallel = config.get_text_config(), recipe.engine_parallel.tensor_model_parallel_size
    heads = max(1, text.num_key_value_heads // tensor_parallel)
    token = 2 * text.num_hidden_layers * heads * head_size(text) * ITEM_BYTES[dtype]
    return int(recipe.rollout.kv_cache_gb * GIB) // (token * recipe.rollout.block_size_tokens) - 1


def routing_cache(recipe: Recipe, config: "PreTrainedConfig", dtype: str) -> int:
    """Bytes on one rank for the experts of the tokens in the KV cache, where they are replayed."""
    if not recipe.algorithm.router_replay:
        return 0
    text = config.get_text_config()
    tokens = (kv_cache_blocks(recipe, config, dtype) + 1) * recipe.rollout.block_size_tokens
    return tokens * text.num_hidden_layers * text.num_experts_per_tok * (1 if text.num_experts <= 256 else 2)


def estimate_memory(
    recipe: Recipe, config: "PreTrainedConfig", parameters: ParameterCount, dtype: str, world_size: int
) -> Memory:
    """Bytes on one rank; the CUDA context, NCCL, graphs and fragmentation come on top.

    Weights count as split evenly over the tensor-parallel ranks, those of experts over the ranks that share these;
    those that are not (norms, routers) are small, but for a tower that each rank has whole.  Gradients are float32.
    The optimizer's state is sharded over the ranks that hold the same weights, of which those of context parallelism
    are not counted: two moments, and beside bfloat16 weights float32 masters; float32 weights are their own masters.
    Activations are those of the engine's largest step, one layer at a time, and of a row full of media: upper bounds.
    """
    rollout, training = recipe.rollout, recipe.training
    item, tensor_parallel = ITEM_BYTES[dtype], recipe.parallel.tensor_model_parallel_size
    sequence_parallel = recipe.parallel.sequence_parallel
    parallel = recipe.parallel
    split_tower, engine = FAMILIES[config.model_type].split_tower, recipe.engine_parallel
    shard = sum(parameters.on_a_rank(parallel, split_tower))
    trained, trained_expert_shard = parameters.trained(recipe.model).on_a_rank(parallel, split_tower)
    copies, expert_copies = parallel.data_parallel_size(world_size), world_size // parallel.expert_parallel_size
    moments_and_masters = 12 if dtype == "bfloat16" else 8
    state = moments_and_masters * trained // copies + moments_and_masters * trained_expert_shard // expert_copies
    trained += trained_expert_shard

    language, vision = layer_stacks(config)
    vocabulary = config.get_text_config().vocab_size // tensor_parallel
    row = training.tokens_per_row
    layer = layer_activations(language, row, item, tensor_parallel, sequence_parallel)
    inputs = row * language.hidden * item // (tensor_parallel if sequence_parallel else 1)
    kept = {
        "none": layer,
        # Without the inner outputs of the MLP and what its norm gives.
        "selective": layer_activations(replace(language, ffn=0), row, item, tensor_parallel, sequence_parallel)
        - inputs,
        "full": inputs,
    }[training.recompute]
    activations = language.layers * kept
    if training.recompute != "none":
        activations += layer - (0 if training.recompute == "full" else kept)  # of the one that is computed again
    activations += min(training.log_prob_chunk or row, row) * vocabulary * item  # their gradient is written over them
    if vision is not None and "vision" not in recipe.model.freeze:
        patches = row * config.vision_config.spatial_merge_size**2
        sharing = tensor_parallel if split_tower else 1
        activations += vision.layers * layer_activations(vision, patches, item, sharing, False)
    if recipe.algorithm.perception.coefficient > 0:
        activations *= 2  # of a row and of its twin

    return Memory(
        weights=item * shard,
        engine_weights=_engine_weights(recipe, config, item * sum(parameters.on_a_rank(engine, split_tower))),
        gradients=4 * trained,
        optimizer_state=state,
        reference_snapshot=_reference(recipe, item * shard, item * trained),
        merge_snapshot=item * adapted_weights(config, recipe.model.lora) // tensor_parallel,
        kv_cache=int(rollout.kv_cache_gb * GIB) + routing_cache(recipe, config, dtype),
        activations_rollout=4
        * rollout.max_requests
        * (config.get_text_config().vocab_size // engine.tensor_model_parallel_size)
        + layer_activations(
            language,
            rollout.max_tokens_per_step,
            item,
            engine.tensor_model_parallel_size,
            engine.sequence_parallel,
        ),
        activations_training=activations,
    )


def _engine_weights(recipe: Recipe, config: "PreTrainedConfig", own: int) -> int:
    """With a byte for each weight that is multiplied in FP8: the engine keeps what a sync writes beside it."""
    if not recipe.own_engine:
        return 0
    asked, copied = recipe.rollout.quantization, 0
    if asked is not None and asked.format == "fp8":
        # Layers that may have adapters are those that are quantised.
        elements = sum(inputs * outputs for inputs, outputs in _linears(config, get_args(LoraModule)))
        copied = elements // recipe.engine_parallel.tensor_model_parallel_size
    return own + copied


def _reference(recipe: Recipe, whole: int, trained: int) -> int:
    """Another checkpoint is held whole, an earlier policy as far as it differs from the present one."""
    if recipe.algorithm.reference is not None:
        return whole
    return trained if recipe.algorithm.kl_coefficient > 0 else 0


def check_kv_cache(recipe: Recipe, config: "PreTrainedConfig", dtype: str) -> None:
    """Refuses a KV cache in which the longest request would wait for ever."""
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


def adapter_parameters(config: "PreTrainedConfig", lora: LoraSection | None) -> int:
    """Of the whole model."""
    return sum(lora.rank * (inputs + outputs) for inputs, outputs in _linears(config, lora.modules)) if lora else 0


def adapted_weights(config: "PreTrainedConfig", lora: LoraSection | None) -> int:
    """Elements, over the whole model, of which the host keeps a copy while adapters are added to them."""
    merged = lora is not None and lora.merge_for_rollouts
    return sum(inputs * outputs for inputs, outputs in _linears(config, lora.modules)) if merged else 0


def _linears(config: "PreTrainedConfig", modules: Sequence[LoraModule]) -> list[tuple[int, int]]:
    """(inputs, outputs) of these in every layer of the language model."""
    stack, _ = layer_stacks(config)
    sizes = {
        "linear_qkv": (stack.hidden, stack.query + 2 * stack.key_value),
        "linear_proj": (stack.query, stack.hidden),
        "linear_fc1": (stack.hidden, (1 + stack.gated) * stack.ffn),
        "linear_fc2": (stack.ffn, stack.hidden),
    }
    return [sizes[name] for name in sorted(set(modules))] * stack.layers


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
    if recipe.rollout.parallel is not None:
        check_heads(config, recipe.engine_parallel.tensor_model_parallel_size, recipe.engines_key)
        check_experts(config, recipe.engine_parallel, recipe.engines_key)
    for dtype in dtypes(recipe):
        check_kv_cache(recipe, config, dtype)
    return config


def dtypes(recipe: Recipe) -> list[str]:
    """What the weights may be: `auto` is known where the run starts."""
    return ["bfloat16", "float32"] if recipe.model.dtype == "auto" else [recipe.model.dtype]


def report(recipe: Recipe, world_size: int) -> str:
    """What the job will be, for people; refuses what `refuse` does."""
    config = refuse(recipe, world_size)
    kinds = dtypes(recipe)
    tensor_parallel = recipe.parallel.tensor_model_parallel_size
    algorithm, rollout = recipe.algorithm, recipe.rollout
    longest = recipe.longest_sequence
    prompts, group, rollouts = algorithm.prompts_per_step, algorithm.group_size, algorithm.rollouts_per_step
    parameters = replace(count_parameters(config), adapters=adapter_parameters(config, recipe.model.lora))
    capacities = ", ".join(
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
        f"KV cache     tokens on a rank: {capacities}; a request has at most {longest:,}",
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
