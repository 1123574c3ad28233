"""The decoder of every family with attention: its layers, and Megatron's GPTModel with an angle for each token."""

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.models.decode_attention import DecodeContext, decode
from megarl.models.query_key_value import HeadLayout, query_key_value, rotated
from megarl.parallel.ulysses import ulysses
from megarl.platform.kernels import kernels


class DualSelfAttention(SelfAttention):
    """Of a language model or of a vision tower: over packed rows, with an angle for each token; and with an inference
    context over the pages of its KV cache."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask=None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context=None,
        **_,
    ):
        if isinstance(inference_context, DecodeContext):
            return self.linear_proj(decode(self, hidden_states, inference_context, rotary_pos_emb))
        query, key, value = self.query_key_value(hidden_states, rotary_pos_emb)
        if inference_context is None:
            out = self.core_attention(
                query, key, value, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params
            )
        else:
            out = self._over_pages(query, key, value, inference_context)
        return self.linear_proj(out.reshape(len(query), 1, -1))

    def query_key_value(self, hidden_states: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states `[tokens, 1, hidden]` (cut under sequence parallelism) and angles `[tokens, 1, 1, dim]` to
        `[tokens, heads, dim]`: what this rank attends with."""
        if self.config.num_query_groups < self.world_size:  # a rank has a part of a group
            query, key, value = (x.squeeze(1) for x in self.get_query_key_value_tensors(hidden_states))
            return rotated(query, angles), rotated(key, angles), value
        mixed, _ = self.linear_qkv(hidden_states)
        return query_key_value(mixed, angles, self.head_layout, *self.head_norms, eps=self.config.layernorm_epsilon)

    @property
    def head_layout(self) -> HeadLayout:
        groups = self.num_query_groups_per_partition
        return HeadLayout(groups, self.num_attention_heads_per_partition // groups, self.hidden_size_per_attention_head)

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the norms over queries and keys."""
        return tuple(getattr(norm, "weight", None) for norm in (self.q_layernorm, self.k_layernorm))

    def _over_pages(self, query: Tensor, key: Tensor, value: Tensor, context) -> Tensor:
        """As Megatron's own forward in a step with prompts."""
        context.append_key_value_cache(self.layer_number, key[:, None], value[:, None])
        keys, values, table = context.key_value_cache(self.layer_number)
        bounds, longest = context.cu_query_lengths()
        kv_bounds, kv_lengths, kv_longest = context.cu_kv_lengths()
        return self.flash_decode_and_prefill(
            query[:, None],
            keys,
            values,
            longest,
            kv_longest,
            bounds,
            kv_bounds,
            kv_lengths,
            table,
            context.is_decode_only(),
        )


class PolicyLayer(TransformerLayer):
    """Computes its MLP again (`training.recompute: selective`) where there is a backward pass: not in the engine."""

    @property
    def recompute_mlp(self) -> bool:
        return self._recompute_mlp and torch.is_grad_enabled()

    @recompute_mlp.setter
    def recompute_mlp(self, value: bool) -> None:
        self._recompute_mlp = value


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
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    if config.context_parallel_size > 1 and config.cp_comm_type != "p2p":  # a ring is transformer-engine's own
        attention.core_attention = ulysses(attention.core_attention)
    layer.module = PolicyLayer
    layer.submodules.self_attention.module = DualSelfAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm)


class TokenAngles(torch.nn.Module):
    """Rotary angles of tokens, where Megatron's module gives a table by position.

    A table fits only rows that are whole and segments that count from 0, and Megatron cuts it for its own way of
    context parallelism.  An angle for each token fits packed rows, any part of them, and the engine's steps alike.

    Args:
        rotary: Megatron's module, of which the frequencies are taken.
        sections: of the frequencies, how many turn with time, height and width, in this order (contiguous MRoPE,
            Qwen2-VL, arXiv:2409.12191, section 2.1); None: all turn with the one axis that text has.
    """

    def __init__(self, rotary: RotaryEmbedding, sections: list[int] | None):
        super().__init__()
        self.inv_freq = rotary.inv_freq / (rotary.seq_len_interpolation_factor or 1)
        self.sections = sections

    def forward(self, position_ids: Tensor, *_, **__) -> Tensor:
        """int64 `[3, 1, tokens]` to float32 `[tokens, 1, 1, kv_channels]`, as GPTModel asks for MRoPE."""
        angles = position_ids[:, 0, :, None].float() * self.inv_freq
        if self.sections is None:
            angles = angles[0]
        else:
            angles = torch.cat([part[axis] for axis, part in enumerate(angles.split(self.sections, -1))], -1)
        return torch.cat([angles, angles], -1)[:, None, None]


def language_model(config, groups: ProcessGroupCollection, sections: list[int] | None = None) -> GPTModel:
    """Megatron's GPTModel that takes positions int64 `[3, 1, tokens]`, in training and in the engine.

    Args:
        config: Bridge's provider, finalised.
        groups: of its layout.
        sections: see `TokenAngles`.
    """
    model = GPTModel(
        config,
        language_block_spec(config),
        config.vocab_size,
        config.seq_length,
        parallel_output=True,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        rope_scaling=config.rope_scaling,
        rope_scaling_factor=config.rope_scaling_factor,
        seq_len_interpolation_factor=config.seq_len_interpolation_factor,
        # Media enters the whole row, which `PolicyModel.merge` cuts afterwards.
        scatter_embedding_sequence_parallel=False,
        pg_collection=groups,
    )
    model.rotary_pos_emb = TokenAngles(model.rotary_pos_emb, sections)
    # The kind of embedding whose module is given the tokens' positions; GPTModel itself prefers the config's word.
    model.position_embedding_type, model.mrope_section = "mrope", sections
    return model
