"""Megarl's steps of Megatron's engine: its schedulers and its context, without its work in Python.

The stock step turns samples and log-probabilities into lists and walks over all requests twice.  Here both stay
tensors, single requests are looked at only when they end, and where all of them decode, one step of the engine is many
of the model (`megarl.rollout.decode`).
"""

from dataclasses import dataclass

import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    DecodeOnly,
    DynamicBatchControllerStepResult,
    TextGenerationController,
)
from torch import Tensor

from megarl.rollout.decode import DecodeRun, Sampled
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

    def append(self, requests: Tensor, sampled: Sampled) -> None:
        """What each of `requests` (int64 `[n]`, distinct) has sampled."""
        step = torch.arange(len(sampled.tokens))[:, None].expand_as(sampled.tokens)
        real = step < sampled.taken
        request = requests.expand_as(sampled.tokens)[real]
        place = self.count[request] + step[real]
        self.tokens[request, place] = sampled.tokens[real]
        self.log_probs[request, place] = sampled.log_probs[real]
        self.count[requests] += sampled.taken


class Controller(TextGenerationController):
    """Samples with `megarl.rollout.sampling` and ends requests at any of several stop tokens."""

    decode: DecodeRun
    """Set once the context has its memory."""
    most_steps: int | None = None
    """Of the model in the next step of the engine; None: as many as are good."""
    steps = 0
    """Of the model, in the last step of the engine."""

    def __init__(self, wrapper, tokenizer, sampler: Sampler):
        super().__init__(wrapper, tokenizer)
        self._sampling = self.sampler = sampler
        self._stop_ids = torch.empty(0, dtype=torch.long)

    def begin(self, stop_ids: tuple[int, ...]) -> None:
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.long)

    async def _run_legacy_step(self, skip_bookkeeping: bool | None = False) -> DynamicBatchControllerStepResult:
        """Megatron's, where this rank or one that steps with it reads prompts; else a run of decode steps."""
        context = self.inference_wrapped_model.inference_context
        rows = context.get_active_request_count()
        decodes = rows > 0 and not context.num_prefill_requests
        steps, most_rows = self.decode.agreed(context.reserve(self._most_steps) if decodes else 0, rows)
        self.steps = max(1, steps)
        if not steps:
            if decodes:
                context.advance(torch.ones(rows, dtype=torch.long))
            return await super()._run_legacy_step(skip_bookkeeping)
        with torch.inference_mode():
            sampled, goes_on = self._decode(context, steps, most_rows)
            context.advance(sampled.taken)
            last = sampled.tokens.gather(0, sampled.taken[None] - 1)[0]
            output = {
                "accepted_tokens": None,
                "log_probs": None,
                "cuda_graph_request_count": None,
                **self._end(context, sampled, goes_on, last),
            }
        return DynamicBatchControllerStepResult(decode_only=DecodeOnly(consumed=True, launched=True), output=output)

    @property
    def _most_steps(self) -> int:
        return min(self.decode.most_steps, self.most_steps or self.decode.most_steps)

    def _decode(self, context, steps: int, rows: int) -> tuple[Sampled, Tensor]:
        active = slice(context.paused_request_count, context.total_request_count)
        requests = context.request_ids[active].long()
        place = context.request_kv_length_offsets[active].long()
        packed = torch.stack(
            [
                context.token_to_input_ids[: len(place)],
                place,
                context.get_max_sequence_lengths().long(),
                context.prompts.offset[context.prompts.prompt_of_request[requests]],
                self.sampler.keys[requests],
            ]
        )
        table = context.request_to_kv_block_ids[active]
        sampled, goes_on = self.decode.run(steps, rows, packed, table, self.sampler.options)
        self.steps = len(sampled.tokens)
        return sampled, goes_on

    @torch.inference_mode()
    def idle(self) -> None:
        """The step of a rank without requests, for the sake of those that it shares experts with."""
        context = self.inference_wrapped_model.inference_context
        steps, rows = self.decode.agreed(self._most_steps, 0)
        self.steps = max(1, steps)
        if steps:
            nothing = torch.empty((5, 0), dtype=torch.long)
            self.decode.run(steps, rows, nothing, context.request_to_kv_block_ids[:0], self.sampler.options)
            return
        prompts, context.prompts = context.prompts, None
        try:
            self.dummy_forward()
        finally:
            context.prompts = prompts

    def _dynamic_step_log_probs_bookkeeping(self):
        return True, False

    def _dynamic_step_calculate_log_probs(self):
        return None, None  # they come with the sample

    def _router_record_bookkeeping(self) -> None:
        """Into the routing cache, and not into Megatron's store."""
        routing = self.inference_wrapped_model.inference_context.routing
        if routing is not None:
            routing.record(self.inference_wrapped_model.tp_group)

    def _dynamic_step_context_bookkeeping(self) -> dict:
        """Ends what sampled a stop token or is as long as asked for."""
        context = self.inference_wrapped_model.inference_context
        active = slice(context.paused_request_count, context.total_request_count)
        tokens = self._sampled_tokens_cuda[: active.stop - active.start].cpu()
        sampled = Sampled(tokens[None], self.sampler.selected.cpu()[None], torch.ones_like(tokens))
        goes_on = context.get_active_sequence_lengths() + 1 < context.get_max_sequence_lengths()
        goes_on &= ~torch.isin(tokens, self._stop_ids)
        # A prompt that is not whole yet goes on whatever its last place predicted.
        goes_on |= context.request_ids[active] == context.chunked_prefill_request_id
        return self._end(context, sampled, goes_on, tokens)

    def _end(self, context, sampled: Sampled, goes_on: Tensor, last: Tensor) -> dict:
        """Lets the context go on with the requests that do, after their `last` tokens."""
        active = slice(context.paused_request_count, context.total_request_count)
        requests = context.request_ids[active].long()
        if context.routing is not None:
            lengths = context.get_active_sequence_lengths()
            context.routing.end((~goes_on).nonzero().flatten() + active.start, lengths[~goes_on])
        updated = context.update_requests(goes_on.byte(), last.clone(), None)
        return {
            "active_request_ids": requests,
            "finished_request_ids": requests[~goes_on],
            "sample": sampled,
            **(updated or {}),
        }


