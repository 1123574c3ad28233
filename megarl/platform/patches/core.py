"""Patches to megatron-core."""

import functools

from megarl.platform.kernels import Kernels
from megarl.platform.patches import CORE, Patch


def _torch_attention(kernels: Kernels) -> bool:
    return kernels.attention == "torch"


def _paged_attention() -> None:
    from megatron.core.transformer import attention

    from megarl.platform.attention import paged_decode, paged_varlen

    attention.is_fa_min_version = lambda *args: True
    attention.flash_attn_varlen_func = paged_varlen
    attention.flash_attn_with_kvcache = paged_decode


def _one_split() -> None:
    from megatron.core.transformer import attention

    stock = attention.flash_attn4_varlen_func

    @functools.wraps(stock)
    def one_split(*args, **kwargs):
        return stock(*args, **{**kwargs, "num_splits": 1})

    attention.flash_attn4_varlen_func = one_split


def _torch_kv_append() -> None:
    from megatron.core.inference.contexts import dynamic_context

    dynamic_context.triton_append_key_value_cache = None  # the context has a torch path of its own


def _graph_argument_types() -> None:
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.transformer import cuda_graphs

    stock = cuda_graphs._check_supported_type

    def check(meta):
        if not (isinstance(meta.type, type) and issubclass(meta.type, DynamicInferenceContext)):
            stock(meta)

    cuda_graphs._check_supported_type = check


PATCHES = [
    Patch(
        "paged-attention",
        "the dynamic engine needs flash-attention's paged kernels; torch versions stand in",
        CORE,
        "megatron/core/transformer/attention.py",
        'HAVE_FA4 or HAVE_FA3 or is_fa_min_version("2.7.3")',
        _torch_attention,
        _paged_attention,
    ),
    Patch(
        "fa4-splits",
        "FlashAttention-4's split-KV kernel refuses Hopper, and num_splits=0 may choose it",
        CORE,
        "megatron/core/transformer/attention.py",
        "num_splits=0 if not self.batch_invariant_mode else 1",
        lambda kernels: kernels.attention == "flash-attn-4",
        _one_split,
    ),
    Patch(
        "kv-append",
        "a Triton kernel writes the KV cache wherever Triton can be imported, a CPU included",
        CORE,
        "megatron/core/inference/contexts/dynamic_context.py",
        "if triton_append_key_value_cache is not None and not self.cache_mla_latent:",
        lambda kernels: not kernels.gpu,
        _torch_kv_append,
    ),
    Patch(
        "graph-argument-types",
        "CUDA graphs accept DynamicInferenceContext itself but no subclass of it",
        CORE,
        "megatron/core/transformer/cuda_graphs.py",
        "assert meta.type in _SUPPORTED_TYPES or is_dataclass(",
        lambda kernels: kernels.gpu,
        _graph_argument_types,
    ),
]
