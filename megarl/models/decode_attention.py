"""Self-attention of a decode step: one token a row, over a paged KV cache, with all that it reads on the device."""

from types import SimpleNamespace

import megarl.platform.prepare  # noqa: F401

import torch
from torch import Tensor

from megarl.platform.attention import paged_decode
from megarl.platform.kernels import kernels


class DecodeContext:
    """Megatron's inference context of a decode step.

    Args:
        memory: KV cache `[2, layers, blocks, block, groups, dim]`.
        layers: place there of each layer, counted from 0.
        dummy_block: written to by rows without a request.
    """

    # What Megatron's modules ask a context in the forward pass.
    config = SimpleNamespace(materialize_only_last_token_logits=False)
    num_speculative_tokens = 0

    def is_static_batching(self) -> bool:
        return False

    def is_dynamic_batching(self) -> bool:
        return True

    def is_decode_only(self) -> bool:
        return True

    def using_cuda_graph_this_step(self) -> bool:
        return False

    def __init__(self, memory: Tensor, layers: dict[int, int], dummy_block: int):
        self._memory, self._layers, self._dummy = memory, layers, dummy_block

    def begin(self, places: Tensor, table: Tensor, live: Tensor) -> None:
        """The rows of the next step.

        Args:
            places: int64 `[n]`, of each row's token in its request.
            table: int32 `[n, pages]`, blocks of the request.
            live: bool `[n]`: whether there is one.
        """
        size = self._memory.shape[3]
        block = table.gather(1, (places // size)[:, None])[:, 0].long()
        self.blocks, self.offsets = torch.where(live, block, self._dummy), places % size
        self.lengths, self.table = places + 1, table

    def cache(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, counted from 1: `[blocks, block, groups, dim]`."""
        layer = self._layers[layer_number - 1]
        return self._memory[0, layer], self._memory[1, layer]


def decode(attention, hidden_states: Tensor, step: DecodeContext, angles: Tensor) -> Tensor:
    """Queries, keys and values of a step's tokens; keys and values go into the cache, which the queries attend to.

    Args:
        attention: `megarl.models.decoder.DualSelfAttention`.
        hidden_states: `[n, 1, hidden]`, cut under sequence parallelism.
        angles: `[n, 1, 1, dim]`.

    Returns:
        `[n, 1, heads of this rank * dim]`.
    """
    config = attention.config
    keys, values = step.cache(attention.layer_number)
    scale = attention.hidden_size_per_attention_head**-0.5
    if kernels().gpu and config.num_query_groups >= attention.world_size:
        from megarl.platform.decode_kernels import append_rotated, attend_pages

        mixed, _ = attention.linear_qkv(hidden_states)
        query = append_rotated(
            mixed.view(len(mixed), attention.head_layout.groups, -1),
            angles[:, 0, 0],
            *attention.head_norms,
            config.layernorm_epsilon,
            keys,
            values,
            step.blocks,
            step.offsets,
        )
        out = attend_pages(query, keys, values, step.lengths, step.table, scale)
        return out.view(len(out), 1, -1)
    query, key, value = attention.query_key_value(hidden_states, angles)
    keys[step.blocks, step.offsets], values[step.blocks, step.offsets] = key, value
    out = paged_decode(
        query[:, None],
        keys,
        values,
        cache_seqlens=step.lengths,
        block_table=step.table,
        softmax_scale=scale,
        window_size=(-1, -1),
    )
    return out.view(len(out), 1, -1)
