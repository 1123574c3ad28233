"""The two Megatron classes that must know about media: the inference context and the model wrapper."""

import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from torch import Tensor

from megarl.models.decode_attention import DecodeContext
from megarl.platform.kernels import kernels
from megarl.rollout.features import FeatureCache
from megarl.rollout.prompts import PromptTable
from megarl.rollout.routing import RoutingCache


class MediaContext(DynamicInferenceContext):
    """Knows the live prompts, and makes room for many steps at once."""

    # A step's tokens are padded to this; 64 suits a GPU's kernels and costs a CPU up to 63 rows of work.
    TOKEN_ROUNDER = DynamicInferenceContext.TOKEN_ROUNDER if kernels().gpu else 4

    prompts: PromptTable | None = None
    """None in a step for the sake of other ranks."""
    routing: RoutingCache | None = None
    """None where nobody asks for the experts of a token."""

    # Megatron would ask its globals, which know the trainer's tensor-parallel size.
    def round_up_tokens(self, value, tp_size=None):
        return super().round_up_tokens(value, tp_size or self.config.pg_collection.tp.size())

    def round_up_requests(self, value, tp_size=None):
        return super().round_up_requests(value, tp_size or self.config.pg_collection.tp.size())

    def step_tokens(self) -> tuple[Tensor, Tensor]:
        """Request ids and places in their requests of the step's tokens, both int64 `[tokens]` on the CPU."""
        n = self.active_token_count
        return self.request_ids[self.token_to_request_idx[:n]].long(), self.token_to_position_in_request[:n].long()

    def reserve(self, steps: int) -> int:
        """Gives the live requests, all of which decode, the blocks of the KV cache for up to `steps` steps.

        Returns:
            For how many: no more than until the last of them is as long as asked for, and fewer where blocks are
            scarce.  For one step the stock bookkeeping has made room already.
        """
        active, size = slice(self.paused_request_count, self.total_request_count), self.block_size_tokens
        place, held = self.request_kv_length_offsets[active], self.request_kv_block_counts[active]
        left = self.get_max_sequence_lengths() - place - 1
        steps = min(steps, int(left.max()))
        while steps > 1:
            missing = ((place + left.clamp(max=steps) - 1) // size + 1 - held).clamp(min=0)
            wanted = int(missing.sum())
            if not wanted:
                return steps
            if wanted <= self.kv_block_allocator.get_active_avail():
                blocks = self.kv_block_allocator.allocate_memory_blocks(wanted)
                if blocks is not None:
                    row = torch.repeat_interleave(torch.arange(len(missing)), missing)
                    nth = torch.arange(wanted) - (missing.cumsum(0) - missing)[row]
                    self.request_to_kv_block_ids[active][row, held[row] + nth] = blocks
                    held += missing
                    return steps
            steps //= 2
        return 1

    def advance(self, taken: Tensor) -> None:
        """All steps of a run but the last, which `update_requests` will count: each live request has taken `taken`
        (int64 `[requests]`).  Blocks that were reserved for more of them are given back."""
        active, size = slice(self.paused_request_count, self.total_request_count), self.block_size_tokens
        place = self.request_kv_length_offsets[active]
        place += (taken - 1).to(place.dtype)
        self.request_last_kv_block_offset[active] = place % size
        last = (place // size).long()
        table, held = self.request_to_kv_block_ids[active], self.request_kv_block_counts[active]
        self.request_last_kv_block_id[active] = table.gather(1, last[:, None])[:, 0]
        spare = (torch.arange(table.shape[1]) > last[:, None]) & (table >= 0)
        self.kv_block_allocator.release_memory_blocks(table[spare])
        table[spare] = -1
        held.copy_(last + 1)


class MediaWrapper(GPTInferenceWrapper):
    """One engine step through the language model.  Where the step has media tokens their items' features are
    gathered, and with them the tower is run, if need be, before the language model is entered."""

    def __init__(self, model, context: MediaContext, features: FeatureCache):
        super().__init__(model.language_model, context)
        self.merge, self.features = model.merge, features

    def decode(self, tokens: Tensor, positions: Tensor, context: DecodeContext) -> Tensor:
        """Logits `[1, n, vocabulary]` of a step that `megarl.rollout.decode` takes: no media is in it."""
        return self.model(tokens, positions, None, inference_context=context, runtime_gather_output=True)

    def _forward(self, inference_input) -> Tensor:
        tokens, context = inference_input["tokens"], self.inference_context
        positions, rows = self._positions_and_rows(tokens)
        embeddings, extra = None, {}
        if rows is not None:
            needed, local = context.prompts.needed_items(rows)
            items = context.prompts.items
            found = self.features.gather([items[i] for i in needed], ahead=items[needed[-1] + 1 :])
            merged = self.merge(tokens[0], local.to(tokens.device), found)
            embeddings, extra = merged.embeddings, merged.extra
        return self.model(
            tokens,
            positions,
            inference_input["attention_mask"],
            decoder_input=embeddings,
            inference_context=context,
            runtime_gather_output=True,
            **extra,
        )

    def _positions_and_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Positions int64 `[3, 1, padded tokens]` on the model's device; feature rows (`PromptTable.lookup`) int64
        `[padded tokens]` on the CPU if this step has media."""
        context, padded = self.inference_context, tokens.shape[1]
        positions = torch.zeros(3, padded, dtype=torch.long)
        if context.prompts is None:
            return positions[:, None].to(tokens.device), None
        requests, places = context.step_tokens()
        n, media = requests.numel(), None
        if context.is_decode_only():
            positions[:, :n] = context.prompts.decode_positions(requests, places)
        else:
            positions[:, :n], rows = context.prompts.lookup(requests, places)
            if bool((rows >= 0).any()):
                media = torch.full((padded,), -1)
                media[:n] = rows
        return positions[:, None].to(tokens.device), media
