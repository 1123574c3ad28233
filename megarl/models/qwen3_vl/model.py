"""Bridge's Qwen3-VL, one module that the trainer and the dynamic engine share.

Bridge gives the modules, their names and the way to and from Hugging Face.  What is megarl's own is the
way through them: media features are computed once per distinct item (`encode`), put into the whole row
by index (`merge`), and the language model then runs either on packed rows (`forward`, training) or under
an inference context (`megarl.rollout`).  Nothing here ever looks for a media token in the ids.
"""

from dataclasses import dataclass

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model import Qwen3VLModel
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import split_deepstack_embs
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.packing.cost import StackCost
from megarl.parallel import context
from megarl.parallel.frames import encode_spread
from megarl.parallel.ulysses import ulysses
from megarl.platform.kernels import kernels


class DualSelfAttention(Qwen3VLSelfAttention):
    """Bridge's forward when training (per-token angles, packed rows too), Megatron's when an inference
    context is given: Bridge's own inference branch was written for an older megatron-core."""

    def forward(self, hidden_states, attention_mask, *args, inference_context=None, **kwargs):
        kind = Qwen3VLSelfAttention if inference_context is None else SelfAttention
        return kind.forward(self, hidden_states, attention_mask, *args, inference_context=inference_context, **kwargs)


class PolicyLayer(TransformerLayer):
    """Replays CUDA graphs in the engine and never in training, whose packed rows have no fixed shape."""

    def _should_call_local_cudagraph(self, *args, **kwargs):
        return kwargs.get("inference_context") is not None and super()._should_call_local_cudagraph(*args, **kwargs)


def language_block_spec(config) -> TransformerBlockSubmodules:
    """The decoder's layers.  A block spec, because Bridge overwrites the attention class of a layer spec."""
    if kernels().te:
        from megatron.core.extensions.transformer_engine import TENorm as Norm

        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
        )
        attention = layer.submodules.self_attention.submodules
    else:
        from megarl.platform.layers import CoreAttention, Norm

        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CoreAttention
        attention.q_layernorm = attention.k_layernorm = Norm
    if config.context_parallel_size > 1:
        attention.core_attention = ulysses(attention.core_attention)
    layer.module = PolicyLayer
    layer.submodules.self_attention.module = DualSelfAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm)


@dataclass(frozen=True, eq=False)
class MergedInput:
    """What the language model takes: text and media in one row, already cut for sequence parallelism."""

    embeddings: Tensor
    """`[tokens (/ tp under sequence parallelism), 1, hidden]`."""
    media_mask: Tensor | None
    """bool `[1, tokens of this rank]`, or None where the row has no media."""
    deepstack: list[Tensor] | None
    """One `[media tokens of this rank, hidden]` per deepstack layer, or None."""


