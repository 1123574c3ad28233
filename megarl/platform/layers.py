"""Layer-spec modules that need torch alone: used where transformer-engine is not installed."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from megarl.platform.attention import segment_attention


class Norm:
    """RMSNorm or LayerNorm by `config.normalization`, marked for sequence parallelism.

    Megatron's own torch norm refuses sequence parallelism; all it lacks is the mark by which
    `finalize_model_grads` sums the weight's gradient over the tensor-parallel ranks.
    """

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class CoreAttention(MegatronModule):
    """Scaled dot-product attention, batched `[s, b, h, d]` or packed `[t, h, d]`."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.attn_mask_type = attn_mask_type
        self.softmax_offset = None  # read by Megatron's SelfAttention

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
        **_,
    ):
        """Returns `[s, b, h * d]`, or `[t, h * d]` when packed; the mask type decides, never `attention_mask`."""
        causal = "causal" in (attn_mask_type or self.attn_mask_type).name
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q
            return segment_attention(query, key, value, bounds, self.scale, causal).flatten(1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)
