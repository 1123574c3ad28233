"""Gives the modules of a language model the functions of `megarl.platform.invariant`.

Megatron has a batch-invariant mode of its own, which replaces transformer-engine's products and norms and leaves
attention to FlashAttention, whose kernels for training and for pages are not one.  Here each module keeps its weights,
names and checkpoint, and computes by one function in the trainer and in the engine.
"""

from collections.abc import Callable
from functools import partial

import megarl.platform.prepare  # noqa: F401

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megarl.errors import UserError
from megarl.models.decode_attention import DecodeContext
from megarl.platform import invariant
from megarl.platform.kernels import kernels


def settings() -> dict:
    """Of Megatron's config, before the model is built."""
    return dict(deterministic_mode=True, bias_activation_fusion=False, activation_func=invariant.silu)


def install(model) -> None:
    """In place.

    Raises:
        UserError: the model has a module for which there is no such function.
    """
    for name, module in model.named_modules():
        forward = _forward(module)
        if forward is not None:
            module.forward = partial(forward, module)
        elif next(module.parameters(recurse=False), None) is not None and not isinstance(
            module, VocabParallelEmbedding
        ):
            raise UserError(
                f"deterministic = True: should be false, since {name} is a {type(module).__name__}, which was not made "
                "independent of the batch"
            )


def _forward(module: torch.nn.Module) -> Callable | None:
    linear, norm = (ColumnParallelLinear, RowParallelLinear), (torch.nn.RMSNorm,)
    if kernels().te:
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TELinear
        from transformer_engine.pytorch import RMSNorm

        linear, norm = (*linear, TELinear, TELayerNormColumnParallelLinear), (*norm, RMSNorm)
    if isinstance(module, SelfAttention):
        return _attend
    if isinstance(module, norm):
        return _normalize
    bias = getattr(module, "bias", None)
    if isinstance(module, linear) and (bias is None or not bias.numel()):
        return _multiply
    return None


def _multiply(module, x: Tensor, weight: Tensor | None = None, **_) -> tuple[Tensor, None]:
    """Of a linear layer, with the norm before it where transformer-engine has both in one module."""
    if getattr(module, "layer_norm_weight", None) is not None:
        x = invariant.rms_norm(x, module.layer_norm_weight, module.config.layernorm_epsilon)
    return invariant.matmul(x, module.weight if weight is None else weight), None


def _normalize(module, x: Tensor) -> Tensor:
    return invariant.rms_norm(x, module.weight, module.eps)


def _attend(
    module: SelfAttention,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *,
    inference_context=None,
    rotary_pos_emb=None,
    packed_seq_params=None,
    **_,
) -> tuple[Tensor, None]:
    """`[tokens, 1, hidden]` of a packed row, or of an engine's step."""
    query, key, value = module.get_query_key_value_tensors(hidden_states)
    angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
    query, key = invariant.rope(query, key, *invariant.rotation(angles, query.dtype))
    scale = module.hidden_size_per_attention_head**-0.5
    if inference_context is None:
        bounds, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        out = invariant.segment_attention(query[:, 0], key[:, 0], value[:, 0], bounds, longest, scale)
    elif isinstance(inference_context, DecodeContext):
        keys, values = inference_context.cache(module.layer_number)
        places = inference_context.blocks, inference_context.offsets
        invariant.append(key[:, 0], value[:, 0], keys, values, *places)
        bounds = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        lengths, table = inference_context.lengths.int(), inference_context.table
        out = invariant.paged_attention(query[:, 0], keys, values, bounds, 1, lengths, table, scale)
    else:
        layer = module.layer_number - module._get_pp_layer_offset_for_inference()
        inference_context.append_key_value_cache(layer, key, value)
        keys, values, block_table = inference_context.key_value_cache(layer)
        bounds, longest = inference_context.cu_query_lengths()
        _, kv_lengths, _ = inference_context.cu_kv_lengths()
        out = invariant.paged_attention(query[:, 0], keys, values, bounds, longest, kv_lengths, block_table, scale)
    return module.linear_proj(out.flatten(1)[:, None])
