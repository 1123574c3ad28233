"""Megatron's engine and controller without the work that grows with requests in Python.

The stock step turns samples and log-probabilities into lists and walks over all requests twice.  Here
both stay tensors: a step writes one column of the results and looks at single requests only when they end.
"""

from dataclasses import dataclass

import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from torch import Tensor

from megarl.rollout.sampling import Sampler


@dataclass(eq=False)
class Completions:
    """What was sampled so far, by request id; on the CPU."""

    tokens: Tensor
    """int64 `[requests, max_new_tokens]`."""
    log_probs: Tensor
    """float32 `[requests, max_new_tokens]`, of the sampling distribution."""
    count: Tensor
    """int64 `[requests]`: tokens of each."""

    @classmethod
    def empty(cls, requests: int, max_new_tokens: int) -> "Completions":
        shape = (requests, max_new_tokens)
        return cls(torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.zeros(requests, dtype=torch.long))

    def append(self, requests: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """One token for each of `requests` (int64 `[n]`, distinct)."""
        place = self.count[requests]
        self.tokens[requests, place] = tokens
        self.log_probs[requests, place] = log_probs
        self.count[requests] = place + 1


class Controller(TextGenerationController):
    """Samples with `megarl.rollout.sampling` and ends requests at any of several stop tokens."""

    def __init__(self, wrapper, tokenizer, sampler: Sampler):
        super().__init__(wrapper, tokenizer)
        self._sampling = self.sampler = sampler
        self._stop_ids = torch.empty(0, dtype=torch.long)

    def begin(self, stop_ids: tuple[int, ...]) -> None:
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.long)

    def _dynamic_step_log_probs_bookkeeping(self):
        return True, False

    def _dynamic_step_calculate_log_probs(self):
        return self.sampler.selected.cpu(), None

    def _router_record_bookkeeping(self) -> None:
        """Into the routing cache, and not into Megatron's store."""
        routing = self.inference_wrapped_model.inference_context.routing
        if routing is not None:
            routing.record(self.inference_wrapped_model.tp_group)

    def _dynamic_step_context_bookkeeping(self) -> dict:
        """Ends what sampled a stop token or is as long as asked for, and lets the context go on with the rest."""
        context = self.inference_wrapped_model.inference_context
        active = slice(context.paused_request_count, context.total_request_count)
        sampled = self._sampled_tokens_cuda[: active.stop - active.start].cpu()
        requests = context.request_ids[active].long()
        lengths = context.get_active_sequence_lengths()
        goes_on = lengths + 1 < context.get_max_sequence_lengths()
        goes_on &= ~torch.isin(sampled, self._stop_ids)
        # A prompt that is not whole yet goes on whatever its last place predicted.
        goes_on |= requests == context.chunked_prefill_request_id
        if context.routing is not None:
            context.routing.end((~goes_on).nonzero().flatten() + active.start, lengths[~goes_on])
        updated = context.update_requests(goes_on.byte(), sampled.clone(), None)
        return {
            "active_request_ids": requests,
            "finished_request_ids": requests[~goes_on],
            "sample": sampled,
            **(updated or {}),
        }


class SteppingEngine(DynamicInferenceEngine):
    """Writes each step's tokens into `completions`; the stock engine's schedulers and context do the rest."""

    completions: Completions

    def begin(self, requests: int, max_new_tokens: int) -> None:
        """Before the first of `requests` requests, numbered from 0, is added."""
        assert not self.requests
        self.completions = Completions.empty(requests, max_new_tokens)

    def post_process_requests(
        self,
        request_ids,
        finished_request_ids,
        evict_request_ids,
        step_time,
        sample,
        accepted_tokens,
        log_probs,
        consumed_chunked_prefill_request_id,
        **_,
    ):
        """The same contract as the stock method's, for completions instead of request records."""
        if consumed_chunked_prefill_request_id >= 0:  # its prompt goes on: what was sampled is no token
            whole = request_ids != consumed_chunked_prefill_request_id
            request_ids, sample, log_probs = request_ids[whole], sample[whole], log_probs[whole]
        self.completions.append(request_ids, sample, log_probs)
        self.finished_request_count += finished_request_ids.numel()
        for request_id in finished_request_ids.tolist():
            del self.requests[request_id]
        if evict_request_ids is not None and evict_request_ids.numel():
            self._requeue(evict_request_ids.tolist())
        return [], []

    def idle_step(self) -> None:
        """One forward pass over a token that nobody asked for: this rank has no requests, but ranks that it shares
        experts with do, and wait for its part in each of their steps."""
        assert not self.has_unfinished_requests()
        prompts, self.context.prompts = self.context.prompts, None
        try:
            self.controller.dummy_forward()
        finally:
            self.context.prompts = prompts
        self.context.step_count += 1
        self.context.prefix_cache_lru_clock += 1

    def restart_requests(self) -> None:
        """The KV cache of live requests is worth nothing any more: when the engine, which is suspended, wakes up,
        each begins again with what it sampled as part of its prompt."""
        assert self.state is EngineState.SUSPENDED
        waiting = [*self.resume_request_ids, *self.waiting_request_ids]
        self.waiting_request_ids.clear()
        begun = sorted(self.requests.keys() - set(waiting))
        for request_id in begun:
            self._continue_as_prompt(request_id)
        for request_id in waiting:
            request = self.get_request(request_id)
            request.remaining_prompt_tokens, request.finished_chunk_token_count = request.prompt_tokens, 0
        self.resume_request_ids = [*begun, *waiting]
        self.context.reset()

    def _continue_as_prompt(self, request_id: int) -> None:
        record = self.requests[request_id].record
        earlier = sum(len(request.generated_tokens) for request in record.requests[:-1])
        count = int(self.completions.count[request_id])
        record[-1].generated_tokens = self.completions.tokens[request_id, earlier:count].tolist()
        record.checkpoint()

    def _requeue(self, evicted: list[int]) -> None:
        """Puts evicted requests at the head of the queue."""
        for request_id in evicted:
            self._continue_as_prompt(request_id)
        self.evicted_request_count += len(evicted)
        self.waiting_request_ids.extendleft(evicted)
        if self.context.chunked_prefill_request_id != -1:  # must stay first
            self.waiting_request_ids.remove(self.context.chunked_prefill_request_id)
            self.waiting_request_ids.appendleft(self.context.chunked_prefill_request_id)