class Qwen3VL(Qwen3VLModel):
    """`config` is Bridge's provider for a Qwen3-VL, finalised; `groups` are those of its layout, by default
    Megatron's own, in which policies are trained."""

    def __init__(self, config, groups: ProcessGroupCollection | None = None):
        super().__init__(
            config,
            language_block_spec(config),
            config.vision_config,
            pre_process=True,
            post_process=True,
            pg_collection=groups or ProcessGroupCollection.use_mpu_process_groups(),
        )
        self.model_type = ModelType.encoder_or_decoder  # asked for by Megatron's schedules
        # The angles belong to the tokens of the row as it is.  With False, Bridge's rotary module would take the
        # row for a whole unpacked sequence and slice it by context-parallel rank.
        self.language_model.rotary_pos_emb.is_thd_format = True

    def _expose_language_model_for_cuda_graph_helper(self) -> None:
        """Nothing, where Bridge makes the decoder a second child for graphs of another kind than the engine's: each of
        its weights would have two names, and a checkpoint with graphs would fit no model without."""

    @property
    def merge_size(self) -> int:
        """Side of the square of patches that becomes one media token."""
        return self.vision_transformer_config.spatial_merge_size

    @property
    def feature_row_bytes(self) -> int:
        """Bytes of what `encode` returns for one media token."""
        layers = 1 + len(self.vision_transformer_config.deepstack_visual_indexes)
        return layers * self.config.hidden_size * self.config.params_dtype.itemsize

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Runs the vision tower.

        Args:
            pixels: `[patches, patch features]` of the items one after another, on any device.
            grids: int64 `[items, 3]`, (t, h, w) in patches.

        Returns:
            `[1 + deepstack layers, media tokens, hidden]`; index 0 goes into the embeddings.
        """
        device = self.vision_model.pos_embed.weight.device
        features, deepstack = self.vision_model(
            hidden_states=pixels.to(device, self.config.params_dtype), grid_thw=grids.to(device)
        )
        return torch.stack([features, *deepstack])

    def encode_row(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """`encode` for a row that the context-parallel ranks share.  Collective over them with `vision_dp_when_cp`:
        each then encodes a part of the frames.  Without, each encodes all, and has the gradient of its own tokens
        only, as for every weight.  `grids` is on the CPU."""
        if not self.config.vision_dp_when_cp or context.group().size() == 1:
            return self.encode(pixels, grids)
        config = self.vision_model.config
        stack = StackCost.of(config)
        nothing = self.vision_model.pos_embed.weight.new_empty(
            1 + len(config.deepstack_visual_indexes),
            0,
            self.config.hidden_size,
            requires_grad=any(p.requires_grad for p in self.vision_model.parameters()),
        )
        return encode_spread(
            self.encode, pixels, grids, self.merge_size, lambda patches: stack.operations(patches, patches), nothing
        )

    def merge(self, ids: Tensor, feature_rows: Tensor, features: Tensor | None, shard: bool = False) -> MergedInput:
        """Puts media features into the whole row, then cuts the row for context and sequence parallelism.

        Args:
            ids: int64 `[tokens]`.
            feature_rows: int64 `[tokens]`: the feature of each media token, -1 for text.
            features: what `encode` returned, or None where the row has no media.
            shard: cut the row over the context-parallel ranks, which hold the same row when training and rows of
                their own in the engine.
        """
        embeddings = self.language_model.embedding(input_ids=ids[None], position_ids=None)
        mask = deepstack = None
        if features is not None:
            places = (feature_rows >= 0).nonzero().flatten()
            chosen = features[:, feature_rows[places]].to(embeddings.dtype)
            embeddings = embeddings.index_put((places,), chosen[0][:, None])
            mask, deepstack = (feature_rows >= 0)[None], list(chosen[1:])
        if shard:
            embeddings = context.shard(embeddings, 0)
            if features is not None:
                first, last = context.bounds(ids.numel())
                here = (places >= first) & (places < last)
                mask, deepstack = context.shard(mask, 1), [d[here] for d in deepstack]
        if self.config.sequence_parallel:
            tp = self.pg_collection.tp
            embeddings = scatter_to_sequence_parallel_region(embeddings, group=tp)
            if features is not None:
                # Each rank adds its slice of these only, so their gradients are summed over the ranks here;
                # the embeddings' are gathered by the scatter above.
                deepstack = [copy_to_tensor_model_parallel_region(d, group=tp) for d in deepstack]
                mask, deepstack = split_deepstack_embs(
                    mask, deepstack, tp_size=tp.size(), tp_rank=tp.rank(), sequence_parallel=True
                )
        return MergedInput(embeddings, mask, deepstack)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        packed_seq_params: PackedSeqParams,
        feature_rows: Tensor,
        pixels: Tensor | None,
        grids: Tensor | None,
        output_processor=None,
        output_processor_context=None,
    ) -> Tensor:
        """One packed row through the whole model, for training and scoring.

        Args:
            ids: int64 `[tokens]`, the same on all context-parallel ranks; a multiple of context-parallel size times,
                under sequence parallelism, tensor-parallel size.
            positions: int64 `[3, tokens]`, rotary positions (time, height, width).
            packed_seq_params: bounds of the row's segments (`thd`).
            feature_rows: int64 `[tokens]`, see `merge`.
            pixels, grids: the row's distinct media items, see `encode`, the grids on the CPU; None without media.
            output_processor, output_processor_context: Megatron's hook in place of the logits.

        Returns:
            What the hook returns; without one, logits `[1, tokens / cp, vocabulary / tp]`.
        """
        features = None if pixels is None else self.encode_row(pixels, grids)
        merged = self.merge(ids, feature_rows, features, shard=True)
        return self.language_model(
            input_ids=context.shard(ids, 0)[None],
            position_ids=context.shard(positions, 1)[:, None],
            attention_mask=None,
            decoder_input=merged.embeddings,
            packed_seq_params=packed_seq_params,
            visual_pos_masks=merged.media_mask,
            deepstack_visual_embeds=merged.deepstack,
            output_processor=output_processor,
            output_processor_context=output_processor_context,
        )