class SteppingEngine(DynamicInferenceEngine):
    """Writes each step's tokens into `completions`; the stock engine's schedulers and context do the rest."""

    completions: Completions

    def step(self, most: int | None = None) -> int:
        """A step with prompts, or several without: at most `most`.

        Returns:
            How many.
        """
        self.controller.most_steps = most
        self.step_modern()
        return self.controller.steps

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
        sample: Sampled,
        accepted_tokens,
        log_probs,
        consumed_chunked_prefill_request_id,
        **_,
    ):
        """The same contract as the stock method's, for completions instead of request records."""
        if consumed_chunked_prefill_request_id >= 0:  # its prompt goes on: what was sampled is no token
            whole = request_ids != consumed_chunked_prefill_request_id
            request_ids = request_ids[whole]
            sample = Sampled(sample.tokens[:, whole], sample.log_probs[:, whole], sample.taken[whole])
        self.completions.append(request_ids, sample)
        self.finished_request_count += finished_request_ids.numel()
        for request_id in finished_request_ids.tolist():
            del self.requests[request_id]
        if evict_request_ids is not None and evict_request_ids.numel():
            self._requeue(evict_request_ids.tolist())
        return [], []

    def idle_step(self, most: int | None = None) -> int:
        """Forward passes over tokens that nobody asked for, at most `most`: this rank has no requests, but ranks that
        it shares experts with do, and wait for its part in each of their steps.

        Returns:
            How many.
        """
        assert not self.has_unfinished_requests()
        self.controller.most_steps = most
        self.controller.idle()
        self.context.step_count += 1
        self.context.prefix_cache_lru_clock += 1
        return self.controller.steps

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
