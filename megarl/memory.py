"""What a rank's memory holds at its fullest, predicted from recipe and configuration alone, without a GPU.

Predicted is what torch's allocator gives at most (`torch.cuda.max_memory_allocated`), while the engine samples and
while the trainer learns.  The CUDA context, NCCL's buffers, captured graphs and the allocator's waste come on top.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from megarl.errors import UserError
from megarl.models.families import FAMILIES
from megarl.recipe import LoraModule, LoraSection, ModelSection, ParallelSection, Recipe

if TYPE_CHECKING:  # transformers takes seconds to import; a refused recipe does not wait for it
    from transformers import PreTrainedConfig

GIB = 1024**3
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
PROJECTOR = re.compile(r"merger|projector")
_KEPT_FREE = 0.08
"""Share of a GPU's memory that a KV cache which takes what is left leaves to what is not predicted."""


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
    qk_norm: bool = False
    """Norms of queries and keys, before they are turned."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: int
    engine_weights: int
    """Of the engine's own copy, where it has one."""
    gradients: int
    optimizer_state: int
    state_snapshot: int
    """In the host's memory: of the optimizer's state, while rollouts are sampled without it and without gradients."""
    reference_snapshot: int
    """Likewise."""
    merge_snapshot: int
    """Likewise: of the weights that adapters are added to."""
    kv_cache: int
    activations_rollout: int
    activations_training: int

    @property
    def held(self) -> int:
        """Kept through both phases, unless it is offloaded."""
        weights = self.weights + self.engine_weights
        return weights + self.gradients + self.optimizer_state + self.kv_cache

    @property
    def rollout_peak(self) -> int:
        offloaded = self.gradients + self.state_snapshot if self.state_snapshot else 0
        return self.held - offloaded + self.activations_rollout

    @property
    def training_peak(self) -> int:
        """With the KV cache, whose addresses are in the engine's CUDA graphs: what is offloaded makes no room for a
        larger one where this is the larger peak."""
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
        qk_norm=FAMILIES[config.model_type].qk_norm,
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
    inner outputs and the input of its last projection.  Where queries and keys are normalised, what they were before
    is kept too.  That is what transformer-engine's LayerNormLinear, RMSNorm, attention and Linear save, and Megatron's
    fused SwiGLU; statistics of norms and attention, a few numbers a token, count as nothing.
    """
    whole = 4 * stack.hidden / (tensor_parallel if sequence_parallel else 1)
    attention = (2 + stack.qk_norm) * (stack.query + stack.key_value)
    split = (attention + (3 if stack.gated else 2) * stack.ffn) / tensor_parallel
    return int((whole + split) * tokens * item_bytes)


def layer_gradients(stack: LayerStack, tokens: int, item_bytes: int, tensor_parallel: int) -> int:
    """Bytes of what the widest part of a layer, its MLP, needs beside that in the backward pass: gradients of its inner
    outputs and of the input of its last projection."""
    return (3 if stack.gated else 2) * stack.ffn * tokens * item_bytes // tensor_parallel


def loss_logits(tokens: int, vocabulary: int, item_bytes: int) -> int:
    """Bytes of the logits of `tokens` completion tokens, which become their own gradient in place."""
    return tokens * vocabulary * item_bytes


def sampling(requests: int, vocabulary: int, item_bytes: int) -> int:
    """Bytes of the logits of a decode step, their log-probabilities and probabilities in float32, and these summed up
    in float64 (`megarl.rollout.sampling`)."""
    return requests * vocabulary * (item_bytes + 4 + 4 + 8)


def kv_token(recipe: Recipe, config: "PreTrainedConfig", dtype: str) -> int:
    """Bytes of a token's keys and values on one rank."""
    text, tensor_parallel = config.get_text_config(), recipe.engine_parallel.tensor_model_parallel_size
    heads = max(1, text.num_key_value_heads // tensor_parallel)
    return 2 * text.num_hidden_layers * heads * head_size(text) * ITEM_BYTES[dtype]


def kv_cache_blocks(recipe: Recipe, config: "PreTrainedConfig", dtype: str) -> int:
    """Blocks of the KV cache that requests can use on one rank; the engine keeps one more for padding.  Of a
    cache whose size the recipe gives."""
    block = kv_token(recipe, config, dtype) * recipe.rollout.block_size_tokens
    return int(recipe.rollout.kv_cache_gb * GIB) // block - 1


def routing_token(recipe: Recipe, config: "PreTrainedConfig") -> int:
    """Bytes on one rank for the experts of a token in the KV cache, where they are replayed."""
    if not recipe.algorithm.router_replay:
        return 0
    text = config.get_text_config()
    return text.num_hidden_layers * text.num_experts_per_tok * (1 if text.num_experts <= 256 else 2)


def _kv_cache(recipe: Recipe, config: "PreTrainedConfig", dtype: str) -> int:
    """With the experts of its tokens; 0 where the cache takes what is left."""
    if recipe.rollout.kv_cache_gb is None:
        return 0
    tokens = (kv_cache_blocks(recipe, config, dtype) + 1) * recipe.rollout.block_size_tokens
    return int(recipe.rollout.kv_cache_gb * GIB) + tokens * routing_token(recipe, config)


def kv_cache_that_fits(recipe: Recipe, config: "PreTrainedConfig", dtype: str, world_size: int, memory: int) -> float:
    """GiB for the KV cache of a rank to which torch's allocator could give `memory` bytes in all: what the larger of
    the two peaks leaves of them, less a share for what is not predicted.

    Raises:
        UserError: what is left does not hold the longest request.
    """
    counted = replace(count_parameters(config), adapters=adapter_parameters(config, recipe.model.lora))
    rest = estimate_memory(recipe, config, counted, dtype, world_size)
    peak = max(rest.rollout_peak, rest.training_peak)
    token, routing = kv_token(recipe, config, dtype), routing_token(recipe, config)
    room = int((memory * (1 - _KEPT_FREE) - peak) * token / (token + routing))
    size = recipe.rollout.block_size_tokens
    held = max(0, room // (token * size) - 1) * size
    if held < recipe.longest_sequence:
        raise UserError(
            f"rollout.kv_cache_gb = null: of {memory / GIB:.1f} GiB on a rank all else takes {peak / GIB:.1f}, which "
            f"leaves room for {held} tokens: should hold {recipe.longest_sequence}, so shrink "
            "training.tokens_per_row or rollout.max_requests, or set training.recompute = 'full'"
        )
    return room / GIB


def estimate_memory(
    recipe: Recipe, config: "PreTrainedConfig", parameters: ParameterCount, dtype: str, world_size: int
) -> Memory:
    """Bytes on one rank, see the module.

    Weights count as split evenly over the tensor-parallel ranks, those of experts over the ranks that share these;
    those that are not (norms, routers) are small, but for a tower that each rank has whole.  Weights are views into
    Megatron's buffers, gradients are float32.  The optimizer's state is sharded over the ranks that hold the same
    weights, of which those of context parallelism are not counted: two moments, and beside bfloat16 weights float32
    masters; float32 weights are their own masters.  Activations are those of full steps: upper bounds, which a run
    with shorter rows does not reach.
    """
    item, parallel, engine = ITEM_BYTES[dtype], recipe.parallel, recipe.engine_parallel
    split_tower = FAMILIES[config.model_type].split_tower
    shard = sum(parameters.on_a_rank(parallel, split_tower))
    trained, trained_expert_shard = parameters.trained(recipe.model).on_a_rank(parallel, split_tower)
    copies, expert_copies = parallel.data_parallel_size(world_size), world_size // parallel.expert_parallel_size
    moments_and_masters = 12 if dtype == "bfloat16" else 8
    state = moments_and_masters * trained // copies + moments_and_masters * trained_expert_shard // expert_copies
    trained += trained_expert_shard
    tensor_parallel = parallel.tensor_model_parallel_size
    return Memory(
        weights=item * shard,
        engine_weights=_engine_weights(recipe, config, item * sum(parameters.on_a_rank(engine, split_tower))),
        gradients=4 * trained,
        optimizer_state=state,
        state_snapshot=state if recipe.training.offload == "optimizer" else 0,
        reference_snapshot=_reference(recipe, item * shard, item * trained),
        merge_snapshot=item * adapted_weights(config, recipe.model.lora) // tensor_parallel,
        kv_cache=_kv_cache(recipe, config, dtype),
        activations_rollout=_rollout_activations(recipe, config, item),
        activations_training=_training_activations(recipe, config, item),
    )


def _rollout_activations(recipe: Recipe, config: "PreTrainedConfig", item: int) -> int:
    """The largest of: sampling for all requests, a layer in a full step, a layer of the tower in a full pass; and the
    media features that are kept."""
    rollout, engine = recipe.rollout, recipe.engine_parallel
    language, vision = layer_stacks(config)
    size = engine.tensor_model_parallel_size
    parts = [
        sampling(rollout.max_requests, config.get_text_config().vocab_size, item),  # gathered over the ranks
        layer_activations(language, rollout.max_tokens_per_step, item, size, engine.sequence_parallel),
    ]
    if vision is None:
        return max(parts)
    sharing = size if FAMILIES[config.model_type].split_tower else 1
    parts.append(layer_activations(vision, rollout.patches_per_pass, item, sharing, False))
    return max(parts) + int(rollout.vision_cache_gb * GIB)


def _training_activations(recipe: Recipe, config: "PreTrainedConfig", item: int) -> int:
    """Of a full row, where the backward pass begins: what all layers keep, and either the loss's logits or what the
    last layer needs beside.  A place holds a completion token with its logits or a media token with its patches; all
    are of the kind that takes more."""
    training, parallel = recipe.training, recipe.parallel
    language, vision = layer_stacks(config)
    tensor_parallel, contexts = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    row = training.tokens_per_row // contexts
    vocabulary = config.get_text_config().vocab_size // tensor_parallel
    layer = layer_activations(language, row, item, tensor_parallel, parallel.sequence_parallel)
    backward = layer_gradients(language, row, item, tensor_parallel)
    inputs = row * language.hidden * item // (tensor_parallel if parallel.sequence_parallel else 1)
    without_mlp = replace(language, ffn=0)
    of_a_layer = {
        "none": layer,
        # Without the inner outputs of the MLP and what its norm gives.
        "selective": layer_activations(without_mlp, row, item, tensor_parallel, parallel.sequence_parallel) - inputs,
        "full": inputs,
    }[training.recompute]
    kept = language.layers * of_a_layer
    if training.recompute != "none":
        backward += layer - (0 if training.recompute == "full" else of_a_layer)  # of the one that is computed again
    loss = max(loss_logits(min(training.log_prob_chunk or row, row), vocabulary, item), backward)
    if vision is not None and "vision" not in recipe.model.freeze:
        loss = max(loss, backward + _tower_activations(recipe, config, vision, item))
    if recipe.algorithm.perception.coefficient > 0:
        kept, loss = 2 * kept, 2 * loss  # of a row and of its twin
    # The output layer's gradient, which waits for the embedding's where they are one.
    head = 0 if "language" in recipe.model.frozen else item * vocabulary * language.hidden
    return kept + loss + head


def _tower_activations(recipe: Recipe, config: "PreTrainedConfig", vision: LayerStack, item: int) -> int:
    """Of a row full of media: pixels, layers, and the mergers, MLPs as wide as the square of patches of which they make
    one token: for each patch the input, the inner output and the last projection's input, each as wide as a patch."""
    settings, parallel = config.vision_config, recipe.parallel
    patches = recipe.training.tokens_per_row * settings.spatial_merge_size**2
    if parallel.vision_dp_when_cp:
        patches //= parallel.context_parallel_size
    sharing = parallel.tensor_model_parallel_size if FAMILIES[config.model_type].split_tower else 1
    mergers = 1 + len(getattr(settings, "deepstack_visual_indexes", ()))
    pixels = settings.in_channels * settings.temporal_patch_size * settings.patch_size**2
    layers = vision.layers * layer_activations(vision, patches, item, sharing, False)
    return layers + patches * item * (pixels + mergers * 3 * vision.hidden)


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


def dtypes(recipe: Recipe) -> list[str]:
    """What the weights may be: `auto` is known where the run starts."""
    return ["bfloat16", "float32"] if recipe.model.dtype == "auto" else [recipe.model.dtype]
