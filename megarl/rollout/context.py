"""The two Megatron classes that must know about media: the inference context and the model wrapper."""

import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.models.common.embeddings.rope_utils import _rotate_half, apply_rotary_pos_emb
from torch import Tensor

from megarl.platform.kernels import kernels
from megarl.rollout.features import FeatureCache
from megarl.rollout.prompts import PromptTable
from megarl.rollout.routing import RoutingCache


class MediaContext(DynamicInferenceContext):
    """Knows the live prompts, and takes one rotary angle per token of the step where Megatron's context
    takes a table of angles by position."""

    # A step's tokens are padded to this; 64 suits a GPU's kernels and costs a CPU up to 63 rows of work.
    TOKEN_ROUNDER = DynamicInferenceContext.TOKEN_ROUNDER if kernels().gpu else 4

    prompts: PromptTable | None = None
    """None while CUDA graphs are captured, and in a step for the sake of other ranks."""
    routing: RoutingCache | None = None
    """None where nobody asks for the experts of a token."""
    _angles_of: Tensor | None = None

    # Megatron would ask its globals, which know the trainer's tensor-parallel size.
    def round_up_tokens(self, value, tp_size=None):
        return super().round_up_tokens(value, tp_size or self.config.pg_collection.tp.size())

    def round_up_requests(self, value, tp_size=None):
        return super().round_up_requests(value, tp_size or self.config.pg_collection.tp.size())

    def step_tokens(self) -> tuple[Tensor, Tensor]:
        """Request ids and places in their requests of the step's tokens, both int64 `[tokens]` on the CPU."""
        n = self.active_token_count
        return self.request_ids[self.token_to_request_idx[:n]].long(), self.token_to_position_in_request[:n].long()

    def _rotate(self, t: Tensor, freqs: Tensor, config, cp_group, mscale: float) -> Tensor:
        """`t` `[padded tokens, 1, heads, dim]` turned by `freqs` `[padded tokens, 1, 1, dim]`."""
        if config.apply_rope_fusion or self.using_cuda_graph_this_step():
            return apply_rotary_pos_emb(t=t, freqs=freqs, config=config, cp_group=cp_group, mscale=mscale)
        if freqs is not self._angles_of:  # once a step: all layers share the angles
            self._angles_of = freqs
            self._cos, self._sin = ((f(freqs) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))
        return t * self._cos + _rotate_half(t, config.rotary_interleaved) * self._sin

    def apply_rotary_emb_query(self, query, query_emb, config, cu_seqlens_q, cp_group, mscale=1.0):
        return self._rotate(query, query_emb, config, cp_group, mscale)

    def apply_rotary_emb_key(self, key, key_emb, config, cp_group, mscale=1.0):
        return self._rotate(key, key_emb, config, cp_group, mscale)


class MediaWrapper(GPTInferenceWrapper):
    """One engine step through the language model.  Where the step has media tokens their items' features are
    gathered, and with them the tower is run, if need be, before the language model is entered."""

    def __init__(self, model, context: MediaContext, features: FeatureCache):
        super().__init__(model.language_model, context)
        self.merge, self.features = model.merge, features

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
