"""The decoder of every family with attention: its layers, and Megatron's GPTModel with an angle for each token."""

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megarl.models.decode_attention import DecodeContext, decode_attention
from megarl.parallel.ulysses import ulysses
from megarl.platform.kernels import kernels


class DualSelfAttention(Qwen3VLSelfAttention):
    """Bridge's forward when training (per-token angles, packed rows too).  With an inference context Megatron's, since
    Bridge's own inference branch was written for an older megatron-core; and megarl's where that context is a decode
    step's (`megarl.rollout.decode`)."""

    def forward(self, hidden_states, attention_mask, *args, inference_context=None, rotary_pos_emb=None, **kwargs):
        if isinstance(inference_context, DecodeContext):
            return self.linear_proj(decode_attention(self, hidden_states, inference_context, rotary_pos_emb))
        kind = Qwen3VLSelfAttention if inference_context is None else SelfAttention
        return kind.forward(
            self,
            hidden_states,
            attention_mask,
            *args,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
            **kwargs,
        )


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
    config.apply_rotary_pos_emb_in_fp32 = False  # read by Bridge's attention, which was written for its own config
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
