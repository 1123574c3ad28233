"""The experts of every token in the KV cache, so that training can replay them."""

import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor


class RoutingCache:
    """Beside each block of the KV cache, the experts that its tokens were sent to as their keys and values were made.

    Whoever shares a block, as the prompts of a group do, shares both.  What is computed again, after an eviction or
    under new weights, is recorded again: a rollout has the routing of the keys and values that it ended with.

    Megatron has a store of the same kind (`KVBlockAllocator.block_routing`), on the CPU, which walks over the blocks of
    each step in Python.

    Args:
        context: of the engine.
        layers: those that have experts.
    """

    def __init__(self, context: DynamicInferenceContext, config, layers: int):
        self._context, self._sequence_parallel = context, config.sequence_parallel
        self._blocks = torch.zeros(
            (context.kv_block_allocator.total_count, context.block_size_tokens, layers, config.moe_router_topk),
            dtype=torch.uint8 if config.num_moe_experts <= 256 else torch.int16,
            device=context.gpu_view.token_to_block_idx.device,
        )
        self._ended: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Forgets the requests that have ended."""
        self._ended.clear()

    def record(self, tp_group: torch.distributed.ProcessGroup) -> None:
        """After the forward pass of a step of Megatron's: what its routers chose."""
        n, view = self._context.active_token_count, self._context.gpu_view
        places = view.token_to_local_position_within_kv_block[:n].long()
        self.record_at(view.token_to_block_idx[:n], places, tp_group)

    def record_at(self, blocks: Tensor, places: Tensor, tp_group: torch.distributed.ProcessGroup) -> None:
        """Of a pass over tokens whose blocks, and places there, are these, `[n]` both; padding comes behind them."""
        chosen = torch.stack(RouterReplay.get_recorded_data(), dim=1)
        if self._sequence_parallel:
            chosen = gather_from_sequence_parallel_region(chosen, group=tp_group)
        self._blocks[blocks, places] = chosen[: len(blocks)].to(self._blocks.dtype)

    def end(self, rows: Tensor, lengths: Tensor) -> None:
        """Keeps the routing of requests before the context releases their blocks.

        Args:
            rows: int64 `[n]`, places of the requests in the context.
            lengths: int `[n]`, tokens that each has in the KV cache.
        """
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            used = -(-length // self._blocks.shape[1])
            blocks = self._context.request_to_kv_block_ids[row, :used].long().to(self._blocks.device)
            self._ended[int(self._context.request_ids[row])] = self._blocks[blocks].flatten(0, 1)[:length].cpu()

    def take(self, request: int) -> Tensor:
        """`[tokens in the KV cache, layers, top-k]` of a request that has ended, once."""
        return self._ended.pop(request)
